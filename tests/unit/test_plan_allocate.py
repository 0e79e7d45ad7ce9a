"""Slots shared out: the best map is the best of all there are, and the others are what they say."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_builders import raw, traffic
from soakrig.engine.offload.slot_map import read_slot_map, write_slot_map
from soakrig.engine.planning.allocate import Limits, allocate, slots_of_bytes
from soakrig.engine.planning.curve import MissCurves, lru_curves, static_curves
from soakrig.engine.planning.trace import TraceShape, open_trace, split_trace
from soakrig.errors import UsageError


def curves_of(misses: list[list[int]]) -> MissCurves:
    values = np.array(misses, dtype=np.int64)
    first = values[:, 0].copy()
    return MissCurves(
        "lru", "step", tuple(range(len(values))), values.shape[1] - 1, first, first, first, values, values
    )


@st.composite
def falling(draw: st.DrawFn) -> list[list[int]]:
    """Curves that fall in any shape, concave or not."""
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = st.lists(st.integers(0, 9), min_size=experts + 1, max_size=experts + 1)
    return [sorted(draw(rows), reverse=True) for _ in range(layers)]


@given(falling(), st.data())
@settings(max_examples=150, deadline=None)
def test_the_best_map_is_the_best_of_all(misses: list[list[int]], data: st.DataObject) -> None:
    layers, experts = len(misses), len(misses[0]) - 1
    least = data.draw(st.integers(0, experts))
    most = data.draw(st.integers(least, experts))
    total = data.draw(st.integers(layers * least, layers * most))
    maps = {one.name: one for one in allocate(curves_of(misses), total, Limits(least, most))}
    every = [one for one in product(range(least, most + 1), repeat=layers) if sum(one) == total]
    fewest = min(sum(row[count] for row, count in zip(misses, one, strict=True)) for one in every)
    assert maps["best"].misses == fewest
    assert list(maps) == ["uniform", "demand", "greedy", "best"]
    for one in maps.values():
        assert one.total == total
        assert all(least <= count <= most for count in one.slots.values())
        assert one.misses >= fewest
        assert not one.exact or one.misses == fewest


def test_greedy_is_exact_where_curves_flatten_and_not_where_they_have_a_cliff() -> None:
    concave = {one.name: one for one in allocate(curves_of([[10, 6, 3, 1], [9, 5, 3, 2]]), 3)}
    assert concave["greedy"].exact
    assert concave["greedy"].misses == concave["best"].misses == 8
    cliff = {one.name: one for one in allocate(curves_of([[10, 10, 10, 0], [9, 8, 7, 6]]), 3)}
    assert not cliff["greedy"].exact
    assert (cliff["greedy"].misses, cliff["best"].misses) == (16, 9)
    assert cliff["best"].slots == {0: 3, 1: 0}


def test_lots_are_kept(tmp_path: Path) -> None:
    trace = open_trace(str(raw(tmp_path / "t", traffic(300, 4, 3, 24))), TraceShape(4, 3, 24)).trace
    for one in allocate(lru_curves(trace), 50, Limits(least=5, grain=4)):
        assert one.total == 48, "50 is no whole number of lots"
        assert all(count % 4 == 0 and count >= 8 for count in one.slots.values())


def test_demand_follows_the_misses() -> None:
    maps = {one.name: one for one in allocate(curves_of([[90, 60, 30, 10, 0], [9, 6, 3, 1, 0]]), 4)}
    assert maps["uniform"].slots == {0: 2, 1: 2}
    assert maps["demand"].slots == {0: 4, 1: 0}


def test_a_map_is_judged_by_other_traffic(tmp_path: Path) -> None:
    trace = open_trace(str(raw(tmp_path / "t", traffic(600, 4, 3, 24))), TraceShape(4, 3, 24)).trace
    made, judged = (static_curves(part) for part in split_trace(trace, 0.3))
    for one in allocate(made, 40, judged_by=judged):
        assert one.misses == judged.misses_of(one.slots)
    with pytest.raises(UsageError, match="judge by a trace of the same model"):
        allocate(made, 40, judged_by=curves_of([[3, 2, 1]]))


@pytest.mark.parametrize(
    ("total", "limits", "says"),
    [
        (9, Limits(), "9 slots for 2 layers of 0 to 4 each: 0 to 8 were expected"),
        (1, Limits(least=1), "1 slots for 2 layers of 1 to 4 each: 2 to 8"),
        (4, Limits(least=3, most=2), "slots of a layer from 3 to 2"),
        (4, Limits(most=5), "from 0 to 5 in lots of 1; 0 to 4"),
        (4, Limits(grain=0), "in lots of 0"),
    ],
)
def test_totals_that_do_not_fit_are_refused_with_both_numbers(total: int, limits: Limits, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        allocate(curves_of([[4, 3, 2, 1, 0]] * 2), total, limits)


def test_bytes_buy_slots_where_a_slot_has_one_price() -> None:
    assert slots_of_bytes(100, {0: 30, 1: 30}) == 3
    with pytest.raises(UsageError, match="rows differ in size: 20 B in layer 1, 30 B in layer 2"):
        slots_of_bytes(100, {0: 30, 1: 20, 2: 30})


def test_the_map_is_what_the_engine_reads(tmp_path: Path) -> None:
    best = allocate(curves_of([[4, 3, 2, 1, 0]] * 2), 5)[-1]
    write_slot_map(str(tmp_path / "map.json"), best.slot_map(4))
    read = read_slot_map(str(tmp_path / "map.json"))
    assert (read.experts, read.slots) == (4, best.slots)
