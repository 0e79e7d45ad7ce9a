"""The offload core on a card: what the interpreter and a compiler alone cannot show (pinned memory, graphs, races).

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from soakrig.engine.offload.assign_kernel import assign
from soakrig.engine.offload.bookkeeping import FETCHES, assign_numba
from soakrig.engine.offload.core import ExpertStore
from soakrig.engine.offload.counters import COUNTERS
from soakrig.engine.offload.host_memory import HostMemory
from soakrig.engine.offload.kernels import gather
from soakrig.engine.offload.plan import LayerPlan, LayerShape, ModelShape, OffloadPlan
from soakrig.engine.offload.policy import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card and torch with CUDA: none found"),
]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
EXPERTS, TOP_K, LAYERS, TOKENS = 96, 4, 3, 32
POLICIES = [policy.name.lower() for policy in Policy]
Step = list[np.ndarray[Any, Any]]


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    """Host memory for banks; unlocked afterwards."""
    found = HostMemory()
    yield found
    found.close()


def odd_ids(random: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.int64) -> np.ndarray[Any, Any]:
    """Ids 0..EXPERTS-1 with a few favourites, and among them sentinels and ids out of range."""
    ids = np.minimum(random.geometric(3.0 / EXPERTS, shape) - 1, EXPERTS - 1).astype(dtype)
    odd = random.random(shape) < 0.06
    ids[odd] = random.choice(np.array([-1, EXPERTS, -2, EXPERTS + 1, 2**31 - 1, -(2**31)], dtype), int(odd.sum()))
    return ids


# --- gather -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("row", [1, 33, 4096, 2**20 + 8, 2**20])
def test_gather_from_pinned_memory_equals_torch_indexing(memory: HostMemory, dtype: torch.dtype, row: int) -> None:
    bank = memory.empty((EXPERTS, row), dtype)
    bank.view(torch.uint8).copy_(torch.randint(0, 256, (EXPERTS, row * dtype.itemsize), dtype=torch.uint8))
    memory.pin()
    random = np.random.default_rng(row)
    whole = torch.full((FETCHES + 2, row), 1, dtype=torch.uint8, device=CUDA).to(dtype)
    guards = whole[0].clone(), whole[-1].clone()
    out = whole[1:-1]
    src = odd_ids(random, (FETCHES,), np.int32)
    dst = random.permutation(FETCHES).astype(np.int32)
    dst[[3, 5, 7, 11]] = [-1, FETCHES, -9, 2**31 - 1]
    src[[3, 5, 7, 11]] = [0, 1, 2, 3]
    bad = torch.zeros(1, dtype=torch.int64, device=CUDA)
    want = out.cpu().view(torch.uint8).clone()
    good = (src >= 0) & (src < EXPERTS) & (dst >= 0) & (dst < FETCHES)
    want[torch.from_numpy(dst[good]).long()] = bank.view(torch.uint8)[torch.from_numpy(src[good]).long()]
    gather(bank, out, torch.from_numpy(src).to(CUDA), torch.from_numpy(dst).to(CUDA), bad)
    assert torch.equal(out.cpu().view(torch.uint8), want)
    assert int(bad) == 3 + int(((src < -1) | (src > EXPERTS)).sum())
    for guard, row_now in zip(guards, (whole[0], whole[-1]), strict=True):
        assert torch.equal(guard.view(torch.uint8), row_now.view(torch.uint8))


def test_pageable_memory_is_refused() -> None:
    ids = torch.zeros(1, dtype=torch.int32, device=CUDA)
    with pytest.raises(ValueError, match="has to be pinned first"):
        gather(
            torch.zeros(4, 8), torch.zeros(4, 8, device=CUDA), ids, ids, torch.zeros(1, dtype=torch.int64, device=CUDA)
        )


# --- the books --------------------------------------------------------------------------------------------------------


def books(slots: int, keys: int, pairs: int, dtype: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Every array of ``assign_numba`` but the ids, in its order."""
    return {
        "slot_key": np.full(slots, -1, np.int32),
        "key_slot": np.full(keys, -1, np.int32),
        "last": np.zeros(slots, np.int64),
        "uses": np.zeros(slots, np.int64),
        "ref": np.zeros(slots, np.int32),
        "clock": np.zeros(2, np.int64),
        "rows": np.zeros(pairs, dtype),
        "bank_rows": np.zeros(pairs, dtype),
        "src": np.zeros(FETCHES, np.int32),
        "dst": np.zeros(FETCHES, np.int32),
        "counts": np.zeros(len(COUNTERS), np.int64),
        "skew": np.zeros(EXPERTS, np.int64),
        "bad_tokens": np.zeros(FETCHES, np.uint8),
    }


@pytest.mark.parametrize("policy", Policy, ids=POLICIES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("slots", "layers"), [(7, 1), (64, 1), (150, 3), (3000, 40), (8400, 90)])
def test_the_books_equal_numba(policy: Policy, dtype: Any, slots: int, layers: int) -> None:
    """Hundreds of steps, back to back on the device: a store that another warp has not seen yet would show."""
    random = np.random.default_rng(slots)
    for pairs in (8, 24, 64):
        host = books(slots, EXPERTS * layers, pairs, dtype)
        device = {name: torch.from_numpy(array).to(CUDA) for name, array in host.items()}
        steps = [(odd_ids(random, (pairs,), dtype), int(random.integers(layers)) * EXPERTS) for _ in range(300)]
        for ids, key_base in steps:
            numbers = (TOP_K, EXPERTS, key_base)
            state, found = list(device.values())[:6], list(device.values())[6:]
            assign(torch.from_numpy(ids).to(CUDA), *numbers, *state, int(policy), 5, 5 + slots, *found)
            arrays = list(host.values())
            assign_numba(ids, *numbers, *arrays[:6], int(policy), 5, 5 + slots, *arrays[6:])
        for name, array in host.items():
            np.testing.assert_array_equal(device[name].cpu().numpy(), array, err_msg=f"{name}, {pairs} pairs")


# --- the store --------------------------------------------------------------------------------------------------------


def store_on(
    device: torch.device, policy: str, slots: int, *, arena: bool = False, staging: bool = True, groups: bool = True
) -> ExpertStore:
    """A store of three layers, weights from a seed: a wide parameter and one of odd size."""
    weights = torch.Generator().manual_seed(3)
    row_bytes = 2 * 64 + 5
    shapes = tuple(LayerShape(layer, EXPERTS, row_bytes) for layer in range(LAYERS))
    hot = tuple(range(3, 3 + slots // 2))
    plans = tuple(LayerPlan(layer, EXPERTS, row_bytes, 0 if arena else slots, policy, hot) for layer in range(LAYERS))
    plan = OffloadPlan(
        model=ModelShape("gpu-test", shapes, TOP_K), layers=plans, arena=LAYERS * slots if arena else 0,
        staging=staging, groups=groups, staging_rows=64, asked_gb=None, trace=None, skew=None, warnings=(),
    )  # fmt: skip
    store = ExpertStore(plan, device, TOKENS)
    for layer in range(LAYERS):
        weight = torch.randint(-8, 8, (EXPERTS, 8, 8), generator=weights).to(torch.bfloat16)
        scale = torch.randint(1, 99, (EXPERTS, 5), generator=weights, dtype=torch.uint8)
        store.add_layer(layer, {"weight": weight, "scale": scale})
    store.finish()
    return store


def output_of(store: ExpertStore, layer: int, ids: Tensor) -> Tensor:
    """[tokens, k, 69]: what every pair finds of its expert, zero where it is in no part."""
    found = torch.zeros(*ids.shape, 69, dtype=torch.float32, device=ids.device)
    for part in store.parts(layer, ids):
        rows = part.rows.clamp(min=0).reshape(-1).long()
        one = [part.tensors[name].index_select(0, rows).flatten(1).float() for name in ("weight", "scale")]
        found += torch.where((part.rows >= 0).unsqueeze(-1), torch.cat(one, 1).view(*ids.shape, -1), 0)
    return found


def steps_of(random: np.random.Generator, steps: int, tokens: Callable[[int], int]) -> Iterator[Step]:
    for number in range(steps):
        yield [odd_ids(random, (tokens(number), TOP_K)) for _ in range(LAYERS)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize(("staging", "groups"), [(True, True), (True, False), (False, True)])
def test_the_store_on_the_card_equals_the_store_on_the_cpu(
    policy: str, arena: bool, staging: bool, groups: bool
) -> None:
    """Decode steps with prefill chunks among them: same rows, same counters, same bad tokens."""
    stores = [store_on(device, policy, 20, arena=arena, staging=staging, groups=groups) for device in (CPU, CUDA)]
    for step in steps_of(np.random.default_rng(5), 60, lambda number: TOKENS if number % 7 == 3 else number % 16 + 1):
        reports: list[list[int]] = []
        outputs: list[list[Tensor]] = []
        for store in stores:
            store.begin_step(np.zeros(len(step[0]), dtype=np.uint8))
            of_layers = [torch.from_numpy(ids).to(store.device) for ids in step]
            outputs.append([output_of(store, layer, ids).cpu() for layer, ids in enumerate(of_layers)])
            reports.append(store.end_step().bad_tokens)
        assert reports[0] == reports[1]
        assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    assert stores[0].counters() == stores[1].counters()
    assert stores[1].refused == 0
    for store in stores:
        store.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("staging", [True, False])
def test_a_captured_step_replays_with_other_ids(policy: str, staging: bool) -> None:
    """All layers of a step in one graph; the ids change in a static buffer, the addresses never."""
    tokens = FETCHES // TOP_K
    on_card, on_cpu = (store_on(device, policy, 20, staging=staging) for device in (CUDA, CPU))
    static = [torch.full((tokens, TOP_K), -1, dtype=torch.int64, device=CUDA) for _ in range(LAYERS)]
    marks = np.zeros(tokens, dtype=np.uint8)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # Triton compiles here: not while capturing; -1 everywhere changes nothing
        on_card.begin_step(marks)
        _ = [output_of(on_card, layer, ids) for layer, ids in enumerate(static)]
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    before = on_card.addresses()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [output_of(on_card, layer, ids) for layer, ids in enumerate(static)]
    on_card.check_addresses(before)
    places = [one.data_ptr() for one in captured]
    for step in steps_of(np.random.default_rng(6), 100, lambda _: tokens):
        for store in (on_card, on_cpu):
            store.begin_step(marks)
        for buffer, ids in zip(static, step, strict=True):
            buffer.copy_(torch.from_numpy(ids))
        graph.replay()
        want = [output_of(on_cpu, layer, torch.from_numpy(ids)) for layer, ids in enumerate(step)]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(captured, want, strict=True))
        assert on_card.end_step().bad_tokens == on_cpu.end_step().bad_tokens
    # Sentinels of the warm-up were counted on the card alone.
    assert _without_sentinels(on_card) == _without_sentinels(on_cpu)
    assert on_card.refused == 0
    assert [one.data_ptr() for one in captured] == places
    on_card.check_addresses(before)
    for store in (on_card, on_cpu):
        store.close()


def test_replays_without_the_host_in_between_are_as_many_steps() -> None:
    """Back to back on one stream: each step finds what the one before left."""
    store = store_on(CUDA, "lru", 20)
    ids = torch.full((1, TOP_K), -1, dtype=torch.int64, device=CUDA)
    store.begin_step(np.zeros(1, dtype=np.uint8))
    output_of(store, 0, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = output_of(store, 0, ids)
    ids.copy_(torch.tensor([[90, 91, 92, 93]]))
    counts: list[dict[str, int]] = []
    for replays in (1, 50):
        for _ in range(replays):
            graph.replay()
        counts.append(dict(zip(COUNTERS, store.counters()[0][0], strict=True)))
    assert [one["steps"] for one in counts] == [1, 51]
    assert [one["fills"] for one in counts] == [4, 4]
    assert [after["hits"] - first["hits"] for first, after in pairwise(counts)] == [200]
    assert torch.equal(found, output_of(store, 0, ids))
    store.close()


def _without_sentinels(store: ExpertStore) -> list[list[list[int]]]:
    place = COUNTERS.index("sentinels")
    return [[[*path[:place], *path[place + 1 :]] for path in layer] for layer in store.counters()]
