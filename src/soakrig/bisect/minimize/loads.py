"""What the journal of a minimisation says of each load: faults, exposure, and why one cannot be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from soakrig.bisect.journal import Journal
from soakrig.bisect.journal_rows import RunRow
from soakrig.bisect.launch_result import turn_signature
from soakrig.bisect.minimize.decision import Seen
from soakrig.bisect.minimize.material import Material
from soakrig.bisect.minimize.shape import Shape
from soakrig.errors import SoakrigError
from soakrig.record.events import TurnDone
from soakrig.record.store import RunReader

OTHERS = 3
"""Launches of one load that end in another fault, after which it is not used."""
WHOLE = {"error_frame": ("http_error",), "truncated": ("malformed", "refused"), "malformed": ("truncated", "refused")}
"""Outcome of a streamed turn -> what the same end looks like to one who did not ask for a stream."""


@dataclass(frozen=True)
class Loads:
    """``seen``: of each load. ``refused``: loads that give another fault, with which."""

    seen: dict[Shape, Seen]
    refused: dict[Shape, str]


def loads_seen(journal: Journal, material: Material, whole: Shape) -> Loads:
    """Settled launches by load. A launch that ended in another fault says nothing of its load; but of the run's own it
    is exposure without the fault: left out, it would raise the hazard that all others are held against."""
    faults: Counter[Shape] = Counter()
    exposure: Counter[Shape] = Counter()
    others: dict[Shape, list[str]] = {}
    for run in journal.runs():
        if run.state != "settled" or run.evidence().void:
            continue
        shape = Shape.read(run.arm)
        faulted = run.signature is not None and is_the_fault(run, shape, material, journal.folder)
        if run.signature is not None and not faulted:
            others.setdefault(shape, []).append(run.signature)
            if shape != whole:
                continue
        faults[shape] += faulted
        exposure[shape] += int(run.exposure)
    seen = {shape: Seen(faults[shape], float(turns)) for shape, turns in exposure.items()}
    refused = {
        shape: f"gives another fault: {Counter(names).most_common(1)[0][0]}"
        for shape, names in others.items()
        if len(names) >= OTHERS and not faults[shape]
    }
    return Loads(seen, refused)


def is_the_fault(run: RunRow, shape: Shape, material: Material, folder: Path) -> bool:
    """Whether a launch's fault is the one that is looked for. The answer of a server that breaks looks otherwise where
    no stream was asked for; and a request that is refused (status below 500) is no fault of the engine, unless it was
    one in the run."""
    wanted = material.signature
    alike = {wanted}
    if not shape.stream:
        for name, whole in WHOLE.items():
            if wanted == turn_signature(name):
                alike.update(turn_signature(one) for one in whole)
    if run.signature not in alike:
        return False
    if run.signature != turn_signature("http_error"):
        return True
    status = _last_status(folder / "runs" / run.folder)
    return status is not None and (status >= 500 if material.status is None else status == material.status)


def measured_context(journal: Journal, shape: Shape) -> int | None:
    """Tokens of the largest prompt of a load, as the engine counted; None where it did not."""
    prompts = [
        event.prompt_tokens
        for run in journal.runs()
        if run.arm == shape.name and run.folder
        for event in _turns(journal.folder / "runs" / run.folder)
        if event.prompt_tokens
    ]
    return max(prompts, default=None)


def _last_status(folder: Path) -> int | None:
    return next((one.status for one in reversed(list(_turns(folder))) if one.outcome == "http_error"), None)


def _turns(folder: Path) -> Iterable[TurnDone]:
    try:
        return [event for event in RunReader(folder).events() if isinstance(event, TurnDone)]
    except SoakrigError:
        return []
