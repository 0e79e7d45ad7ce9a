"""Where the experts are changes no number of the embedded engine; an id of no expert ends its own request only."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_bench import SMALL, Bench, prompt
from soakrig.engine.embedded.config import VOCABULARY, EngineConfig
from soakrig.engine.embedded.experts import by_expert, draw_layers, gathered
from soakrig.engine.embedded.kv_cache import BlockTable, KVCache
from soakrig.engine.embedded.model import Decoder, SequenceSpan, StepBatch
from soakrig.engine.embedded.reply_script import ReplySpec
from soakrig.engine.embedded.runner import Runner
from soakrig.engine.embedded.settings import Settings
from soakrig.engine.embedded.weights import Seeded
from soakrig.engine.offload.core import Part
from soakrig.engine.offload.counters import COUNTERS
from soakrig.engine.offload.plan import OffloadPlan
from soakrig.engine.offload.profile import read_profile
from soakrig.engine.offload.staging import Staging
from soakrig.engine.offload.trace import read_trace

# More experts than the staging buffer has rows, so that a chunk takes more than one group.
CONFIG = EngineConfig(hidden=64, layers=3, experts=128, top_k=4, max_model_len=1024, kv_tokens=1024, threads=1)
TOKENS = torch.randint(VOCABULARY, (360,), generator=torch.Generator().manual_seed(1)).tolist()
CUTS = (0, 200, 201, 202, 210, 226, 243, *range(244, 300), 316, 360)
"""Chunks and decodes; 8 tokens are the most that the host gathers at once, 16 the most that the core calls small."""
ROW_GB = 3 * 64 * 64 * 4 / 2**30
ALL = {"CPU_OFFLOAD_GB": "1"}


def logits(runner: Runner) -> torch.Tensor:
    """Of all tokens, computed step by step as the worker does."""
    cache = KVCache(CONFIG)
    blocks = list(range(64))
    found: list[torch.Tensor] = []
    for start, stop in pairwise(CUTS):
        places = torch.arange(start, stop)
        table = BlockTable(blocks[: -(-stop // 16)], torch.device("cpu"))
        batch = StepBatch(
            torch.tensor(TOKENS[start:stop]), places, places, [SequenceSpan(0, stop - start, start, table)],
            torch.arange(stop - start),
        )  # fmt: skip
        runner.store.begin_step(np.zeros(stop - start, dtype=np.uint8))
        found.append(runner._model.forward(batch, cache))
        assert runner.store.end_step().bad_tokens == []
    return torch.cat(found)


def runner(**environment: str) -> Runner:
    return Runner(CONFIG, OffloadPlan.build(Settings.from_environment(environment), CONFIG.model_shape))


def total(one: Runner, path: int) -> dict[str, int]:
    summed = np.array(one.store.counters())[:, path].sum(axis=0)
    return dict(zip(COUNTERS, summed.tolist(), strict=True))


@pytest.fixture(scope="module")
def resident() -> torch.Tensor:
    """From a decoder that knows nothing of the core."""
    torch.set_num_threads(1)
    cache, found = KVCache(CONFIG), []
    decoder = Decoder(CONFIG)
    for start, stop in pairwise(CUTS):
        places = torch.arange(start, stop)
        span = SequenceSpan(0, stop - start, start, BlockTable(list(range(64))[: -(-stop // 16)], torch.device("cpu")))
        batch = StepBatch(torch.tensor(TOKENS[start:stop]), places, places, [span], torch.arange(stop - start))
        found.append(decoder.forward(batch, cache))
    return torch.cat(found)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "skew.json"
    taken = runner(**ALL, VLLM_MOE_SKEW_PERLAYER=str(path))
    logits(taken)
    taken.store.close()
    return str(path)


PLANS: dict[str, dict[str, str]] = {
    "resident": {},
    "no slots, staged": ALL,
    "no slots, in place": {**ALL, "VLLM_MOE_DMA_STAGING": "0"},
    "no groups": {"VLLM_MOE_HOT_SLOTS": "32", "VLLM_MOE_PREFILL_GROUPS": "0"},
    "one layer of three": {"CPU_OFFLOAD_GB": f"{ROW_GB:.9f}", "VLLM_MOE_HOT_SLOTS": "32"},
    "static": {"VLLM_MOE_HOT_SLOTS": "32", "VLLM_MOE_HOT_PROFILE": "PROFILE"},
    "warm lru": {"VLLM_MOE_HOT_SLOTS": "32", "VLLM_MOE_HOT_PROFILE": "PROFILE", "VLLM_MOE_SLOT_POLICY": "lru"},
    "frozen": {"VLLM_MOE_HOT_SLOTS": "32", "VLLM_MOE_HOT_PROFILE": "PROFILE", "VLLM_MOE_DMA_STAGING": "0"},
    "static arena": {"VLLM_MOE_HOT_SLOTS": "arena:96", "VLLM_MOE_HOT_PROFILE": "PROFILE"},
    "map": {"VLLM_MOE_HOT_SLOTS": "MAP"},
    **{
        f"{policy}, {slots}": {"VLLM_MOE_HOT_SLOTS": slots, "VLLM_MOE_SLOT_POLICY": policy}
        for policy in ("lru", "lfru", "clock")
        for slots in ("1", "32", "64", "96", "128", "arena:96")
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_gives_the_same_numbers(name: str, resident: torch.Tensor, profile: str, tmp_path: Path) -> None:
    slot_map = tmp_path / "map.json"
    slot_map.write_text(json.dumps({"schema": "soakrig.slots/1", "experts": 128, "slots": {"0": 0, "1": 7, "2": 128}}))
    places = {"PROFILE": profile, "MAP": str(slot_map)}
    one = runner(**{key: places.get(value, value) for key, value in PLANS[name].items()})
    assert torch.equal(logits(one), resident)
    small, large = total(one, 0), total(one, 1)
    assert small["accesses"] == 3 * 4 * sum(stop - start for start, stop in pairwise(CUTS) if stop - start <= 16)
    assert large["accesses"] == 3 * 4 * sum(stop - start for start, stop in pairwise(CUTS) if stop - start > 16)
    off = PLANS[name] != {}
    assert (small["unique"] > 0) is off
    if off and PLANS[name].get("VLLM_MOE_DMA_STAGING") == "0":
        assert small["fills"] == small["staged"] == large["staged"] == 0
        assert small["in_place"] > 0
    elif off:
        assert small["fills"] + small["staged"] == small["unique"] - small["unique_hits"]
        assert small["in_place"] == 0
    if name == "no slots, staged":
        assert large["groups"] > large["steps"], "a chunk took more than one group"
    one.store.close()


def test_a_stale_slot_in_one_of_500_copies_is_seen(resident: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: one copy left out, and the comparison has to fail."""
    copies = 0
    whole = Staging.gather

    def leaves_one_out(staging: Staging, src: np.ndarray, dst: np.ndarray) -> None:
        nonlocal copies
        real = np.flatnonzero(src >= 0)
        if copies < 500 <= copies + len(real):
            src = src.copy()
            src[real[500 - copies - 1]] = -1
        copies += len(real)
        whole(staging, src, dst)

    monkeypatch.setattr(Staging, "gather", leaves_one_out)
    assert not torch.equal(logits(runner(VLLM_MOE_HOT_SLOTS="4")), resident)
    assert copies >= 500


def test_parts_in_any_cut_give_the_sum_of_one_part() -> None:
    """Both ways of computing, pairs of three tensors and of none; to the bit."""
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(9, 64, 32, generator=generator)
    down = torch.randn(9, 32, 32, generator=generator)
    for tokens in (1, 6, 40):
        ids = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(tokens)])
        hidden = torch.randn(tokens, 32, generator=generator)
        weights = torch.rand(tokens, 4, generator=generator)
        none = torch.rand(tokens, 4, generator=generator) < 0.2
        one = [Part(torch.where(none, -1, ids), {"gate_up": gate_up, "down": down})]
        three = [
            Part(
                torch.where(~none & (ids >= low) & (ids < low + 3), ids - low, -1),
                {"gate_up": gate_up[low : low + 3].clone(), "down": down[low : low + 3].clone()},
            )
            for low in (6, 0, 3)
        ]
        for compute in (gathered, by_expert):
            assert torch.equal(compute(three, hidden, weights), compute(one, hidden, weights))
        close = {"rtol": 1e-4, "atol": 1e-3}
        torch.testing.assert_close(gathered(three, hidden, weights), by_expert(one, hidden, weights), **close)
        silent = torch.where(none, 0.0, weights)
        torch.testing.assert_close(
            by_expert(one, hidden, weights), by_expert([Part(ids, one[0].tensors)], hidden, silent), **close
        )
        assert not gathered([], hidden, weights).any()
        assert not by_expert([], hidden, weights).any()


def test_an_uncovered_pair_adds_nothing_whatever_its_row_holds() -> None:
    weights = torch.ones(1, 2)
    tensors = {"gate_up": torch.ones(2, 8, 4), "down": torch.ones(2, 4, 4)}
    tensors["gate_up"][0] = torch.nan
    both = [Part(torch.tensor([[1, -1]]), tensors)]
    for compute in (gathered, by_expert):
        assert torch.isfinite(compute(both, torch.ones(1, 4), weights)).all()


CACHES = {
    "resident": {},
    "slots": {"VLLM_MOE_HOT_SLOTS": "3"},
    "in place": {"VLLM_MOE_HOT_SLOTS": "0", "CPU_OFFLOAD_GB": "1", "VLLM_MOE_DMA_STAGING": "0"},
}


def alone(number: int) -> str:
    bench = Bench()
    bench.add("x", prompt(number))
    bench.run()
    return bench.text("x")


@pytest.mark.parametrize("cache", CACHES)
def test_a_bad_id_fails_its_own_request_and_no_other(cache: str) -> None:
    bench = Bench(CACHES[cache], max_num_batched_tokens=150)
    bench.add("good", prompt(1))
    for _ in range(4):
        bench.step()
    bench.add("bad", prompt(2), planted=True)
    bench.add("later", prompt(3))
    bench.run()
    (error,) = bench.events["bad"]
    assert error["code"] == "bad_expert_id"
    assert "1 of this request's" in error["error"]
    assert "0 to 7 was expected" in error["error"]
    assert bench.text("good") == alone(1)
    assert bench.text("later") == alone(3)
    report = bench.runner.offload_report()
    assert report is not None
    bad_ids = [[path[COUNTERS.index("bad_ids")] for path in layer] for layer in report["counters"]]
    assert bad_ids == [[0, 1], [0, 0]]
    assert bench.runner.scheduler.pool.usage == 0.0
    # Nothing of the bad step can be found in the prefix cache, and what is computed again is right.
    bench.add("again", prompt(2))
    bench.run()
    assert bench.end("again")["cached_tokens"] == 0
    assert bench.text("again") == alone(2)


def test_a_bad_id_while_decoding_voids_the_step_and_keeps_what_was_published() -> None:
    bench = Bench({"VLLM_MOE_HOT_SLOTS": "3"})
    bench.add("x", prompt(2), ReplySpec(text_tokens=100), max_tokens=200)
    for _ in range(30):
        bench.step()
    (sequence,) = bench.runner.scheduler.running
    told = bench.text("x")
    assert told
    sequence.planted = True
    bench.step()
    assert bench.events["x"][-1]["code"] == "bad_expert_id"
    assert bench.text("x") == told, "a token was sent that a broken step decided"
    bench.add("again", prompt(2))
    bench.run()
    assert bench.end("again")["cached_tokens"] == 192
    assert bench.text("again") == alone(2)


def test_a_resident_engine_reports_nothing_before_the_first_bad_id() -> None:
    bench = Bench()
    bench.add("good", prompt(1))
    bench.run()
    assert bench.runner.offload_report() is None
    assert bench.text("good") == alone(1)
    offloaded = Bench({"VLLM_MOE_HOT_SLOTS": "0", "CPU_OFFLOAD_GB": "1"}).runner.offload_report()
    assert offloaded is not None
    assert offloaded["step"] == 0


def test_a_trace_tells_prefill_from_decode_and_holds_what_was_routed(tmp_path: Path) -> None:
    trace, skew = tmp_path / "t.trace", tmp_path / "skew.json"
    environment = {
        "VLLM_MOE_HOT_SLOTS": "3", "VLLM_MOE_ROUTING_TRACE": str(trace), "VLLM_MOE_SKEW_PERLAYER": str(skew),
    }  # fmt: skip
    bench = Bench(environment, max_num_batched_tokens=64)
    bench.add("x", prompt(1, 150))
    bench.add("bad", prompt(2, 20), planted=True)
    bench.run()
    bench.runner.store.close()
    read = read_trace(trace)
    steps = list(read.steps())
    assert len(steps) == bench.runner.store.steps
    assert [len(marks) for marks, _ in steps[:3]] == [64, 64, 22 + 20]
    assert all((marks == 1).all() for marks, _ in steps[:3])
    assert all((marks == 0).all() for marks, _ in steps[3:])
    ids = np.concatenate([ids for _, ids in steps])
    assert ids.shape[1:] == (2, SMALL["top_k"])
    assert (ids == -2).sum() == 1
    assert steps[2][1][22, 0, 0] == -2, "the first token of the struck request, its first choice, in the first layer"
    # The profile counts layer-steps in which an expert was routed to.
    layer_steps = np.array([[[(ids[:, layer] == e).any() for e in range(8)] for layer in (0, 1)] for _, ids in steps])
    counts = read_profile(str(skew)).counts
    assert [counts[layer].tolist() for layer in (0, 1)] == layer_steps.sum(axis=0).tolist()


def test_an_engine_that_served_nothing_leaves_an_older_profile_as_it_is(profile: str, tmp_path: Path) -> None:
    place = tmp_path / "skew.json"
    place.write_bytes(Path(profile).read_bytes())
    runner(**ALL, VLLM_MOE_SKEW_PERLAYER=str(place)).store.close()
    assert place.read_bytes() == Path(profile).read_bytes()


def test_experts_that_leave_are_never_on_the_device() -> None:
    """Not even on their way: it may have no room for them. ``meta`` stands for a device that is not the host."""
    config = EngineConfig(**SMALL)
    seeded = Seeded(0, config)
    seeded._device = torch.device("meta")
    layers = list(draw_layers(seeded, config, in_host={1}))
    found = [{tensor.device.type for tensor in layer.values()} for layer in layers]
    assert found == [{"meta"}, {"cpu"}]


def test_the_model_s_shape_is_what_the_weights_are() -> None:
    for dtype in ("float32", "bfloat16"):
        config = EngineConfig(**{**SMALL, "dtype": dtype})
        (layer, _) = config.model_shape.layers
        experts: Any = Decoder(config).experts
        assert layer.row_bytes == experts.gate_up[0][0].nbytes + experts.down[0][0].nbytes
        assert layer.experts == len(experts.down[0])
    assert EngineConfig().model_shape.name == "embedded-l4-e32-k4-h128-w0"
