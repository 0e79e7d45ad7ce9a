"""How often ``soakrig.bisect`` names the wrong variable, how often the right one, and what it costs. Simulated.

    python benchmarks/bisect_power.py [--campaigns 300] [--worlds TEXT] [--workers 2] [--json FILE]

Eight variables, launches of at most 60 turns, 10 s a turn, 4 min a launch, 1 fault in 33 turns. In each world campaigns
are run to their end by the very functions that judge real ones: ``next_step`` chooses, ``judge`` and ``conclude`` read.
``false``: campaigns in which, at any moment, an arm was called CLEARED to more than its true factor or REDUCED while it
did nothing, with the 95 % interval of so many campaigns (Clopper and Pearson). ``power``: the variables named at the
end are exactly those of the world, and none is open. ``told``: the conclusion is of the kind that the world asks for.
Beside it: one launch an arm; a fixed length from a plugged-in rate; git_bayesect where it is installed (pip install
git_bayesect), on a chain of settings. ``price``: what ``soakrig.bisect.price`` said beforehand.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from bisect_power_rivals import Answer, answer, chain, fixed_length, naive
from bisect_power_worlds import CAP, LAUNCH_S, TURN_S, VARIABLES, WORLDS, Host, World, all_arms
from soakrig.bisect.allocation import next_step
from soakrig.bisect.conclusion import conclude
from soakrig.bisect.evidence import Evidence
from soakrig.bisect.price import Pace, price
from soakrig.bisect.verdicts import Rule, Verdict, judge

MAX_HOURS = 24.0
RULE = Rule(confidence=0.99, arms=VARIABLES + 1)
Figures = dict[str, Any]


@dataclass(frozen=True)
class Campaign:
    """One simulated campaign. ``kind``: of its conclusion; ``false``: a wrong CLEARED or REDUCED at any moment."""

    answer: Answer
    kind: str
    false: bool


def campaign(world: World, seed: int) -> Campaign:
    """Run one campaign of soakrig to its end."""
    host = Host(world, np.random.default_rng(seed))
    arms = all_arms(world.all_off)
    evidence = Evidence(())
    false = False
    verdicts: dict[str, Verdict] = {}
    spent = True
    while host.hours < MAX_HOURS:
        verdicts = judge(evidence, arms, RULE)
        false = false or any(_wrong(world, one) for one in verdicts.values())
        step = next_step(evidence, arms, RULE, seed=seed, verdicts=verdicts)
        if step.arm is None:
            spent = False
            break
        evidence = evidence.plus(host.run(step.arm))
    verdicts = judge(evidence, arms, RULE)
    said = {one.arm.name for one in verdicts.values() if _named(one)}
    return Campaign(answer(world, host, said, spent=spent), conclude(evidence, verdicts, RULE).kind, false)


def _named(one: Verdict) -> bool:
    """Named as a cause: CLEARED, or REDUCED by the factor that CLEARED asks for."""
    if one.arm.role != "one":
        return False
    return one.word == "CLEARED" or (one.word == "REDUCED" and (one.posterior or 0.0) >= RULE.enough)


def _wrong(world: World, one: Verdict) -> bool:
    if one.factor is None:
        return False
    ratio = world.ratio(one.arm)
    return one.factor * ratio > 1.0 if one.word == "CLEARED" else ratio >= 1.0


def expected_kinds(world: World) -> tuple[str, ...]:
    """Conclusions that are right for a world."""
    if not world.off:
        if not world.all_off:
            return ("none", "unclear")
        return ("not_in_list", "none", "reduced") if world.maskers else ("not_in_list", "none")
    if world.either:
        return ("either",)
    if len(world.off) > 1:
        return ("both_needed",)
    return ("single", "necessary", "reduced") if world.left else ("single",)


def _rival(name: str, world: World, seed: int) -> Answer:
    rng = np.random.default_rng(seed)
    if name == "one launch each":
        return naive(world, rng)
    if name == "fixed length":
        return fixed_length(world, rng)
    from git_bayesect import Bisector

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return chain(Bisector)(world, rng)


def figures(answers: list[Answer], false: list[bool]) -> Figures:
    """Rates and hours over campaigns."""
    n = len(answers)
    wrong = sum(false)
    interval = binomtest(wrong, n).proportion_ci(0.95)
    hours = np.array([one.hours for one in answers])
    return {
        "campaigns": n, "false": wrong / n, "false_95": [float(interval.low), float(interval.high)],
        "power": sum(one.right and not one.spent for one in answers) / n,
        "hours": float(hours.mean()), "hours_90": float(np.quantile(hours, 0.9)),
        "launches": float(np.mean([one.launches for one in answers])),
        "out_of_time": sum(one.spent for one in answers) / n,
    }  # fmt: skip


def measure(world: World, campaigns: int, pool: ProcessPoolExecutor, rivals: list[str]) -> Figures:
    """All procedures in one world, on the same seeds."""
    seeds = range(campaigns)
    ours = list(pool.map(partial(campaign, world), seeds, chunksize=8))
    row: Figures = {"soakrig": figures([one.answer for one in ours], [one.false for one in ours])}
    kinds = [one.kind for one in ours]
    row["soakrig"]["told"] = sum(kind in expected_kinds(world) for kind in kinds) / campaigns
    row["soakrig"]["kinds"] = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    for name in rivals:
        answers = list(pool.map(partial(_rival, name, world), seeds, chunksize=64))
        row[name] = figures(answers, [one.wrong for one in answers])
    return row


def show(world: str, row: Figures) -> None:
    """One world as text."""
    print(f"\n{world}")
    for name, one in row.items():
        low, high = one["false_95"]
        told = f"  told {one['told']:.3f}  {one['kinds']}" if "told" in one else ""
        print(
            f"  {name:16} false {one['false']:.4f} ({low:.4f}-{high:.4f})  power {one['power']:.3f}  "
            f"hours {one['hours']:5.2f} (90 % {one['hours_90']:5.2f})  launches {one['launches']:5.1f}  "
            f"out of time {one['out_of_time']:.3f}{told}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaigns", type=int, default=300)
    parser.add_argument("--worlds", default="", help="only worlds whose name holds this text")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rivals = ["one launch each", "fixed length"]
    try:
        import git_bayesect  # noqa: F401
    except ImportError:
        print("git_bayesect is not installed: no column of it")
    else:
        rivals.append("git_bayesect")
    began = time.monotonic()
    told: Figures = {"kind": "simulated", "max_hours": MAX_HOURS, "worlds": {}}
    pace = Pace(1 / 33, CAP, TURN_S, LAUNCH_S)
    for culprit in (True, False):
        plan = price(VARIABLES, RULE, pace, culprit=culprit)
        told[f"price, {'one immune' if culprit else 'none'}"] = plan.__dict__
        print(f"price, {'one immune' if culprit else 'none'} (modelled): {plan}")
    with ProcessPoolExecutor(asked.workers) as pool:
        for world in WORLDS:
            if asked.worlds in world.name:
                told["worlds"][world.name] = measure(world, asked.campaigns, pool, rivals)
                show(world.name, told["worlds"][world.name])
    print(f"\nsimulated; {asked.campaigns} campaigns a row, {time.monotonic() - began:.0f} s")
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
