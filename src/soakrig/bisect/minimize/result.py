"""The object of ``soak repro minimize --json``, read from the journal: finished or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soakrig.bisect.campaign import ENDED, spent_seconds
from soakrig.bisect.journal import Journal
from soakrig.bisect.minimize.decision import Seen, turns_until
from soakrig.bisect.minimize.loads import loads_seen, measured_context
from soakrig.bisect.minimize.loop import Minimisation, budget_of
from soakrig.bisect.minimize.shape import Shape
from soakrig.bisect.statistics import rate_interval
from soakrig.record.redaction import redact_settings

RESULT = "minimized.json"
STATES = {"decided": "finished", "budget": "budget", "stopped": "stopped", "wedged": "stuck"}


def minimize_result(journal: Journal, made: Minimisation, files: Mapping[str, str]) -> dict[str, Any]:
    """``state``: finished, not_again (the run's own load did not fault any more), budget, stopped, stuck. Exit code 0
    where it is minimal, else 2."""
    path, refused = made.walk(journal)
    seen = loads_seen(journal, made.material, made.whole).seen
    ended = next((note for note in reversed(journal.notes()) if note.what == ENDED), None)
    state = STATES.get(str(ended.detail.get("kind")), "stuck") if ended is not None else "stopped"
    if path.what != "launch":
        state = "finished" if path.what == "minimal" else "not_again"
    best = seen.get(path.best, Seen())
    return {
        "schema": 1,
        "state": state,
        "exit_code": 0 if state == "finished" else 2,
        "why": path.why if path.what != "launch" else str(ended.detail.get("why", "")) if ended is not None else "",
        "run": made.run,
        "folder": str(made.folder),
        "signature": made.material.signature,
        "simulated": "SOAKRIG_PLANT" in made.hunt.settings,
        "engine": made.hunt.engine,
        "settings": redact_settings(made.hunt.settings),
        "from": _load(journal, made.whole, seen),
        "to": _load(journal, path.best, seen),
        "reference": path.reference.name,
        "turns_to_fault": turns_for(best) if best.faults else None,
        "trials": [
            {"axis": one.axis, "load": one.shape.name, "state": one.state, "faults": one.seen.faults,
             "turns": one.seen.exposure, "why": refused.get(one.shape, "")}
            for one in path.trials
        ],
        "launches": len(journal.runs()),
        "void": sum(run.result in ("void", "interrupted") for run in journal.runs()),
        "hours": round(spent_seconds(journal) / 3600.0, 4),
        "budget_hours": budget_of(journal, made.hunt) / 3600.0,
        "demand": {"useful": made.demand.useful, "error": made.demand.error},
        "not_said": not_said(state),
        "files": dict(files),
    }  # fmt: skip


def turns_for(seen: Seen) -> int:
    """Turns in which the fault comes in 19 of 20 tries, by the lower end of its hazard's 95 % interval."""
    low = rate_interval(seen.faults, seen.exposure).low
    return turns_until(low) if low > 0 else 1


def not_said(state: str) -> list[str]:
    """What the result does not mean."""
    said = [
        "Not that every part of the load is a cause: each axis was made smaller with the others as they were then.",
        "Not how often the fault comes elsewhere: the hazard is of this engine, with these settings, on this host.",
    ]
    if state != "finished":
        said.insert(0, "Not that the load is minimal: the search had not come to its end.")
    return said


def _load(journal: Journal, shape: Shape, seen: Mapping[Shape, Seen]) -> dict[str, Any]:
    counted = seen.get(shape, Seen())
    low, estimate, high = rate_interval(counted.faults, counted.exposure)
    measured = measured_context(journal, shape)
    return {
        **shape.facts(),
        "load": shape.name,
        "stream": bool(shape.stream),
        "context": {"value": measured if measured is not None else shape.context, "unit": "tokens",
                    "kind": "measured" if measured is not None else "derived"},
        "faults": counted.faults,
        "turns": counted.exposure,
        "hazard": {"low": low, "estimate": estimate, "high": min(high, 1.0), "unit": "turn",
                   "kind": "measured"} if counted.exposure else None,
    }  # fmt: skip
