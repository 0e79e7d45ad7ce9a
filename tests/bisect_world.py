"""A small made-up machine for tests of ``soakrig.bisect``: arms with known ratios, driven by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from soakrig.bisect.allocation import next_step
from soakrig.bisect.evidence import Arm, ArmRun, Evidence
from soakrig.bisect.verdicts import Rule, judge

XID = "xid 31 fault_pde"


def runs(arm: str, *lengths: tuple[float, bool], first: int, cap: float = 60, stratum: str = "") -> list[ArmRun]:
    """Launches of an arm in a row: (length, faulted) each."""
    return [
        ArmRun(arm, length, cap, first + n, signature=XID if faulted else None, stratum=stratum)
        for n, (length, faulted) in enumerate(lengths)
    ]


def evidence(*parts: tuple[str, list[tuple[float, bool]]], cap: float = 60) -> Evidence:
    """Launches in the order given, arm by arm."""
    found: list[ArmRun] = []
    for arm, lengths in parts:
        found += runs(arm, *lengths, first=len(found), cap=cap)
    return Evidence(tuple(found))


CONTROL: list[tuple[float, bool]] = [(23, True), (60, False), (34, True), (11, True), (48, True), (5, True)]
"""A control with five faults in 181 turns."""


def five_variables(*, pairs: bool = False) -> list[Arm]:
    """Control, all off, A to E one at a time, and each put back."""
    names = list("ABCDE")
    arms = [Arm("control", "control"), Arm("all off", "all_off", tuple(names))]
    arms += [Arm(name, "one", (name,)) for name in names]
    arms += [Arm(f"back {name}", "add_back", (name,)) for name in names]
    return arms + ([Arm("A and B", "pair", ("A", "B"))] if pairs else [])


def draw(rng: random.Random, hazard: float, cap: int) -> int | None:
    """The turn of one launch at which the fault comes, None where it does not before the cap."""
    return next((turn for turn in range(1, cap + 1) if rng.random() < hazard), None)


def play(
    arms: list[Arm], ratio: Callable[[Arm], float], rule: Rule, *, hazard: float, cap: int, seed: int, limit: int = 300
) -> tuple[Evidence, list[str]]:
    """A campaign to its end: constant hazard, ``ratio`` of it in each arm. Returns the evidence and the arms run."""
    rng = random.Random(seed)
    seen = Evidence(())
    order: list[str] = []
    while len(order) < limit:
        step = next_step(seen, arms, rule, seed=seed)
        if step.arm is None:
            break
        length = draw(rng, hazard * ratio(step.arm), cap)
        run = ArmRun(step.arm.name, length or cap, cap, len(order), signature=XID if length else None)
        seen, order = seen.plus(run), [*order, step.arm.name]
    return seen, order


def words(seen: Evidence, arms: list[Arm], rule: Rule) -> Mapping[str, str]:
    """Word of each arm."""
    return {name: one.word for name, one in judge(seen, arms, rule).items()}
