"""What every face of a report says of runs with the same settings that contradict its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from soakrig.record.corrections import Corrections
from soakrig.record.run_summary import RunSummary

MOST_NAMED = 3
"""Runs named in one sentence; the index has them all."""


def headline(found: Corrections) -> str:
    """The correction in a few words, for a row of a list or above a verdict."""
    if found.outlived_by:
        return f"OUTLIVED: a later run with the same settings faulted, {found.outlived_by[0].id}"
    if found.not_cleared:
        return f"NOT CLEARED: an earlier run with the same settings faulted, {found.not_cleared[-1].id}"
    if found.corrects:
        return f"CORRECTS an earlier pass with the same settings, {found.corrects[-1].id}"
    return f"STANDS: later passes with the same settings do not clear it, {found.not_clearing[-1].id}"


def correction_lines(found: Corrections) -> list[str]:
    """The whole of it, a sentence each: who speaks against whom, then the joint figures."""
    lines: list[str] = []
    if found.outlived_by:
        lines.append(
            f"This pass is outlived: with the same settings, {_later(found.outlived_by)} faulted later. It is not the "
            "newest word on these settings."
        )
    if found.not_cleared:
        lines.append(
            f"This pass does not clear the settings: {_earlier(found.not_cleared)} faulted with the same before it. A "
            "clean run after a fault is what a rare fault looks like."
        )
    if found.corrects:
        lines.append(
            f"This fault corrects an earlier verdict: {_earlier(found.corrects)} passed with the same settings."
        )
    if found.not_clearing:
        lines.append(
            f"Later passes do not clear this fault: {_later(found.not_clearing)} passed with the same settings."
        )
    lines.append(joint(found))
    if not found.run.settings_known:
        lines.append(
            "The engine was attached and does not report its settings: that address, model, version and load are the "
            "same is all that is known."
        )
    return lines


def launch_lines(found: Sequence[Corrections]) -> list[str]:
    """Of a campaign: its clean launches that later runs outside of it speak against, by those runs."""
    by: dict[str, list[Corrections]] = {}
    for one in found:
        by.setdefault(one.outlived_by[0].settings, []).append(one)
    return [
        f"Clean here and outlived: {_named([one.run for one in group], len(group) - MOST_NAMED)}. With the same "
        f"settings, {_later(group[0].outlived_by)} faulted later. {joint(group[0])}"
        for group in by.values()
    ]


def joint(found: Corrections) -> str:
    """``All 3 runs with these settings: 1 fault in 180 turns; at 95 % ... (derived, pooled)``"""
    noun = "fault" if found.faults == 1 else "faults"
    text = f"All {found.runs} runs with these settings together: {found.faults} {noun} in {found.exposure:,} turns"
    if found.upper_95 is not None:
        text += f"; at 95 % the chance of a fault is at most {100 * found.upper_95:.3g} % a turn"
    text += " (derived, Clopper-Pearson, as if every turn were as likely to fault)"
    if found.left_out:
        text += f". {found.left_out} inconclusive or void left out: what was not seen is not clean"
    return text + "."


def _later(runs: Sequence[RunSummary]) -> str:
    return _named(list(runs), len(runs) - MOST_NAMED)


def _earlier(runs: Sequence[RunSummary]) -> str:
    return _named(list(runs)[::-1], len(runs) - MOST_NAMED)


def _named(runs: Sequence[RunSummary], more: int) -> str:
    named = ", ".join(_one(run) for run in runs[:MOST_NAMED])
    return f"{named} and {more} more" if more > 0 else named


def _one(run: RunSummary) -> str:
    what = ", ".join(run.signatures)
    try:
        at = datetime.fromtimestamp(run.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        at = "time unknown"
    return f"{run.id} ({at}{'; ' + what if what else ''})"
