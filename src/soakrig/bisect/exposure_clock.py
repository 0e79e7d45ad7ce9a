"""Exposure in units of the control's own hazard, so that a hazard that grows with the turn is not counted by turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ExposureClock:
    """Cumulative hazard of the control: how many faults it would have had in a run of some length.

    A step function (``times`` ascending, ``hazard`` the value from each on), or with ``rate`` a straight line. Past
    the longest control run the step function stands still: nothing is known there, so nothing is counted.
    """

    times: NDArray[np.float64]
    hazard: NDArray[np.float64]
    rate: float | None = None

    def at(self, exposure: float) -> float:
        """Expected faults of the control in one run of ``exposure`` turns (or tokens)."""
        if self.rate is not None:
            return self.rate * exposure
        place = int(np.searchsorted(self.times, exposure, side="right"))
        return float(self.hazard[place - 1]) if place else 0.0


def nelson_aalen(exposure: Sequence[float], faulted: Sequence[bool]) -> ExposureClock:
    """Clock of control runs: at each length with faults, faults over runs that got that far (Nelson 1972, Aalen 1978).

    ``exposure``: length of each run; ``faulted``: whether it ended in the fault, else it was censored there. Summed
    over these very runs the clock gives their number of faults.
    """
    length = np.asarray(exposure, dtype=np.float64)
    fault = np.asarray(faulted, dtype=bool)
    times, faults = np.unique(length[fault], return_counts=True)
    at_risk = length.size - np.searchsorted(np.sort(length), times, side="left")
    return ExposureClock(times, np.cumsum(faults / at_risk))


def counted_clock(exposure: Sequence[float], faulted: Sequence[bool]) -> ExposureClock:
    """Clock of a constant hazard: faults over exposure. For runs of one cap, and for published counts."""
    total = float(np.sum(np.asarray(exposure, dtype=np.float64)))
    empty = np.empty(0)
    return ExposureClock(empty, empty, sum(faulted) / total if total > 0 else 0.0)
