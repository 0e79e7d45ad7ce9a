from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, poisson

from bisect_world import runs
from soakrig.bisect.evidence import ArmRun, Evidence
from soakrig.bisect.exposure_clock import counted_clock, nelson_aalen
from soakrig.bisect.statistics import (
    Cell,
    chance_of_so_few,
    chance_of_so_few_crashes,
    chance_of_so_many,
    clean_exposure,
    rate_interval,
    ratio_at_most,
    ratio_interval,
)

CELL = st.builds(Cell, st.integers(0, 6), st.floats(0.1, 20), st.integers(0, 3), st.floats(0.1, 20))


def test_a_clean_arm_is_the_formula() -> None:
    for faults, expected in ((3, 1.0), (5, 10.3), (8, 0.2)):
        # on the control's clock its own exposure is its number of faults
        p = chance_of_so_few([Cell(faults, faults, 0, expected)])
        assert p == pytest.approx((1 + expected / faults) ** -faults, rel=1e-12)


def test_the_operators_forty_clean_requests() -> None:
    assert chance_of_so_few([Cell(2, 26, 0, 40)]) == pytest.approx(0.155, abs=5e-4)
    # the hazard taken for known would have passed for a result
    assert math.exp(-40 / 13) == pytest.approx(0.046, abs=5e-4)


def test_it_is_the_exact_test_and_not_a_bolder_one() -> None:
    p = chance_of_so_few([Cell(5, 165, 0, 120)])
    assert p == pytest.approx(0.0650, abs=5e-5)
    assert p == pytest.approx(binomtest(0, 5, 120 / 285, alternative="less").pvalue, rel=1e-9)


@given(st.lists(CELL, min_size=1, max_size=3), st.floats(0.05, 8))
def test_blocks_add_up_as_independent_binomials(cells: list[Cell], ratio: float) -> None:
    seen = sum(cell.arm_faults for cell in cells)
    parts = []
    for cell in cells:
        n = cell.control_faults + cell.arm_faults
        share = ratio * cell.arm_exposure / (ratio * cell.arm_exposure + cell.control_exposure)
        parts.append([binom.pmf(k, n, share) for k in range(n + 1)])
    few = many = 0.0
    for counts in itertools.product(*(range(len(part)) for part in parts)):
        chance = math.prod(part[k] for part, k in zip(parts, counts, strict=True))
        few += chance if sum(counts) <= seen else 0.0
        many += chance if sum(counts) >= seen else 0.0
    assert chance_of_so_few(cells, ratio) == pytest.approx(few, rel=1e-6, abs=1e-12)
    assert chance_of_so_many(cells, ratio) == pytest.approx(many, rel=1e-6, abs=1e-12)


@settings(max_examples=60)
@given(st.lists(CELL, min_size=1, max_size=3))
def test_the_interval_is_where_both_tests_reach_their_tail(cells: list[Cell]) -> None:
    low, estimate, high = ratio_interval(cells, 0.95)
    assert low <= estimate * (1 + 1e-6)
    assert estimate <= high * (1 + 1e-6)
    if math.isfinite(high):
        assert chance_of_so_few(cells, high) == pytest.approx(0.025, rel=1e-4)
    if low > 0:
        assert chance_of_so_many(cells, low) == pytest.approx(0.025, rel=1e-4)
    half, same, twice = (chance_of_so_few(cells, ratio) for ratio in (0.5, 1.0, 2.0))
    assert half * (1 + 1e-12) >= same  # to rounding: all three may be 1
    assert same * (1 + 1e-12) >= twice


def test_the_bound_is_the_largest_factor_that_is_shown() -> None:
    cells = [Cell(5, 5.0, 0, 30.0)]
    bound = ratio_at_most(cells, 0.01)
    assert chance_of_so_few(cells, bound) == pytest.approx(0.01, rel=1e-6)
    assert clean_exposure(0.01, at_least=1 / bound, control_faults=5) == pytest.approx(30.0, rel=1e-6)
    assert ratio_at_most([Cell(0, 1.0, 0, 1.0)], 0.01) == math.inf  # a control without a fault bounds nothing


@pytest.mark.parametrize(
    ("faults", "at_least", "means"),
    [
        (1, 1, 19.0), (2, 1, 6.94), (3, 1, 5.14), (5, 1, 4.10), (8, 1, 3.63), (math.inf, 1, 3.00),
        (2, 2, 13.9), (3, 2, 10.3), (5, 2, 8.2), (8, 2, 7.3), (math.inf, 2, 6.0),
        (2, 3, 20.8), (3, 3, 15.4), (5, 3, 12.3), (8, 3, 10.9), (math.inf, 3, 9.0),
        (2, 5, 34.7), (3, 5, 25.7), (5, 5, 20.5), (8, 5, 18.2), (math.inf, 5, 15.0),
    ],
)  # fmt: skip
def test_clean_exposure_at_95_percent(faults: float, at_least: float, means: float) -> None:
    # published to three digits
    assert clean_exposure(0.05, at_least=at_least, control_faults=faults) == pytest.approx(means, rel=0.006)


@pytest.mark.parametrize(
    ("level", "totals"),
    [
        (0.01, {1: 3300, 2: 660, 3: 460, 4: 417, 5: 414, 6: 427, 8: 469}),
        (0.01 / 8, {2: 1867, 3: 919, 5: 628, 6: 603, 8: 609}),
    ],
)
def test_what_a_control_and_one_clean_arm_cost_together(level: float, totals: dict[int, int]) -> None:
    for faults, turns in totals.items():
        assert 33 * (faults + clean_exposure(level, control_faults=faults)) == pytest.approx(turns, rel=0.005)


@pytest.mark.parametrize(("at_least", "at_95", "at_99"), [(1, 98, 150), (2, 196, 302), (3, 295, 454), (5, 493, 758)])
def test_clean_turns_against_a_known_hazard(at_least: float, at_95: int, at_99: int) -> None:
    # published for a chance per turn, computed here for a rate: 1.5 % apart at 1/33
    assert 33 * clean_exposure(0.05, at_least=at_least) == pytest.approx(at_95, rel=0.016)
    assert 33 * clean_exposure(0.01, at_least=at_least) == pytest.approx(at_99, rel=0.016)


def test_one_fault_is_no_baseline() -> None:
    low, rate, high = rate_interval(1, 33)
    assert (1 / high, 1 / rate, 1 / low) == (
        pytest.approx(5.9, abs=0.05),
        pytest.approx(33),
        pytest.approx(1303, abs=1),
    )
    assert rate_interval(0, 60).low == 0.0
    assert poisson.cdf(0, rate_interval(0, 60).high * 60) == pytest.approx(0.025)
    assert rate_interval(0, 0).high == math.inf


def test_runs_and_crashes_alone_are_fishers_test() -> None:
    assert chance_of_so_few_crashes(5, 5, 5, 0) == pytest.approx(1 / 252)
    assert chance_of_so_few_crashes(7, 3, 10, 0) == pytest.approx(0.0515, abs=5e-5)


@pytest.mark.parametrize(("level", "at_least", "faults"), [(0.0, 1, 3), (0.05, 0.5, 3), (0.05, 1, 0)])
def test_a_plan_without_sense_is_refused(level: float, at_least: float, faults: float) -> None:
    with pytest.raises(ValueError, match="expected level"):
        clean_exposure(level, at_least=at_least, control_faults=faults)


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=25))
def test_the_clock_gives_the_control_its_own_faults(seen: list[tuple[int, bool]]) -> None:
    lengths, faulted = [length for length, _ in seen], [fault for _, fault in seen]
    clock = nelson_aalen(lengths, faulted)
    assert sum(clock.at(length) for length in lengths) == pytest.approx(sum(faulted))
    told = [clock.at(turn) for turn in range(70)]
    assert told == sorted(told)
    assert told[0] == 0.0
    counted = counted_clock(lengths, faulted)
    assert sum(counted.at(length) for length in lengths) == pytest.approx(sum(faulted))


def test_the_clock_by_hand() -> None:
    # at risk: 4 at turn 5, 3 at 10 (the run that ends there unharmed still counts), 1 at 30
    clock = nelson_aalen([10, 5, 30, 10], [True, True, True, False])
    assert clock.at(4) == 0.0
    assert clock.at(5) == clock.at(9) == pytest.approx(1 / 4)
    assert clock.at(10) == pytest.approx(1 / 4 + 1 / 3)
    assert clock.at(30) == clock.at(1000) == pytest.approx(1 / 4 + 1 / 3 + 1)


SHAPES = {
    "constant": np.arange(1, 61) / 60,
    "shape 2": (np.arange(1, 61) / 60) ** 2,
    "shape 3": (np.arange(1, 61) / 60) ** 3,
    "threshold": np.clip(np.arange(1, 61) - 20, 0, None) / 40,
    "warm-up": np.minimum(np.arange(1, 61) / 60 * 3, 0.5 + np.arange(1, 61) / 120),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cap", [20, 30, 60])
def test_an_arm_that_changes_nothing_seldom_passes_whatever_the_hazard(shape: str, cap: int) -> None:
    """Controls of 60 turns, an arm in launches of ``cap`` until p <= 0.01 or a fault; published: at most 0.0093."""
    rng = np.random.default_rng(5)
    hazard = 1.85 * SHAPES[shape]
    passed = raw = 0.0
    campaigns = 600
    for _ in range(campaigns):
        seen: list[tuple[float, bool]] = []
        while sum(fault for _, fault in seen) < 5:
            place = int(np.searchsorted(hazard, rng.exponential()))
            seen.append((min(place + 1, 60), place < 60))
        control = runs("control", *seen, first=0)
        (cell,) = Evidence((*control, ArmRun("arm", cap, cap, len(control)))).cells("arm")
        counted = Cell(5, sum(length for length, _ in seen), 0, cap)
        passed += chance_to_pass(cell, float(hazard[cap - 1]))
        raw += chance_to_pass(counted, float(hazard[cap - 1]))
    assert passed / campaigns <= 0.0093
    if shape == "shape 3" and cap == 20:
        assert raw / campaigns > 0.1  # turns counted as turns, and the same arms pass by the dozen


def chance_to_pass(cell: Cell, hazard: float) -> float:
    """Chance that an arm of the control's own hazard gets through as many clean launches as p <= 0.01 takes."""
    if not cell.control_faults or not cell.arm_exposure:
        return 0.0
    means = clean_exposure(0.01, control_faults=cell.control_faults)
    return math.exp(-hazard * math.ceil(means * cell.control_exposure / cell.control_faults / cell.arm_exposure))
