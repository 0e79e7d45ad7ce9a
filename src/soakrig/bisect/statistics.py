"""Exact tests of an arm against a control whose own hazard is only known from a few faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scipy.optimize import brentq
from scipy.special import bdtr, gammaincinv

_SPAN = math.log(1e9)


class Cell(NamedTuple):
    """Control and arm in one block: faults, and exposure in one unit (the control's clock, or turns)."""

    control_faults: int
    control_exposure: float
    arm_faults: int
    arm_exposure: float


class Interval(NamedTuple):
    """An estimate between its bounds. ``high`` is infinite where nothing bounds it."""

    low: float
    estimate: float
    high: float


def chance_of_so_few(cells: Sequence[Cell], ratio: float = 1.0) -> float:
    """Chance of at most the arm's faults if its hazard were ``ratio`` times the control's.

    The exact conditional test of two Poisson rates (Przyborowski and Wilenski, Biometrika 31, 1940): given the faults
    of a block, the arm's are binomial. Blocks are independent, so their sum is convolved and each keeps its own
    hazard. A clean arm beside one block gives (1 + ratio E / T0)**-D0, which is (1 + E/D0)**-D0 on the control's clock.
    """
    seen = sum(cell.arm_faults for cell in cells)
    if seen == 0:
        log_p = 0.0
        for cell in cells:
            if cell.control_faults and cell.arm_exposure > 0.0:
                log_p -= cell.control_faults * math.log1p(ratio * cell.arm_exposure / cell.control_exposure)
        return math.exp(log_p)
    chances = [1.0] + [0.0] * seen
    for cell in cells:
        n = cell.control_faults + cell.arm_faults
        arm = ratio * cell.arm_exposure
        whole = arm + cell.control_exposure
        if n == 0 or whole <= 0.0:
            continue
        share = arm / whole
        here = [math.comb(n, k) * share**k * (1.0 - share) ** (n - k) for k in range(min(n, seen) + 1)]
        chances = [
            sum(here[k] * chances[total - k] for k in range(min(total, len(here) - 1) + 1)) for total in range(seen + 1)
        ]
    return min(1.0, sum(chances))


def chance_of_so_many(cells: Sequence[Cell], ratio: float = 1.0) -> float:
    """Chance of at least the arm's faults if its hazard were ``ratio`` times the control's: the other tail."""
    faults = sum(cell.control_faults + cell.arm_faults for cell in cells)
    seen = sum(cell.arm_faults for cell in cells)
    if seen == 0:
        return 1.0
    if len(cells) == 1:
        cell = cells[0]
        arm = ratio * cell.arm_exposure
        whole = arm + cell.control_exposure
        return float(bdtr(cell.control_faults, faults, cell.control_exposure / whole)) if whole > 0.0 else 1.0
    # "at least n of the arm's" is "at most the rest of the control's": the same test with the sides exchanged
    turned = [Cell(c.arm_faults, c.arm_exposure, c.control_faults, c.control_exposure) for c in cells]
    return chance_of_so_few(turned, 1.0 / ratio)


def ratio_interval(cells: Sequence[Cell], confidence: float = 0.95) -> Interval:
    """Hazard of the arm over the control's, with an exact two-sided interval: both one-sided tests, turned round."""
    tail = (1.0 - confidence) / 2.0
    low = _solve(lambda ratio: chance_of_so_many(cells, ratio) - tail)
    high = _solve(lambda ratio: tail - chance_of_so_few(cells, ratio))
    return Interval(low, _likeliest_ratio(cells), high)


def _likeliest_ratio(cells: Sequence[Cell]) -> float:
    """The ratio at which the expected faults of the arm, given all faults, are those that came."""
    seen = sum(cell.arm_faults for cell in cells)
    if seen == 0:
        return 0.0
    if not any(cell.control_faults for cell in cells):
        return math.inf

    def surplus(ratio: float) -> float:
        expected = 0.0
        for cell in cells:
            whole = ratio * cell.arm_exposure + cell.control_exposure
            if whole > 0.0:
                expected += (cell.control_faults + cell.arm_faults) * ratio * cell.arm_exposure / whole
        return expected - seen

    return _solve(surplus)


def ratio_at_most(cells: Sequence[Cell], level: float) -> float:
    """The largest ratio that so few faults leave open: the one-sided bound of error ``level``; infinite if none."""
    return _solve(lambda ratio: level - chance_of_so_few(cells, ratio))


def _solve(function: Callable[[float], float]) -> float:
    """Zero of a rising function of the ratio, searched on its logarithm; 0 or infinity where it has none."""

    def on_log(x: float) -> float:
        return function(math.exp(x))

    if on_log(-_SPAN) >= 0.0:
        return 0.0
    if on_log(_SPAN) <= 0.0:
        return math.inf
    return math.exp(float(brentq(on_log, -_SPAN, _SPAN, xtol=1e-9)))  # pyright: ignore[reportArgumentType]


def rate_interval(faults: int, exposure: float, confidence: float = 0.95) -> Interval:
    """Faults per unit of exposure with the exact interval of a Poisson count (Garwood, Biometrika 28, 1936)."""
    if exposure <= 0.0:
        return Interval(0.0, 0.0, math.inf)
    tail = (1.0 - confidence) / 2.0
    low = float(gammaincinv(faults, tail)) if faults else 0.0
    high = float(gammaincinv(faults + 1, 1.0 - tail))
    return Interval(low / exposure, faults / exposure, high / exposure)


def clean_exposure(level: float, *, at_least: float = 1.0, control_faults: float = math.inf) -> float:
    """Clean exposure, in mean exposures between control faults, that shows a hazard ``at_least`` times lower.

    ``level``: error allowed. ``control_faults``: those the control's hazard was estimated from; infinite: known.
    """
    if not 0.0 < level < 1.0 or at_least < 1.0 or control_faults <= 0:
        raise ValueError(
            f"expected level in (0, 1), at_least >= 1, control_faults > 0; got {level}, {at_least}, {control_faults}"
        )
    if math.isinf(control_faults):
        return -at_least * math.log(level)
    return at_least * control_faults * math.expm1(-math.log(level) / control_faults)


def chance_of_so_few_crashes(control_runs: int, control_crashed: int, arm_runs: int, arm_crashed: int) -> float:
    """Fisher's exact test, one-sided, where a run is one trial and its length is not known."""
    from scipy.stats import fisher_exact  # slow to import, and only published counts need it

    table = [[arm_crashed, arm_runs - arm_crashed], [control_crashed, control_runs - control_crashed]]
    return float(fisher_exact(table, alternative="less").pvalue)  # pyright: ignore
