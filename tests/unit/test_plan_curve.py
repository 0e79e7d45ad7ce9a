"""Curves: every size from one pass equals the replay of that size, and a plain LRU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plan_builders import captured, lru_misses, raw, traffic
from soakrig.engine.planning.curve import MissCurves, lru_curves, skew, static_curves
from soakrig.engine.planning.replay import replay_trace, uniform_slots
from soakrig.engine.planning.trace import PlannedTrace, TraceShape, open_trace, split_trace


def opened(path: Path, rows: int, layers: int, top_k: int, experts: int, rows_per_step: int = 1) -> PlannedTrace:
    ids = traffic(rows, layers, top_k, experts)
    ids[3, 0, 1] = -1
    return open_trace(str(raw(path / "t.i16", ids)), TraceShape(layers, top_k, experts, rows_per_step))


@pytest.mark.parametrize("experts", [20, 256, 300])
def test_sequential_curves_are_a_plain_lrus(tmp_path: Path, experts: int) -> None:
    planned = opened(tmp_path, 400 if experts < 100 else 150, 2, 4, experts)
    curves = lru_curves(planned.trace, "sequential")
    for at in range(2):
        ids = [int(one) for one in planned.trace.ids[:, at].reshape(-1) if one >= 0]
        for slots in sorted({0, 1, 3, 4, 7, 19, experts - 1, experts}):
            assert curves.misses[at, slots] == lru_misses(ids, slots)


def test_more_experts_than_a_byte_holds(tmp_path: Path) -> None:
    ids = np.arange(600, dtype=np.int16).reshape(-1, 1, 1) % 300
    planned = open_trace(str(raw(tmp_path / "t.i16", ids)), TraceShape(1, 1, 300))
    curves = lru_curves(planned.trace, "sequential")
    assert (curves.misses[0, 299], curves.misses[0, 300]) == (600, 300), "a cycle of 300: all missed, or each once"


@pytest.mark.parametrize("rows_per_step", [1, 2, 4])
def test_step_curves_are_the_engines_but_for_ties(tmp_path: Path, rows_per_step: int) -> None:
    planned = opened(tmp_path, 1200, 3, 4, 32, rows_per_step)
    curves = lru_curves(planned.trace)
    for slots in (4 * rows_per_step, 12, 20, 31, 32):
        if slots < 4 * rows_per_step:
            continue
        found = replay_trace(planned, uniform_slots(planned, slots))
        rates = found.hit_rates()
        assert curves.misses[:, slots].sum() == pytest.approx(found.misses, rel=0.01)
        for name, value in curves.hit_rates(slots).items():
            assert value == pytest.approx(rates[name], abs=0.01)
        assert curves.steps.sum() == sum(found.steps)
    # No ties where each step has one id: then it is exact for every size.
    ids = planned.trace.ids[:, :, :1]
    single = open_trace(str(raw(tmp_path / "s.i16", ids)), TraceShape(3, 1, 32))
    exact = lru_curves(single.trace)
    for slots in (0, 1, 5, 32):
        assert exact.misses[:, slots].sum() == replay_trace(single, uniform_slots(single, slots)).misses


def test_prefill_only_reads_the_slots(tmp_path: Path) -> None:
    ids = traffic(300, 2, 4, 32)
    steps = [
        ids[row : row + (30 if row % 50 == 0 else 1)] for row in range(0, 300, 1) if row % 50 == 0 or row % 50 >= 30
    ]
    planned = open_trace(str(captured(tmp_path / "t", steps, 32)))
    curves = lru_curves(planned.trace)
    assert curves.large_misses is not None
    for slots in (0, 8, 32):
        found = replay_trace(planned, uniform_slots(planned, slots)).to_json()
        large = sum(one["large"]["misses"] for one in found["per_layer"])
        assert curves.large_misses[:, slots].sum() == pytest.approx(large, rel=0.01)
        assert curves.misses[:, slots].sum() == pytest.approx(found["misses"], rel=0.01)


def test_static_curves_are_the_replays_and_concave(tmp_path: Path) -> None:
    planned = opened(tmp_path, 600, 3, 4, 32, 2)
    curves = static_curves(planned.trace)
    assert curves.concave_layers() == 3
    for slots in (0, 5, 17, 32):
        found = replay_trace(planned, uniform_slots(planned, slots), "static")
        assert curves.misses[:, slots].sum() == found.misses
        assert curves.missed_accesses[:, slots].sum() == found.to_json()["accesses"] - sum(
            layer[0][2] for layer in found.counters
        )


def test_a_static_set_of_other_traffic_misses_more(tmp_path: Path) -> None:
    first, rest = split_trace(opened(tmp_path, 600, 3, 4, 32).trace, 0.2)
    held_out, own = static_curves(rest, first), static_curves(rest)
    assert (held_out.misses >= own.misses).all()
    assert held_out.misses[:, 8].sum() > own.misses[:, 8].sum()
    assert held_out.unique.tolist() == own.unique.tolist()


def test_what_is_asked_for_is_counted_by_layer_step(tmp_path: Path) -> None:
    ids = np.array([[[0, 1]], [[1, 1]], [[2, -1]]], dtype=np.int16)
    trace = open_trace(str(raw(tmp_path / "t.i16", ids)), TraceShape(1, 2, 3, 2)).trace
    found = skew(trace)
    assert (found.used.tolist(), found.routed.tolist(), found.steps.tolist()) == ([[1, 1, 1]], [[1, 3, 1]], [2])


def test_curves_fall_and_are_read_between_sizes(tmp_path: Path) -> None:
    curves = lru_curves(opened(tmp_path, 400, 2, 4, 20).trace)
    assert (np.diff(curves.misses, axis=1) <= 0).all()
    assert curves.misses[:, 0].tolist() == curves.unique.tolist()
    assert (
        curves.misses[:, -1] == [len(np.unique(one[one >= 0])) for one in np.moveaxis(traffic_of(curves), 1, 0)]
    ).all()
    uniform = curves.uniform()
    assert curves.uniform_at(7.5) == pytest.approx((uniform[7] + uniform[8]) / 2)
    assert curves.misses_of({0: 3, 1: 9}) == curves.misses[0, 3] + curves.misses[1, 9]
    with pytest.raises(ValueError, match="21 slots a layer; 0 to 20"):
        curves.uniform_at(21)


def traffic_of(curves: MissCurves) -> np.ndarray:  # type: ignore[type-arg]
    ids = traffic(400, len(curves.layers), 4, curves.experts)
    ids[3, 0, 1] = -1
    return ids
