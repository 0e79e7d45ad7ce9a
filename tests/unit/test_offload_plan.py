"""What leaves the device, how many slots each layer gets, what is pinned: by hand on small models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soakrig.engine.offload.plan import GIB, LayerPlan, LayerShape, ModelShape, OffloadPlan
from soakrig.engine.offload.profile import HotProfile, write_profile
from soakrig.engine.offload.settings import OffloadSettings
from soakrig.engine.offload.slot_map import SlotMap, write_slot_map
from soakrig.errors import UsageError

EXPERTS = 4
# A layer of 4 experts is half a GiB.
MODEL = ModelShape("m", tuple(LayerShape(layer, EXPERTS, GIB // 8) for layer in (0, 1, 5, 6)), top_k=2)
UNEVEN = ModelShape("m", (LayerShape(0, EXPERTS, GIB // 4), LayerShape(1, EXPERTS, GIB // 8)), top_k=2)


def build(model: ModelShape = MODEL, **environment: str) -> OffloadPlan:
    return OffloadPlan.build(OffloadSettings.from_environment(environment), model)


def offloaded(plan: OffloadPlan) -> list[int]:
    return [layer.layer for layer in plan.layers]


def profile(tmp_path: Path, counts: dict[int, list[int]], gb: float | None = None, **change: Any) -> str:
    path = str(tmp_path / "hot.json")
    arrays = {layer: np.array(one, dtype=np.int64) for layer, one in counts.items()}
    write_profile(path, replace(HotProfile("m", gb, EXPERTS, 10, arrays), **change))
    return path


COUNTS = {0: [1, 9, 5, 5], 1: [0, 0, 7, 0], 5: [2000] * 4, 6: [0, 1, 0, 3]}


@pytest.mark.parametrize(
    ("gb", "layers"),
    [("0", []), ("0.001", [0]), ("0.5", [0]), ("0.6", [0, 1]), ("1.5", [0, 1, 5]), ("2", [0, 1, 5, 6])],
)
def test_layers_leave_in_order_until_the_bytes_asked_for_are_off(gb: str, layers: list[int]) -> None:
    plan = build(CPU_OFFLOAD_GB=gb)
    assert offloaded(plan) == layers
    assert plan.warnings == ()
    assert plan.bank_bytes == len(layers) * GIB // 2


def test_each_layer_is_priced_at_its_own_row() -> None:
    assert offloaded(build(UNEVEN, CPU_OFFLOAD_GB="1")) == [0]
    plan = build(UNEVEN, CPU_OFFLOAD_GB="1.01")
    assert plan.row_bytes == {0: GIB // 4, 1: GIB // 8}
    assert plan.bank_bytes == GIB + GIB // 2


def test_slots_alone_offload_everything_and_nothing_asked_is_nothing() -> None:
    assert offloaded(build(VLLM_MOE_HOT_SLOTS="2")) == [0, 1, 5, 6]
    plan = build()
    assert (plan.layers, plan.asked_gb, plan.arena, plan.warnings) == ((), None, 0, ())
    assert plan.report()["offloaded_layers"] == 0


def test_more_than_there_is_offloads_all_and_says_both_numbers() -> None:
    plan = build(CPU_OFFLOAD_GB="90.5")
    assert offloaded(plan) == [0, 1, 5, 6]
    (warning,) = plan.warnings
    assert "CPU_OFFLOAD_GB=90.5 is more than the 2 GiB" in warning
    assert "0-1, 5-6 (4 layers)" in warning


def test_slots_of_every_layer_up_to_all_experts() -> None:
    plan = build(VLLM_MOE_HOT_SLOTS="4", VLLM_MOE_SLOT_POLICY="clock")
    assert [(layer.slots, layer.policy, layer.hot) for layer in plan.layers] == [(4, "clock", ())] * 4
    with pytest.raises(UsageError, match="VLLM_MOE_HOT_SLOTS=5 asks for 5 slots in layer 0, which has 4 experts"):
        build(VLLM_MOE_HOT_SLOTS="5")


def test_an_arena_is_shared_and_needs_rows_of_one_size() -> None:
    plan = build(VLLM_MOE_HOT_SLOTS="arena:16")
    assert plan.arena == 16
    assert [layer.slots for layer in plan.layers] == [0] * 4
    with pytest.raises(UsageError, match="asks for 17 shared slots, and the 4 offloaded layers have 16 experts"):
        build(VLLM_MOE_HOT_SLOTS="arena:17")
    with pytest.raises(UsageError, match="asks for 9 shared slots, and the 2 offloaded layers have 8 experts"):
        build(VLLM_MOE_HOT_SLOTS="arena:9", CPU_OFFLOAD_GB="1")
    with pytest.raises(UsageError, match=f"row of layer 0 has {GIB // 4} bytes and one of layer 1 {GIB // 8}"):
        build(UNEVEN, VLLM_MOE_HOT_SLOTS="arena:3")
    assert build(UNEVEN, VLLM_MOE_HOT_SLOTS="arena:3", CPU_OFFLOAD_GB="0.1").arena == 3


def test_a_map_gives_each_layer_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "slots.json")
    write_slot_map(path, SlotMap(EXPERTS, {0: 0, 1: 4, 5: 2, 6: 1}))
    assert [layer.slots for layer in build(VLLM_MOE_HOT_SLOTS=path).layers] == [0, 4, 2, 1]
    with pytest.raises(UsageError, match=r"slots to layers 0-1, 5-6 \(4 layers\), .* are 0-1 \(2 layers\)"):
        build(VLLM_MOE_HOT_SLOTS=path, CPU_OFFLOAD_GB="1")
    write_slot_map(path, SlotMap(EXPERTS, {0: 1, 1: 1, 5: 1, 7: 1}))
    with pytest.raises(UsageError, match=r"layers 0-1, 5, 7 \(4 layers\), .* are 0-1, 5-6"):
        build(VLLM_MOE_HOT_SLOTS=path)
    write_slot_map(path, SlotMap(8, {0: 1, 1: 1, 5: 1, 6: 1}))
    with pytest.raises(UsageError, match="made for 8 experts a layer, and layer 0 has 4"):
        build(VLLM_MOE_HOT_SLOTS=path)


def test_a_model_without_experts_offloads_nothing_and_cannot_be_asked_to() -> None:
    dense = ModelShape("dense", (), top_k=1)
    assert build(dense).layers == ()
    with pytest.raises(UsageError, match="dense has no MoE layer to offload"):
        build(dense, CPU_OFFLOAD_GB="1")


def test_a_model_that_no_trace_can_hold_is_refused_at_start(tmp_path: Path) -> None:
    out = str(tmp_path / "trace")
    assert build(ModelShape("m", (LayerShape(0, 32767, 8),), 2), VLLM_MOE_ROUTING_TRACE=out).trace == out
    for layers, experts in (((), 0), ((LayerShape(0, 32768, 8),), 32768)):
        with pytest.raises(UsageError, match=f"holds 1 to 32767 experts a layer, and m has {experts}"):
            build(ModelShape("m", layers, 2), VLLM_MOE_ROUTING_TRACE=out)


def test_the_hot_set_is_the_most_counted_of_each_layer(tmp_path: Path) -> None:
    path = profile(tmp_path, COUNTS)
    plan = build(VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_HOT_PROFILE=path)
    assert [layer.hot for layer in plan.layers] == [(1, 2), (2,), (0, 1), (3, 1)]
    assert {layer.policy for layer in plan.layers} == {"static"}
    assert plan.warnings == ()
    warm = build(VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_HOT_PROFILE=path, VLLM_MOE_SLOT_POLICY="lfru")
    assert [layer.hot for layer in warm.layers] == [layer.hot for layer in plan.layers]
    assert {layer.policy for layer in warm.layers} == {"lfru"}


def test_an_arena_pins_the_greatest_shares_of_their_layers(tmp_path: Path) -> None:
    # Shares: layer 0: .05 .45 .25 .25; layer 1: expert 2 alone; layer 5: .25 each; layer 6: expert 3 .75, expert 1 .25.
    path = profile(tmp_path, COUNTS)
    plan = build(VLLM_MOE_HOT_SLOTS="arena:6", VLLM_MOE_HOT_PROFILE=path)
    assert [layer.hot for layer in plan.layers] == [(1, 2, 3), (2,), (0,), (3,)]
    everything = build(VLLM_MOE_HOT_SLOTS="arena:16", VLLM_MOE_HOT_PROFILE=path)
    assert [layer.hot for layer in everything.layers] == [(1, 2, 3, 0), (2,), (0, 1, 2, 3), (3, 1)]
    missing = build(VLLM_MOE_HOT_SLOTS="arena:6", VLLM_MOE_HOT_PROFILE=profile(tmp_path, {0: COUNTS[0]}))
    assert [(layer.hot, layer.policy) for layer in missing.layers] == [((1, 2, 3, 0), "static")] + [((), "static")] * 3
    assert "start cold: layers 1, 5-6 (3 layers)" in missing.warnings[0]


def test_a_profile_of_another_offload_warns_once_and_falls_back_by_layer(tmp_path: Path) -> None:
    path = profile(tmp_path, {0: COUNTS[0], 1: [0, 0, 0, 0]}, gb=1.0)
    plan = build(VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_HOT_PROFILE=path, CPU_OFFLOAD_GB="1.5")
    assert [(layer.layer, layer.policy, layer.hot) for layer in plan.layers] == [
        (0, "static", (1, 2)),
        (1, "lru", ()),
        (5, "lru", ()),
    ]
    (warning,) = plan.warnings
    assert "taken at CPU_OFFLOAD_GB=1, layers 0-1 (2 layers)" in warning
    assert "this engine has CPU_OFFLOAD_GB=1.5, layers 0-1, 5 (3 layers)" in warning
    assert "run lru from cold: layers 1, 5 (2 layers)" in warning
    warm = build(VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_HOT_PROFILE=path, CPU_OFFLOAD_GB="1.5", VLLM_MOE_SLOT_POLICY="clock")
    assert [layer.policy for layer in warm.layers] == ["clock"] * 3


def test_another_gib_or_more_layers_warn_without_a_fallback(tmp_path: Path) -> None:
    path = profile(tmp_path, COUNTS, gb=2.0)
    (warning,) = build(VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_HOT_PROFILE=path).warnings
    assert "CPU_OFFLOAD_GB=2, " in warning
    assert "CPU_OFFLOAD_GB=(unset), " in warning
    assert "cold" not in warning
    plan = build(VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_HOT_PROFILE=profile(tmp_path, COUNTS, gb=0.5), CPU_OFFLOAD_GB="0.5")
    assert [layer.hot for layer in plan.layers] == [(1, 2)]
    assert "layers 0-1, 5-6 (4 layers); this engine has CPU_OFFLOAD_GB=0.5, layers 0 (1 layer)" in plan.warnings[0]


def test_a_layer_that_nothing_was_routed_to_is_told_even_where_all_else_fits(tmp_path: Path) -> None:
    path = profile(tmp_path, {**COUNTS, 5: [0] * 4})
    plan = build(VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_HOT_PROFILE=path)
    assert [layer.policy for layer in plan.layers] == ["static", "static", "lru", "static"]
    assert "run lru from cold: layers 5 (1 layer)" in plan.warnings[0]


def test_a_profile_that_cannot_serve_is_refused(tmp_path: Path) -> None:
    def refused(path: str, named: str, **more: str) -> None:
        with pytest.raises(UsageError, match=named) as caught:
            build(**{"VLLM_MOE_HOT_SLOTS": "2", "VLLM_MOE_HOT_PROFILE": path, **more})
        assert path in str(caught.value)

    refused(profile(tmp_path, COUNTS, model="other"), "foreign: it was taken of other with 4 .* this is m with 4")
    refused(profile(tmp_path, {0: [1, 2]}, experts=2), "foreign: it was taken of m with 2 .* this is m with 4")
    refused(profile(tmp_path, {}), "is empty: 0 layers, 10 steps")
    refused(profile(tmp_path, {0: [0, 0, 0, 0]}), "is empty: 1 layers, 10 steps, and every count is 0")
    path = profile(tmp_path, {5: COUNTS[5], 0: [0, 0, 0, 0]})
    refused(path, r"counts of layers 5 \(1 layer\), and none of the offloaded layers 0 ", CPU_OFFLOAD_GB="0.5")
    slots = str(tmp_path / "slots.json")
    write_slot_map(slots, SlotMap(EXPERTS, dict.fromkeys((0, 1, 5, 6), 0)))
    refused(profile(tmp_path, COUNTS), "nothing to pin in", VLLM_MOE_HOT_SLOTS=slots)


def test_frozen_slots_that_nothing_fills_are_told(tmp_path: Path) -> None:
    plan = build(VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_DMA_STAGING="0")
    assert plan.frozen
    assert "the 8 slots stay empty" in plan.warnings[0]
    path = profile(tmp_path, COUNTS)
    pinned = build(VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_DMA_STAGING="0", VLLM_MOE_HOT_PROFILE=path)
    assert (pinned.frozen, pinned.warnings) == (True, ())
    assert build(CPU_OFFLOAD_GB="1", VLLM_MOE_DMA_STAGING="0").warnings == ()
    assert not build(VLLM_MOE_HOT_SLOTS="2").frozen


def test_the_report_says_what_the_settings_came_to(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    path = profile(tmp_path, COUNTS)
    plan = build(
        VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_HOT_PROFILE=path, VLLM_MOE_ROUTING_TRACE=out, VLLM_MOE_PREFILL_GROUPS="0"
    )
    report = plan.report()
    assert json.loads(json.dumps(report)) == report
    assert report["layers"][1] == {
        "layer": 1, "experts": 4, "row_bytes": GIB // 8, "slots": 2, "policy": "static", "hot": 1,
    }  # fmt: skip
    assert (report["slots"], report["arena"], report["frozen"], report["staging_rows"]) == (8, False, False, 64)
    assert (report["groups"], report["trace"], report["skew"], report["bank_bytes"]) == (False, out, None, 2 * GIB)


@st.composite
def plans(draw: st.DrawFn) -> OffloadPlan:
    experts = draw(st.integers(1, 6))
    numbers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True))
    shapes = tuple(LayerShape(number, experts, draw(st.integers(1, 2**40))) for number in numbers)
    arena = draw(st.integers(0, 3))
    layers: list[LayerPlan] = []
    left = arena
    for shape in shapes[: draw(st.integers(1, len(shapes)))]:
        slots = 0 if arena else draw(st.integers(0, experts))
        most = min(left, experts) if arena else slots
        hot = tuple(draw(st.permutations(range(experts)))[: draw(st.integers(0, most))])
        left -= len(hot)
        policy = draw(st.sampled_from(["static", "lru", "lfru", "clock"]))
        layers.append(LayerPlan(shape.layer, experts, shape.row_bytes, slots, policy, hot))
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    return OffloadPlan(
        model=ModelShape(draw(text), shapes, draw(st.integers(1, 8))),
        layers=tuple(layers),
        arena=min(arena, experts * len(layers)),
        staging=draw(st.booleans()),
        groups=draw(st.booleans()),
        staging_rows=64,
        asked_gb=draw(st.none() | st.floats(0, 1e6)),
        trace=draw(st.none() | text),
        skew=draw(st.none() | text),
        warnings=tuple(draw(st.lists(text, max_size=2))),
    )


def one_layer(layer: int, experts: int, slots: int, policy: str, hot: list[int]) -> dict[str, Any]:
    return {"layer": layer, "experts": experts, "row_bytes": 8, "slots": slots, "policy": policy, "hot": hot}


@given(plans())
def test_a_plan_comes_back_from_json(plan: OffloadPlan) -> None:
    text = json.dumps(plan.to_json())
    assert OffloadPlan.from_json(json.loads(text)) == plan


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"staging": 1}, "staging: .*'1'"),
        ({"arena": None}, "arena: .*'None'"),
        ({"asked_gb": "90"}, "asked_gb: .*'90'"),
        ({"colour": 1}, "colour: Unexpected"),
        ({"layers": [{"layer": 0}]}, "layers.0.experts: .*required"),
        ({"model": "m"}, "model: "),
        ({"layers": [one_layer(3, 4, 2, "lru", [])]}, r"layers \[3\] of"),
        ({"layers": [one_layer(0, 5, 2, "lru", [])]}, "5 experts of 8 bytes"),
        ({"layers": [one_layer(0, 4, 5, "lru", [])]}, "5 slots and 4 experts"),
        ({"layers": [one_layer(0, 4, 2, "opt", [])]}, "policy: .*'opt'"),
        ({"layers": [one_layer(0, 4, 2, "lru", [1, 1])]}, r"hot experts \[1, 1\]"),
        ({"layers": [one_layer(0, 4, 1, "lru", [1, 2])]}, "for 1 places"),
        ({"layers": [one_layer(0, 4, 2, "lru", [4])]}, r"\[4\] of 4"),
        ({"arena": 3}, "2 slots and 4 experts, the arena 3"),
        ({"layers": [], "arena": 3}, "an arena of 3 slots"),
    ],
)  # fmt: skip
def test_json_that_is_no_plan_is_refused(change: dict[str, Any], named: str) -> None:
    raw = build(ModelShape("m", (LayerShape(0, 4, 8),), 2), VLLM_MOE_HOT_SLOTS="2").to_json()
    with pytest.raises(UsageError, match=named):
        OffloadPlan.from_json({**raw, **change})
    assert OffloadPlan.from_json(raw).to_json() == raw
