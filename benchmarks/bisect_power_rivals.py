"""What people do instead of ``soakrig.bisect``, in the worlds of ``bisect_power.py``. Simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bisect_power_worlds import CAP, VARIABLES, Host, World, all_arms

SINGLES = [arm for arm in all_arms() if arm.role == "one"]
CONTROL = all_arms()[0]


@dataclass(frozen=True)
class Answer:
    """``said``: variables named as a cure; ``wrong``: one of them is none; ``hours``, ``launches`` spent."""

    said: frozenset[str]
    wrong: bool
    right: bool
    hours: float
    launches: int
    spent: bool = False


def answer(world: World, host: Host, said: set[str], *, spent: bool = False) -> Answer:
    """Mark what was said against the world."""
    guilty = world.guilty
    return Answer(frozenset(said), bool(said - guilty), said == guilty, host.hours, host.launches, spent)


def naive(world: World, rng: np.random.Generator) -> Answer:
    """One launch an arm; clean is a cure."""
    host = Host(world, rng)
    return answer(world, host, {arm.name for arm in SINGLES if host.run(arm).signature is None})


def fixed_length(world: World, rng: np.random.Generator) -> Answer:
    """Five faults of the control, its rate taken for the truth, then as many clean turns of each arm as that rate asks
    for at 1 % over all arms, counted over launches of the same cap; the first fault ends an arm."""
    host = Host(world, rng)
    faults, turns = 0, 0.0
    while faults < 5 and host.launches < 200:
        run = host.run(CONTROL)
        faults, turns = faults + (run.signature is not None), turns + run.exposure
    launches = math.ceil(math.log(0.01 / VARIABLES) / math.log1p(-min(faults / turns, 0.99)) / CAP)
    said = {arm.name for arm in SINGLES if all(host.run(arm).signature is None for _ in range(launches))}
    return answer(world, host, said)


def chain(bisector: Callable[..., Any]) -> Callable[[World, np.random.Generator], Answer]:
    """``git_bayesect`` on settings in which the first 0, 1, 2 ... variables are changed; asked until 0.99.

    It sees one change point; a fault that is still there with all changed is its last place.
    """

    def search(world: World, rng: np.random.Generator) -> Answer:
        host = Host(world, rng)
        order = rng.permutation(VARIABLES)
        found = bisector([1.0] * (VARIABLES + 1))
        arms = {arm.name: arm for arm in all_arms()}
        while host.launches < 150:
            place = int(found.select())
            changed = {int(v) for v in order[:place]}
            run = host.run(CONTROL, ratio=_ratio(world, changed))
            found.record(place, run.signature is not None)
            if found.distribution.max() >= 0.99:
                break
        best = int(found.distribution.argmax())
        said: set[str] = set() if best == VARIABLES else {arms[f"V{order[best]}"].name}
        return answer(world, host, said, spent=host.launches >= 150)

    return search


def _ratio(world: World, changed: set[int]) -> float:
    masked = float(np.prod([r for v, r in world.maskers.items() if v in changed]))
    off = set(world.off)
    if world.either:
        return masked * (world.left if off and not off - changed else 1.0)
    return masked * (world.left if off & changed else 1.0)
