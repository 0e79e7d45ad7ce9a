"""What a campaign will cost before it is run: turns and hours, expected and in nine of ten cases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from soakrig.bisect.statistics import clean_exposure
from soakrig.bisect.verdicts import Rule
from soakrig.errors import UsageError

_DRAWS = 4_000
_FAULTS_TO_SETTLE = 2
_FAULTS_TO_SETTLE_ALL_OFF = 3
"""Faults after which an arm that changes nothing is usually hopeless (``Rule.hopeless``)."""


@dataclass(frozen=True)
class Pace:
    """``hazard``: chance of the fault per turn of the control, the planner's guess. ``cap``: turns of a launch."""

    hazard: float
    cap: int
    turn_s: float
    launch_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.hazard < 1.0 or self.cap < 1 or self.turn_s < 0.0 or self.launch_s < 0.0:
            raise UsageError(
                f"hazard {self.hazard:g} per turn, cap {self.cap}, {self.turn_s:g} s a turn, {self.launch_s:g} s a "
                "launch; expected a chance between 0 and 1, at least one turn, no negative time",
                remedy="The hazard is faults over turns of earlier runs: 3 faults in 90 turns are 0.033.",
            )


@dataclass(frozen=True)
class Price:
    """Modelled, for a constant hazard. ``_90``: not exceeded in nine of ten campaigns."""

    turns: float
    turns_90: float
    launches: float
    hours: float
    hours_90: float
    control_faults: int


def price(variables: int, rule: Rule, pace: Pace, *, culprit: bool = True, seed: int = 0) -> Price:
    """Cost of a campaign of ``variables`` one-variable arms, all-off and add-back included.

    ``culprit``: one variable stops the fault wholly (one that only lowers it costs half as much again); else none does
    and all off faults as well. The control's faults are chosen for the least mean.
    """
    rng = np.random.default_rng(seed)
    if not culprit:
        parts = [_until(rng, pace, rule.min_control_faults), _until(rng, pace, _FAULTS_TO_SETTLE_ALL_OFF)]
        return _sum(parts, pace, rule.min_control_faults)
    level = rule.level(0)
    plans: list[Price] = []
    for faults in range(rule.min_control_faults, 15):
        clean = clean_exposure(level, at_least=rule.at_least, control_faults=faults)
        # the clock stands still past the longest control run, and a control run ends with its first fault
        in_one = -np.log1p(-pace.hazard) * pace.cap
        in_control = np.array([_clock_length(rng, faults, in_one) for _ in range(400)])
        launches = np.ceil(clean / rng.choice(in_control, _DRAWS))
        survivor = np.stack([launches * pace.cap, launches])
        # the control of the baseline is not one of the survivor's hours, so it is paid beside the interleaved ones
        parts = [_until(rng, pace, rule.min_control_faults), _until(rng, pace, faults), survivor]
        parts += [np.stack([np.full(_DRAWS, 2.0 * pace.cap), np.full(_DRAWS, 2.0)])]  # all off, clean
        parts += [_until(rng, pace, _FAULTS_TO_SETTLE) for _ in range(variables - 1)]
        parts += [_until(rng, pace, 1)]  # add-back
        plans.append(_sum(parts, pace, faults))
    return min(plans, key=lambda plan: plan.hours)


def _until(rng: np.random.Generator, pace: Pace, faults: int) -> NDArray[np.float64]:
    """Turns and launches until so many faults come, 2 x draws. A launch ends at a fault or the cap."""
    to_fault = rng.geometric(pace.hazard, size=(_DRAWS, faults))
    whole = (to_fault - 1) // pace.cap  # launches that reach the cap before the one that faults
    return np.stack([to_fault.sum(axis=1), (whole + 1).sum(axis=1)]).astype(np.float64)


def _clock_length(rng: np.random.Generator, faults: int, in_one: float) -> float:
    """Length of the control's clock for one clean launch, with so many faults seen."""
    lengths: list[float] = []
    seen = 0
    while seen < faults:
        draw = rng.exponential()
        seen += draw <= in_one
        lengths.append(min(draw, in_one))
    order = np.sort(lengths)
    at_risk = np.arange(order.size, 0, -1)
    return float(np.sum((order < in_one) / at_risk))


def _sum(parts: list[NDArray[np.float64]], pace: Pace, faults: int) -> Price:
    turns, launches = np.sum(parts, axis=0)
    hours = (turns * pace.turn_s + launches * pace.launch_s) / 3600.0
    return Price(
        turns=float(turns.mean()), turns_90=float(np.quantile(turns, 0.9)), launches=float(launches.mean()),
        hours=float(hours.mean()), hours_90=float(np.quantile(hours, 0.9)), control_faults=faults,
    )  # fmt: skip
