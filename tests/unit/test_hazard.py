from __future__ import annotations

import math

import pytest

from soakrig.record.hazard import turns_for, upper_95


def test_clean_runs_give_the_rule_of_the_contract() -> None:
    assert upper_95(0, 60) == pytest.approx(1 - 0.05 ** (1 / 60))
    assert upper_95(0, 60) == pytest.approx(0.0487, abs=1e-4)
    assert upper_95(0, 1) == pytest.approx(0.95)
    assert upper_95(0, 0) is None


@pytest.mark.parametrize(("faults", "exposure"), [(1, 60), (3, 40), (5, 7), (2, 1000)])
def test_with_faults_the_bound_is_where_so_few_have_chance_five_percent(faults: int, exposure: int) -> None:
    p = upper_95(faults, exposure)
    assert p is not None
    tail = sum(math.comb(exposure, k) * p**k * (1 - p) ** (exposure - k) for k in range(faults + 1))
    assert tail == pytest.approx(0.05, rel=1e-6)


def test_nothing_but_faults_excludes_nothing() -> None:
    assert upper_95(4, 4) == 1.0


def test_turns_needed_to_exclude_a_hazard() -> None:
    assert turns_for(1 / 30) == 89
    assert (1 - 1 / 30) ** 89 < 0.05 < (1 - 1 / 30) ** 88
    with pytest.raises(ValueError, match="between 0 and 1"):
        turns_for(0.0)
