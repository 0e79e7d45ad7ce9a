"""A captured trace, replayed through the books alone, gives the counters of the engine that wrote it, every one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from soakrig.engine.offload.core import ExpertStore
from soakrig.engine.offload.plan import LayerPlan, LayerShape, ModelShape, OffloadPlan, PolicyName
from soakrig.engine.offload.replay import replay
from soakrig.engine.offload.settings import SplitName
from soakrig.engine.offload.trace import DECODE, PREFILL, read_trace

EXPERTS, TOP_K, LAYERS = 120, 4, 4
POLICIES: tuple[PolicyName, ...] = ("static", "lru", "lfru", "clock")


def plan(
    policy: PolicyName, slots: int, path: Path, *, arena: int = 0, staging: bool = True, groups: bool = True,
    split: SplitName = "experts",
) -> OffloadPlan:  # fmt: skip
    """Layer 0 stays on the device; the others start with a few hot experts."""
    shapes = tuple(LayerShape(layer, EXPERTS, 4) for layer in range(LAYERS))
    hot = tuple(range(slots // 3 or arena // 9))
    layers = tuple(LayerPlan(shape.layer, EXPERTS, 4, 0 if arena else slots, policy, hot) for shape in shapes[1:])
    return OffloadPlan(
        model=ModelShape("model", shapes, TOP_K), layers=layers, arena=arena, staging=staging, groups=groups,
        staging_rows=64, asked_gb=None, trace=str(path), skew=None, warnings=(),
        split=split,
    )  # fmt: skip


def run(plan: OffloadPlan, steps: int) -> list[list[list[int]]]:
    """Random traffic, skewed, small and large steps, sentinels and bad ids; the engine's counters."""
    rng = random.Random(5)
    weights = [1 / (rank + 1) for rank in range(EXPERTS)]
    store = ExpertStore(plan, torch.device("cpu"), 64)
    for layer in plan.model.layers:
        store.add_layer(layer.layer, {"weight": torch.zeros(EXPERTS, 1)})
    store.finish()
    for _ in range(steps):
        tokens = rng.choice((1, 1, 2, 5, 16, 17, 60))
        store.begin_step(np.full(tokens, PREFILL if tokens > 16 else DECODE, dtype=np.uint8))
        for layer in plan.model.layers:
            ids = torch.tensor(rng.choices(range(EXPERTS), weights, k=tokens * TOP_K)).view(tokens, TOP_K)
            if rng.random() < 0.1:
                ids[0, 1], ids[-1, 2] = rng.choice((-1, EXPERTS)), rng.choice((-1, -7, EXPERTS + 1, 2**40))
            for _ in store.parts(layer.layer, ids):
                pass
        store.end_step()
    counters = store.counters()
    store.close()
    return counters


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "shape",
    [
        {"slots": 7},
        {"slots": 40},
        {"slots": 0, "arena": 50},
        {"slots": 9, "staging": False},
        {"slots": 5, "split": "rows"},
        {"slots": 7, "groups": False},
        {"slots": EXPERTS},
    ],
)
def test_a_replay_predicts_the_engines_own_counters_exactly(
    policy: PolicyName, shape: dict[str, int], tmp_path: Path
) -> None:
    own = plan(policy, path=tmp_path / "a.trace", **shape)  # type: ignore[arg-type]
    counted = run(own, 120)
    trace = read_trace(str(tmp_path / "a.trace"))
    assert trace.header.plan == own
    predicted = replay(trace, own)
    assert predicted[1:] == counted[1:]
    assert predicted[0] == [[0] * len(row) for row in predicted[0]]
    # The figures depend on the plan, so that agreeing on them is not for nothing.
    assert replay(trace, plan(policy, 20, tmp_path / "b.trace")) != predicted


def test_one_trace_predicts_other_settings_of_the_same_traffic(tmp_path: Path) -> None:
    run(plan("lru", 7, tmp_path / "a.trace"), 60)
    trace = read_trace(str(tmp_path / "a.trace"))
    for policy in POLICIES:
        other = plan(policy, 20, tmp_path / f"{policy}.trace")
        assert run(other, 60)[1:] == replay(trace, other)[1:]


def test_a_trace_of_other_layers_is_refused(tmp_path: Path) -> None:
    own = plan("lru", 7, tmp_path / "a.trace")
    run(own, 3)
    model = replace(own.model, layers=own.model.layers[:3])
    with pytest.raises(ValueError, match=r"the trace has layers \[0, 1, 2, 3\], the plan's model \[0, 1, 2\]"):
        replay(read_trace(str(tmp_path / "a.trace")), replace(own, model=model, layers=own.layers[:2]))


def test_a_trace_of_other_experts_is_refused(tmp_path: Path) -> None:
    own = plan("lru", 7, tmp_path / "a.trace")
    run(own, 3)
    shapes = tuple(replace(layer, experts=60) for layer in own.model.layers)
    layers = tuple(replace(layer, experts=60, hot=()) for layer in own.layers)
    for model in (replace(own.model, layers=shapes), replace(own.model, top_k=2)):
        with pytest.raises(ValueError, match=r"has top 4 of 120 experts, the plan's model top (4 of 60|2 of 120)"):
            replay(read_trace(str(tmp_path / "a.trace")), replace(own, model=model, layers=layers))
