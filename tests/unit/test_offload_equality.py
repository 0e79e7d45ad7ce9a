"""Replies and prompt logprobs of whole requests, batched as they come: the same bits wherever the experts are.

The tolerance is zero. Two variants that must not come back are held to fail the same comparison: partial sums of each
group, rounded and then added, and the same in the wider type.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_bench import Bench, prompt
from soakrig.engine.embedded import experts
from soakrig.engine.offload.core import Part

MODEL = {"hidden": 64, "layers": 2, "experts": 96, "top_k": 4, "max_model_len": 2048, "kv_tokens": 8192, "threads": 1}
LENGTHS = (4, 30, 150, 700)
STAGED = {"CPU_OFFLOAD_GB": "1"}
Answers = dict[str, tuple[str, list[Any]]]


def answers(dtype: str, environment: dict[str, str]) -> Answers:
    """Text and prompt logprobs of four requests that share steps, after one that warms the cache."""
    bench = Bench(environment, dtype=dtype, **MODEL)
    bench.add("first", prompt(9, 90))
    bench.run()
    for number, length in enumerate(LENGTHS):
        bench.add(str(length), prompt(number, length), prompt_logprobs=2)
        bench.step()
    bench.run()
    bench.runner.store.close()
    return {name: (bench.text(name), rows(bench.events[name])) for name in map(str, LENGTHS)}


def rows(events: list[dict[str, Any]]) -> list[Any]:
    (found,) = [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event]
    return found


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def resident(request: pytest.FixtureRequest) -> tuple[str, Answers]:
    return request.param, answers(request.param, {})


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "skew.json"
    answers("float32", {**STAGED, "VLLM_MOE_SKEW_PERLAYER": str(path)})
    return str(path)


@pytest.mark.parametrize("staging", ["1", "0"])
@pytest.mark.parametrize(
    ("slots", "policy"),
    [
        ("0", "auto"),
        ("24", "lru"),
        ("48", "lfru"),
        ("72", "clock"),
        ("24", "static"),
        ("96", "lru"),
        ("arena:60", "clock"),
    ],
)
def test_every_setting_gives_the_bits_of_the_resident_engine(
    slots: str, policy: str, staging: str, resident: tuple[str, Answers], profile: str
) -> None:
    dtype, wanted = resident
    pinned = {} if slots == "0" else {"VLLM_MOE_HOT_PROFILE": profile}
    cache = {"VLLM_MOE_HOT_SLOTS": slots, "VLLM_MOE_SLOT_POLICY": policy, "VLLM_MOE_DMA_STAGING": staging}
    assert answers(dtype, {**STAGED, **cache, **pinned}) == wanted


def test_groups_on_and_off_give_the_same_bits(resident: tuple[str, Answers]) -> None:
    dtype, wanted = resident
    assert answers(dtype, {**STAGED, "VLLM_MOE_PREFILL_GROUPS": "0"}) == wanted


@pytest.mark.parametrize("accumulated_in", [None, torch.float64])
def test_summing_partial_outputs_of_groups_is_not_equivalent(
    accumulated_in: torch.dtype | None, resident: tuple[str, Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forbidden variant: each group is reduced by itself, its sum rounded, and the sums added up."""
    dtype, wanted = resident
    whole = experts.by_expert
    groups = steps = 0

    def partial_sums(parts: Iterable[Part], hidden: Tensor, weights: Tensor) -> Tensor:
        nonlocal groups, steps
        steps += 1
        total = torch.zeros_like(hidden, dtype=accumulated_in or hidden.dtype)
        for part in parts:
            groups += 1
            total += whole([part], hidden, weights)
        return total.to(hidden.dtype)

    monkeypatch.setattr(experts, "by_expert", partial_sums)
    assert answers(dtype, {**STAGED, "VLLM_MOE_HOT_SLOTS": "8"}) != wanted
    assert groups > steps, "no step took more than one group"


def test_the_comparison_sees_one_heavier_pair(resident: tuple[str, Answers], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own control: one hundredth more on one pair's weight in one step."""
    dtype, wanted = resident
    whole = experts.by_expert
    calls = 0

    def one_off(parts: Iterable[Part], hidden: Tensor, weights: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 7:
            weights = weights.clone()
            weights[len(weights) // 2, 0] += 1e-2
        return whole(parts, hidden, weights)

    monkeypatch.setattr(experts, "by_expert", one_off)
    assert answers(dtype, {}) != wanted
    assert calls >= 7


def test_the_profile_of_the_traffic_is_of_both_layers(profile: str) -> None:
    assert '"0":[' in Path(profile).read_text()
