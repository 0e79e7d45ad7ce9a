"""Counters over windows of steps, and the figures that follow from them by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from soakrig.engine.offload import counters
from soakrig.engine.offload.counters import COUNTERS, MOST_SNAPSHOTS, PATHS, WINDOW_STEPS, History, Window, report
from soakrig.errors import UsageError


def path(**values: int) -> list[int]:
    assert set(values) <= set(COUNTERS)
    return [values.get(name, 0) for name in COUNTERS]


def layer(small: list[int] | None = None, large: list[int] | None = None) -> list[list[int]]:
    return [small or path(), large or path()]


FIRST = path(steps=10, accesses=40, hits=30, unique=25, unique_hits=20, clean_steps=4, fills=3, evictions=2, staged=2)
SECOND = path(steps=10, accesses=40, hits=10, unique=25, unique_hits=5, clean_steps=0, fills=0, staged=20, bad_ids=1)
CHUNK = path(steps=1, accesses=400, hits=100, unique=32, unique_hits=8, in_place=0, staged=24, groups=1)
RESIDENT = path(steps=10, accesses=1000, sentinels=6, bad_ids=2)


def figures(first_step: int = 100) -> dict[str, Any]:
    window = Window(first_step, 200, [layer(RESIDENT), layer(FIRST, CHUNK), layer(SECOND)])
    return report([0, 3, 4], {3: 1000, 4: 10}, window)


def test_rates_are_three_and_each_is_what_its_name_says() -> None:
    small = figures()["layers"]["3"]["small"]
    assert small["hit_rate"] == {"per_access": 30 / 40, "per_unique": 20 / 25, "per_step": 4 / 10}
    assert small["misses"] == small["fills"] + small["staged"] + small["in_place"] == 5
    assert small["misses_per_step_per_layer"] == 0.5
    assert {name: small[name] for name in COUNTERS} == dict(zip(COUNTERS, FIRST, strict=True))


def test_the_total_sums_offloaded_layers_and_prices_each_row_at_its_own_size() -> None:
    total = figures()["total"]
    assert total["small"]["accesses"] == 80
    assert total["small"]["hit_rate"] == {"per_access": 40 / 80, "per_unique": 25 / 50, "per_step": 4 / 20}
    assert total["small"]["misses_per_step_per_layer"] == 25 / 20
    assert total["small"]["bytes_moved"] == 5 * 1000 + 20 * 10
    assert total["large"]["bytes_moved"] == 24 * 1000
    assert total["large"]["hit_rate"]["per_unique"] == 8 / 32
    assert total["large"]["groups"] == 1


def test_resident_layers_stand_apart_and_their_bad_ids_count() -> None:
    found = figures()
    assert list(found["layers"]) == ["3", "4"]
    assert found["resident"]["small"] == {"steps": 10, "accesses": 1000, "sentinels": 6, "bad_ids": 2}
    assert found["bad_ids"] == 3


def test_a_rate_without_a_denominator_is_null_and_json_takes_it() -> None:
    found = report([0, 1], {1: 8}, Window(0, 0, counters.no_counters(2)))
    for name in PATHS:
        assert found["total"][name]["hit_rate"] == {"per_access": None, "per_unique": None, "per_step": None}
        assert found["total"][name]["misses_per_step_per_layer"] is None
    assert json.loads(json.dumps(found)) == found


def test_the_kind_says_whether_the_cold_start_is_in_it() -> None:
    assert figures()["kind"] == "measured"
    assert figures(first_step=0)["kind"] == "uncontrolled"
    assert (figures()["first_step"], figures()["last_step"], figures()["engine_steps"]) == (100, 200, 100)


def test_counters_of_other_layers_are_no_report() -> None:
    with pytest.raises(ValueError, match="counters of 1 layers"):
        report([0, 1], {}, Window(0, 1, [layer()]))
    with pytest.raises(ValueError, match=r"row sizes of \[7\]"):
        report([0], {7: 8}, Window(0, 1, [layer()]))


def test_the_indices_stand_where_the_names_do() -> None:
    assert [getattr(counters, name.upper()) for name in COUNTERS] == list(range(len(COUNTERS)))


def history(steps: int) -> History:
    """Every step adds one layer-step and, from step 151 on, one hit."""
    kept = History(1)
    for step in range(1, steps + 1):
        kept.add(step, [layer(path(steps=step, hits=max(step - 150, 0)))])
    return kept


def test_a_window_is_the_difference_between_two_kept_steps() -> None:
    kept = history(350)
    assert kept.kept_steps == (0, 100, 200, 300)
    window = kept.window(100, 300)
    assert (window.kind, window.counters) == ("measured", [layer(path(steps=200, hits=150))])
    assert kept.window(0, 100).kind == "uncontrolled"
    whole = kept.whole()
    assert (whole.kind, whole.first_step, whole.last_step) == ("uncontrolled", 0, 350)
    assert whole.counters == [layer(path(steps=350, hits=200))]


@pytest.mark.parametrize(
    ("first", "last", "named"),
    [
        (150, 300, "first_step=150: .* nearest kept are 100 and 200"),
        (100, 350, "last_step=350: .* nearest kept are 300\n"),
        (-1, 100, "first_step=-1: .* nearest kept are 0\n"),
        (200, 200, "hold no step"),
        (300, 100, "hold no step"),
    ],
)
def test_a_window_that_was_not_kept_is_refused_with_the_nearest(first: int, last: int, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        history(320).window(first, last)


def test_steps_have_to_rise() -> None:
    kept = history(5)
    with pytest.raises(ValueError, match="step 5 came after those of step 5"):
        kept.add(5, [layer()])


def test_a_life_without_end_takes_bounded_memory_and_keeps_its_beginning() -> None:
    kept = History(1)
    for step in range(WINDOW_STEPS, WINDOW_STEPS * (MOST_SNAPSHOTS + 1), WINDOW_STEPS):
        kept.add(step, [layer(path(steps=step))])
    assert kept.spacing == 2 * WINDOW_STEPS
    assert len(kept.kept_steps) == MOST_SNAPSHOTS // 2 + 1
    assert kept.window(200, 4000).counters == [layer(path(steps=3800))]
    with pytest.raises(UsageError, match="nearest kept are 0 and 200"):
        kept.window(100, 4000)
