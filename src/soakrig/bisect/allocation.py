"""What to run next: baseline, all off, one variable at a time, and back again; and when to stop."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from soakrig.bisect.evidence import Arm, Evidence
from soakrig.bisect.verdicts import Rule, Verdict, judge

LAUNCHES_BETWEEN_CONTROLS = 6
MAX_VOIDS = 3
"""So many void launches of one arm in a row, and it is left alone."""
CONTROL_LEAN = 1.5
"""Within a block an arm may run ahead of its controls by this times the factor to show; then a control says more an
hour: p = (1 + E / (R D0))**-D0 gains as much from a fault of the control as from some 1.5 R of clean exposure."""
ALL_OFF_P = 0.1
"""Chance of so clean an all-off arm at which the cause is taken to be in the list, for the time being."""
BACK_ENOUGH = 0.95


@dataclass(frozen=True)
class Step:
    """The next launch, or the end. ``why`` is for people."""

    kind: Literal["run", "stop"]
    why: str
    arm: Arm | None = None


def next_step(
    evidence: Evidence,
    arms: Sequence[Arm],
    rule: Rule,
    *,
    seed: int = 0,
    after_reboot: bool = False,
    stratum: str | None = None,
    verdicts: dict[str, Verdict] | None = None,
) -> Step:
    """The launch that is worth most now. Pure: the same evidence gives the same step.

    ``seed`` orders what is equal. ``after_reboot``: the last launch was before a reboot, so the control comes first.
    ``stratum``: the host that is free, None where there is one; it needs controls of its own.
    """
    control = next(arm for arm in arms if arm.role == "control")
    here = [run for run in evidence.runs if stratum is None or run.stratum == stratum]
    if _given_up(evidence, control):
        return Step("stop", f"the control was void {MAX_VOIDS} times in a row: {evidence.void(control.name)[-1][1]}")
    faults = evidence.control_faults
    seen = faults.get(stratum, 0) if stratum is not None else max(faults.values(), default=0)
    if seen < rule.min_control_faults:
        return Step("run", f"baseline: {seen} of {rule.min_control_faults} faults of the control seen", control)
    if after_reboot:
        return Step("run", "first launch after a reboot", control)
    found = verdicts if verdicts is not None else judge(evidence, arms, rule)
    arm, why = _worth_most(evidence, arms, rule, found, random.Random(f"{seed}-{len(evidence.runs)}"))  # noqa: S311
    if arm is None:
        return Step("stop", why)
    since = next((n for n, run in enumerate(reversed(here)) if run.arm == control.name), len(here))
    if since >= LAUNCHES_BETWEEN_CONTROLS:
        return Step("run", f"{since} launches since the last control", control)
    cell = evidence.newest_cell(arm.name)
    if since and cell and cell.arm_exposure > CONTROL_LEAN * rule.at_least * cell.control_exposure:
        return Step("run", f"{arm.name} has run ahead of the controls of its hours", control)
    return Step("run", why, arm)


def _given_up(evidence: Evidence, arm: Arm) -> bool:
    last = evidence.of(arm.name)[-MAX_VOIDS:]
    return len(last) == MAX_VOIDS and all(evidence.void_reason(run) for run in last)


def _worth_most(
    evidence: Evidence, arms: Sequence[Arm], rule: Rule, verdicts: dict[str, Verdict], rng: random.Random
) -> tuple[Arm | None, str]:
    """The arm to run, or None and why there is none left."""
    able = [arm for arm in arms if arm.role != "control" and not _given_up(evidence, arm)]

    for arm in (arm for arm in able if arm.role == "all_off"):
        one = verdicts[arm.name]
        if one.faults and one.settled and one.word == "FAULTS":
            return None, "faults with every variable off: the cause is not in the list"
        if not one.settled and (one.p is None or one.p > ALL_OFF_P):
            return arm, "is the cause in the list at all?"

    singles = [arm for arm in able if arm.role == "one"]
    fresh = [arm for arm in singles if not verdicts[arm.name].runs]
    if fresh:
        return rng.choice(fresh), "first look at each variable"
    open_arms = [arm for arm in singles if not verdicts[arm.name].settled]
    if open_arms:
        # top two: the likeliest and its rival take turns, so that neither starves the other of evidence
        ranked = sorted(open_arms, key=lambda arm: -verdicts[arm.name].promise)
        return min(ranked[:2], key=lambda arm: verdicts[arm.name].expected), "one of the two likeliest"

    helped = {name for arm in singles if verdicts[arm.name].word in ("CLEARED", "REDUCED") for name in arm.variables}
    in_list = False
    for arm in (arm for arm in able if arm.role == "all_off"):
        in_list = True
        if not helped and not verdicts[arm.name].settled:
            return arm, "no single change helped: is the cause in the list, beyond doubt?"
    for arm in able:
        asked = bool(helped & set(arm.variables)) or (not helped and in_list)
        if arm.role == "pair" or (arm.role == "add_back" and asked):
            one = verdicts[arm.name]
            clean = not one.faults and (one.posterior or 0.0) >= BACK_ENOUGH
            if not clean and not one.settled:
                return arm, "does the fault come back with it alone?"
    left = [arm.name for arm in arms if arm.role != "control" and arm not in able]
    given_up = f", but for {', '.join(left)}: void {MAX_VOIDS} times in a row" if left else ""
    return None, f"every arm is settled{given_up}"
