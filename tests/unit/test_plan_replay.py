"""Replays: the engine's own books on a trace, both semantics, the optimum, and what the slots start with."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_model import LayerModel, PoolModel, Slot
from plan_builders import captured, lru_misses, raw, traffic
from soakrig.engine.offload.profile import HotProfile
from soakrig.engine.offload.replay import replay
from soakrig.engine.planning.curve import skew
from soakrig.engine.planning.replay import (
    REPLAY_POLICIES,
    ReplayPolicy,
    replay_arena,
    replay_as_captured,
    replay_trace,
    uniform_slots,
)
from soakrig.engine.planning.trace import PlannedTrace, TraceShape, open_trace
from soakrig.errors import UsageError
from unit.test_offload_optimum import by_trying_everything
from unit.test_offload_replay import POLICIES, plan, run

EXPERTS, TOP_K, LAYERS = 24, 4, 3


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> PlannedTrace:
    """Decode steps of one to four rows and prefill in between."""
    rng, ids = random.Random(2), traffic(700, LAYERS, TOP_K, EXPERTS)
    ids[5, 1] = -1
    ids[9:11, 2, 0] = -1
    steps, row = [], 0
    while row < len(ids):
        rows = rng.choice((1, 1, 2, 4, 30))
        steps.append(ids[row : row + rows])
        row += rows
    return open_trace(str(captured(tmp_path_factory.mktemp("trace") / "t", steps, EXPERTS)))


@pytest.mark.parametrize("policy", ["lru", "lfru", "clock"])
@pytest.mark.parametrize("slots", [0, 3, 9, EXPERTS])
def test_steps_are_counted_as_the_plain_model_counts_them(
    planned: PlannedTrace, policy: ReplayPolicy, slots: int
) -> None:
    found = replay_trace(planned, uniform_slots(planned, slots), policy).to_json()
    for layer in range(LAYERS):
        model = LayerModel(
            layer, EXPERTS, 0, PoolModel([Slot() for _ in range(slots)], policy), staging=True, groups=True
        )
        for _, ids in planned.trace.steps():
            model.step(ids[:, layer].tolist())
        small, large, counted = model.counts["small"], model.counts["large"], found["per_layer"][layer]
        for name in (
            "steps",
            "accesses",
            "hits",
            "unique",
            "unique_hits",
            "clean_steps",
            "fills",
            "evictions",
            "staged",
        ):
            assert counted[name] == small[name], name
            assert counted["large"][name] == large[name], name
        assert counted["misses"] == small["unique"] - small["unique_hits"]
        assert counted["large"]["misses"] == large["unique"] - large["unique_hits"]
    assert found["misses"] == sum(one["misses"] for one in found["per_layer"])
    assert found["misses_per_step_per_layer"] == found["misses"] / sum(one["steps"] for one in found["per_layer"])


@pytest.mark.parametrize("slots", [0, 1, 3, 9, EXPERTS])
def test_sequential_lru_is_a_plain_lru(planned: PlannedTrace, slots: int) -> None:
    found = replay_trace(planned, uniform_slots(planned, slots), "lru", "sequential").to_json()
    small = [ids for _, ids in planned.trace.steps() if len(ids) * TOP_K <= 64]
    steps = 0
    for layer in range(LAYERS):
        ids = [int(one) for step in small for one in step[:, layer].reshape(-1) if one >= 0]
        steps += sum(bool((step[:, layer] >= 0).any()) for step in small)
        assert found["per_layer"][layer]["misses"] == lru_misses(ids, slots)
        assert found["per_layer"][layer]["accesses"] == len(ids)
    assert found["misses_per_step_per_layer"] == found["misses"] / steps
    hits = found["accesses"] - found["misses"]
    assert found["hit_rate"]["per_access"] == found["hit_rate"]["per_unique"] == hits / found["accesses"]


def test_the_two_semantics_differ_on_steps_of_several_tokens(planned: PlannedTrace) -> None:
    slots = uniform_slots(planned, 8)
    found = {name: replay_trace(planned, slots, "lru", name).misses for name in ("step", "sequential")}
    assert found["step"] < found["sequential"]


@given(st.lists(st.lists(st.integers(-1, 4), min_size=2, max_size=2), min_size=1, max_size=8), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_the_optimum_is_the_least_of_all_schedules_in_both_semantics(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], slots: int
) -> None:
    ids = np.array(rows, dtype=np.int16)[:, None, :]
    planned = open_trace(str(raw(tmp_path_factory.getbasetemp() / "o.i16", ids)), TraceShape(1, 2, 5))
    valid = [[one for one in row if one >= 0] for row in rows]
    for semantics, steps in (
        ("step", [row for row in valid if row]),
        ("sequential", [[one] for row in valid for one in row]),
    ):
        found = replay_trace(planned, {0: slots}, "opt", semantics)  # type: ignore[arg-type]
        assert found.misses == by_trying_everything(steps, slots)


def test_no_policy_is_below_the_optimum(planned: PlannedTrace) -> None:
    slots = uniform_slots(planned, 8)
    found = {policy: replay_trace(planned, slots, policy) for policy in REPLAY_POLICIES}
    fewest = found["opt"]
    assert all(fewest.misses < found[policy].misses for policy in REPLAY_POLICIES if policy != "opt")
    rates = fewest.hit_rates()
    unique = sum(layer[0][3] for layer in fewest.counters)
    assert rates["per_unique"] == (unique - fewest.misses) / unique
    accesses = fewest.to_json()["accesses"]
    assert accesses == found["lru"].to_json()["accesses"]


def test_static_pins_what_the_trace_uses_most_and_says_so(planned: PlannedTrace) -> None:
    found = replay_trace(planned, uniform_slots(planned, 6), "static")
    used = skew(planned.trace).used
    for layer, counters in enumerate(found.counters):
        assert counters[0][4] == np.sort(used[layer])[::-1][:6].sum()
    assert "upper bound" in found.hot_set


def test_a_profile_is_taken_and_a_foreign_one_refused(planned: PlannedTrace) -> None:
    counts = {layer: np.arange(EXPERTS, dtype=np.int64) for layer in range(LAYERS)}
    profile = HotProfile("m", None, EXPERTS, 9, counts)
    found = replay_trace(planned, uniform_slots(planned, 4), "static", profile=profile)
    used = skew(planned.trace).used
    assert [layer[0][4] for layer in found.counters] == [int(used[at, -4:].sum()) for at in range(LAYERS)]
    with pytest.raises(UsageError, match="the profile is of m, 25 experts"):
        replay_trace(planned, {0: 4}, "static", profile=replace(profile, experts=25))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_captured_trace_gives_the_counters_of_the_engine_that_wrote_it(policy: ReplayPolicy, tmp_path: Path) -> None:
    own = plan(policy, 7, tmp_path / "a.trace")  # type: ignore[arg-type]
    counted = run(own, 80)
    planned = open_trace(str(tmp_path / "a.trace"))
    slots = {layer.layer: 7 for layer in own.layers}
    assert uniform_slots(planned, 7) == slots
    for found in (replay_as_captured(planned), replay_trace(planned, slots, policy)):
        assert found.layers == (1, 2, 3)
        assert found.counters == counted[1:]
        assert (found.policy, found.misses) == (policy, sum(layer[0][3] - layer[0][4] for layer in counted[1:]))
    if policy != "static":
        assert replay_trace(planned, slots, policy, cold=True).counters != counted[1:], "it started with hot experts"


def test_an_arena_is_replayed_as_one(planned: PlannedTrace, tmp_path: Path) -> None:
    found = replay_arena(planned, 20)
    assert found.to_json()["per_layer"][0]["slots"] is None
    own = plan("lru", 0, tmp_path / "a.trace", arena=50)
    counted = run(own, 60)
    captured_trace = open_trace(str(tmp_path / "a.trace"))
    assert replay_as_captured(captured_trace).counters == counted[1:]
    assert replay(captured_trace.trace, own) == [[[0] * 13] * 2, *counted[1:]]
    for slots in (0, LAYERS * EXPERTS + 1):
        with pytest.raises(UsageError, match=f"an arena of {slots} slots; 1 to 72"):
            replay_arena(planned, slots)


def test_slots_that_cannot_be_are_refused(planned: PlannedTrace) -> None:
    with pytest.raises(UsageError, match=r"layers \[7\], and .* has layers 0 to 2"):
        replay_trace(planned, {0: 1, 7: 1})
    with pytest.raises(UsageError, match="layer 1 is given 25 slots; 0 to 24"):
        replay_trace(planned, {0: 1, 1: 25})
    with pytest.raises(UsageError, match="does not say how its engine was offloaded"):
        replay_as_captured(planned)


def test_the_json_has_the_contracts_keys(planned: PlannedTrace) -> None:
    found = replay_trace(planned, uniform_slots(planned, 8)).to_json()
    assert list(found) == [
        "misses", "accesses", "misses_per_step_per_layer", "hit_rate", "per_layer", "rows", "policy", "semantics",
    ]  # fmt: skip
    assert list(found["hit_rate"]) == ["per_access", "per_unique"]
    assert found["rows"] == planned.rows
