"""Worlds of ``bisect_power.py``: how the fault comes, and what each arm does to it. Everything here is simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from soakrig.bisect.evidence import Arm, ArmRun

CAP = 60
VARIABLES = 8
TURN_S, LAUNCH_S = 10.0, 240.0
CLEAN_60 = (1 - 1 / 33) ** CAP
"""Chance of a clean launch of the control in every world without drift: that of 1 fault in 33 turns."""


def constant() -> NDArray[np.float64]:
    """Cumulative hazard by turn, 1/33 a turn."""
    return -np.log1p(-1 / 33) * np.arange(1, CAP + 1)


def rising(shape: float) -> NDArray[np.float64]:
    """Weibull of the shape, as deadly over a whole launch as the constant one."""
    return -np.log(CLEAN_60) * (np.arange(1, CAP + 1) / CAP) ** shape


def threshold(first: int = 20) -> NDArray[np.float64]:
    """Nothing before a turn, then constant, as deadly over a whole launch as the constant one."""
    turns = np.arange(1, CAP + 1)
    return -np.log(CLEAN_60) * np.clip(turns - first, 0, None) / (CAP - first)


@dataclass(frozen=True)
class World:
    """``off``: variables that stop the fault when changed, each to ``left`` of the hazard (AND: every one is needed);
    ``either``: they are causes of their own (OR) instead. ``maskers``: variable to ratio. ``drift``: from a launch
    drawn between the two numbers on, the hazard is ``drift_to`` of what it was. ``all_off``: whether that arm is run;
    without it a campaign in which nothing helps goes on, which is where a wrong name is likeliest."""

    name: str
    hazard: NDArray[np.float64] = field(default_factory=constant)
    off: tuple[int, ...] = ()
    left: float = 0.0
    either: bool = False
    maskers: dict[int, float] = field(default_factory=dict)
    drift: tuple[int, int] | None = None
    drift_to: float = 1.0
    all_off: bool = True

    def ratio(self, arm: Arm) -> float:
        """True hazard of an arm over the control's."""
        every = set(range(VARIABLES))
        named = {int(name[1:]) for name in arm.variables}
        if arm.role == "control":
            changed: set[int] = set()
        elif arm.role == "one":
            changed = named
        else:
            changed = every - (named if arm.role in ("add_back", "pair") else set())
        masked = float(np.prod([r for v, r in self.maskers.items() if v in changed]))
        stopped = set(self.off) & changed
        if self.either:
            return masked * (1.0 if not self.off or set(self.off) - changed else self.left)
        return masked * (self.left if stopped else 1.0)

    @property
    def guilty(self) -> frozenset[str]:
        """Variables whose single change lowers the hazard by more than a masker does."""
        return frozenset() if self.either else frozenset(f"V{v}" for v in self.off)


WORLDS = (
    World("none", off=()),
    World("none, without the all-off arm", all_off=False),
    World("none, without the all-off arm; rising (shape 3)", hazard=rising(3.0), all_off=False),
    World("none, without the all-off arm; drift to a third", drift=(4, 25), drift_to=0.33, all_off=False),
    World("one, immune", off=(2,)),
    World("one, 10x", off=(2,), left=0.1),
    World("one, immune; rising (shape 2)", hazard=rising(2.0), off=(2,)),
    World("one, immune; rising (shape 3)", hazard=rising(3.0), off=(2,)),
    World("one, immune; threshold at 20", hazard=threshold(), off=(2,)),
    World("two, AND", off=(2, 5)),
    World("two, OR", off=(2, 5), either=True),
    World("one, immune, and a 2x masker", off=(2,), maskers={5: 0.5}),
    World("2x masker alone", maskers={5: 0.5}),
    World("one, immune; drift to a third", off=(2,), drift=(4, 25), drift_to=0.33),
)


def all_arms(all_off: bool = True) -> list[Arm]:
    """Control, all off (where asked for), one variable at a time, and each put back."""
    names = [f"V{v}" for v in range(VARIABLES)]
    arms = [Arm("control", "control")]
    arms += [Arm("all off", "all_off", tuple(names))] if all_off else []
    arms += [Arm(name, "one", (name,)) for name in names]
    return [*arms, *(Arm(f"back {name}", "add_back", (name,)) for name in names)]


class Host:
    """A machine of a world: launches arms, keeps the hours."""

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        self.world, self.rng = world, rng
        self.launches, self.turns = 0, 0.0
        self.shift = int(rng.integers(*world.drift)) if world.drift else None

    def run(self, arm: Arm, cap: int = CAP, ratio: float | None = None) -> ArmRun:
        """One launch to its fault or the cap."""
        scale = self.world.ratio(arm) if ratio is None else ratio
        if self.shift is not None and self.launches >= self.shift:
            scale *= self.world.drift_to
        self.launches += 1
        place = int(np.searchsorted(self.world.hazard[:cap] * scale, self.rng.exponential()))
        faulted = place < cap
        turns = place + 1 if faulted else cap
        self.turns += turns
        return ArmRun(arm.name, turns, cap, self.launches, signature="xid 31" if faulted else None)

    @property
    def hours(self) -> float:
        """Turns and launches at the pace of the module."""
        return (self.turns * TURN_S + self.launches * LAUNCH_S) / 3600.0
