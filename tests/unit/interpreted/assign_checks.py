"""The bookkeeping kernel in Triton's interpreter, against ``assign_numba`` array by array and against the plain model.

Run by ``test_offload_kernels.py`` in a child process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from cache_model import LayerModel, PoolModel, Slot
from soakrig.engine.offload.assign_kernel import assign
from soakrig.engine.offload.bookkeeping import FETCHES, assign_numba
from soakrig.engine.offload.counters import COUNTERS
from soakrig.engine.offload.policy import Policy

POLICIES = [policy.name.lower() for policy in Policy]
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass
class Layer:
    """One layer's numbers and figures; its pool is in ``Rig.pools``."""

    pool: int
    experts: int
    key_base: int
    model: LayerModel
    figures: list[Arrays]


class Rig:
    """The same steps for the kernel, the numba function and the model; ``weights`` says which expert each row holds."""

    def __init__(
        self, policy: str, experts: list[int], slots: list[int], *, staging: bool, hot: int, seed: int
    ) -> None:
        """``slots``: one number for a pool that all layers share, or one for each layer."""
        self.random = np.random.default_rng(seed)
        self.policy = Policy.named(policy)
        self.staging = staging
        self.first_rows = [sum(slots[:number]) for number in range(len(slots))]
        self.staging_row = sum(slots) if staging else -1
        shared = len(slots) < len(experts)
        keys = [sum(experts)] if shared else experts
        self.pools: list[list[Arrays]] = []
        models: list[PoolModel] = []
        for count, key_count in zip(slots, keys, strict=True):
            state = empty_pool(count, key_count)
            models.append(PoolModel([Slot() for _ in range(count)], policy))
            warm = [int(key) for key in self.random.permutation(key_count)[: min(hot, count)]]
            models[-1].preload(warm)
            for number, slot in enumerate(models[-1].slots):
                if slot.key is not None:
                    state["slot_key"][number], state["key_slot"][slot.key] = slot.key, number
                    state["uses"][number] = slot.uses
            self.pools.append([state, {name: array.copy() for name, array in state.items()}])
        self.layers: list[Layer] = []
        for number, count in enumerate(experts):
            pool, base = (0, sum(experts[:number])) if shared else (number, 0)
            model = LayerModel(number, count, base, models[pool], staging, groups=True)
            self.layers.append(Layer(pool, count, base, model, [empty_figures(count), empty_figures(count)]))
        self.weights: dict[int, tuple[int, int]] = {}
        for number, (state, _) in enumerate(self.pools):
            for slot, key in enumerate(state["slot_key"]):
                if key >= 0:
                    self.weights[self.first_rows[number] + slot] = (number, int(key))

    def step(self, ids: np.ndarray[Any, Any]) -> None:
        """Every layer places ``ids`` [tokens, k] of its own choosing and nothing may differ."""
        for layer in self.layers:
            self.layer_step(layer, ids)

    def layer_step(self, layer: Layer, ids: np.ndarray[Any, Any]) -> None:
        pairs, top_k = ids.size, ids.shape[1]
        first_row = self.first_rows[layer.pool]
        left: list[Arrays] = []
        for side, call in ((0, assign_numba), (1, assign_on_tensors)):
            out = {"rows": np.full(pairs, 77, ids.dtype), "bank_rows": np.full(pairs, 77, ids.dtype)}
            out |= {name: np.full(FETCHES, 77, np.int32) for name in ("src", "dst")}
            figures = layer.figures[side]
            figures["bad_tokens"][:] = 0
            call(
                ids.reshape(-1), top_k, layer.experts, layer.key_base, *self.pools[layer.pool][side].values(),
                int(self.policy), first_row, self.staging_row, *out.values(), *figures.values(),
            )  # fmt: skip
            left.append(self.pools[layer.pool][side] | out | figures)
        for name in left[0]:
            np.testing.assert_array_equal(left[1][name], left[0][name], err_msg=f"{name} after ids {ids.tolist()}")
        self.compare_with_model(layer, ids, left[1])

    def compare_with_model(self, layer: Layer, ids: np.ndarray[Any, Any], found: Arrays) -> None:
        place, bad_tokens = layer.model.step(ids.tolist())
        first_row = self.first_rows[layer.pool]
        at = {"slot": first_row, "staged": self.staging_row, "bank": 0}
        for pair, expert in enumerate(ids.reshape(-1).tolist()):
            kind, number = place.get(expert, ("nowhere", -1))
            assert found["rows"][pair] == (at[kind] + number if kind in {"slot", "staged"} else -1)
            assert found["bank_rows"][pair] == (number if kind == "bank" else -1)
        assert set(np.flatnonzero(found["bad_tokens"]).tolist()) == bad_tokens
        assert dict(zip(COUNTERS, found["counts"].tolist(), strict=True)) == {
            name: layer.model.counts["small"][name] for name in COUNTERS
        }
        assert Counter({expert: int(n) for expert, n in enumerate(found["skew"]) if n}) == layer.model.skew
        # The fetch list is carried out; then every pair's row holds the pair's own expert.
        ends = np.flatnonzero(found["src"] == -1)
        fetches = int(ends[0]) if len(ends) else FETCHES
        assert (found["src"][fetches:] == -1).all()
        assert (found["dst"][fetches:] == -1).all()
        for expert, row in zip(found["src"][:fetches].tolist(), found["dst"][:fetches].tolist(), strict=True):
            self.weights[row] = (layer.pool, layer.key_base + expert)
        for expert, row in zip(ids.reshape(-1).tolist(), found["rows"].tolist(), strict=True):
            assert row == -1 or self.weights[row] == (layer.pool, layer.key_base + expert)


def assign_on_tensors(ids: Any, *rest: Any) -> None:
    assign(torch.from_numpy(ids), *(torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in rest))


def empty_pool(slots: int, keys: int) -> Arrays:
    return {
        "slot_key": np.full(slots, -1, np.int32),
        "key_slot": np.full(keys, -1, np.int32),
        "last": np.zeros(slots, np.int64),
        "uses": np.zeros(slots, np.int64),
        "ref": np.zeros(slots, np.int32),
        "clock": np.zeros(2, np.int64),
    }


def empty_figures(experts: int) -> Arrays:
    return {
        "counts": np.zeros(len(COUNTERS), np.int64),
        "skew": np.zeros(experts, np.int64),
        "bad_tokens": np.zeros(FETCHES, np.uint8),
    }


def some_ids(rig: Rig, experts: int, dtype: type[np.signedinteger[Any]]) -> np.ndarray[Any, Any]:
    """[tokens, k] with duplicates, sentinels and ids out of range; one step in twelve has nothing else."""
    top_k = int(rig.random.integers(1, 9))
    tokens = int(rig.random.integers(1, FETCHES // top_k + 1)) if rig.random.random() < 0.3 else 1
    shape = (tokens, top_k)
    # Some experts are wanted more than others, so that a policy's choice is not a lottery.
    ids = np.minimum(rig.random.geometric(3.0 / experts, shape) - 1, experts - 1).astype(dtype)
    odd = rig.random.random(shape) < (1.0 if rig.random.random() < 1 / 12 else 0.08)
    wild = np.array([-1, experts, -2, experts + 1, -(2**31), 2**31 - 1, 2**40 if dtype is np.int64 else 99], dtype)
    ids[odd] = rig.random.choice(wild, int(odd.sum()))
    return ids


def run(rig: Rig, steps: int, dtype: type[np.signedinteger[Any]]) -> Counter[str]:
    for _ in range(steps):
        rig.step(some_ids(rig, rig.layers[0].experts, dtype))
    return sum((layer.model.counts["small"] for layer in rig.layers), Counter[str]())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("slots", "dtype"), [(6, np.int64), (17, np.int32)])
def test_a_pool_of_its_own(policy: str, slots: int, dtype: type[np.signedinteger[Any]]) -> None:
    counts = run(Rig(policy, [24], [slots], staging=True, hot=3, seed=slots), 45, dtype)
    assert all(counts[name] for name in ("hits", "staged", "sentinels", "bad_ids"))
    assert policy == "static" or (counts["fills"] and counts["evictions"])


@pytest.mark.parametrize("policy", POLICIES)
def test_one_pool_for_all_layers(policy: str) -> None:
    counts = run(Rig(policy, [20, 20], [9], staging=True, hot=5, seed=3), 20, np.int64)
    assert all(counts[name] for name in ("hits", "staged"))


@pytest.mark.parametrize("policy", POLICIES)
def test_pools_of_several_layers_do_not_mix(policy: str) -> None:
    run(Rig(policy, [20, 20], [4, 9], staging=True, hot=2, seed=4), 12, np.int64)


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_slots_fetch_nothing(policy: str) -> None:
    counts = run(Rig(policy, [24], [8], staging=False, hot=8, seed=5), 25, np.int64)
    assert all(counts[name] for name in ("hits", "in_place"))
    assert counts["fills"] + counts["staged"] == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [0, 1, 16])
def test_pools_of_no_slot_of_one_and_of_a_whole_power_of_two(policy: str, slots: int) -> None:
    run(Rig(policy, [24], [slots], staging=True, hot=1, seed=6), 12, np.int64)


@pytest.mark.parametrize("policy", ["lru", "lfru", "clock"])
def test_64_different_experts_at_once(policy: str) -> None:
    rig = Rig(policy, [100], [40], staging=True, hot=0, seed=7)
    for _ in range(3):
        rig.step(rig.random.permutation(100)[:FETCHES].reshape(8, 8))


def test_no_id_changes_nothing_but_its_own_count() -> None:
    rig = Rig("clock", [8], [4], staging=True, hot=4, seed=8)
    before = {name: array.copy() for name, array in rig.pools[0][1].items()}
    rig.step(np.array([[-1, 8, 9, -2]]))
    assert all(np.array_equal(before[name], array) for name, array in rig.pools[0][1].items())
    assert rig.layers[0].model.counts["small"] == Counter(sentinels=2, bad_ids=2)


def test_more_than_a_fetch_list_holds_is_refused() -> None:
    rig = Rig("lru", [80], [4], staging=True, hot=0, seed=9)
    ids = np.zeros(FETCHES + 1, np.int64)
    lists = [np.zeros(FETCHES, np.int32) for _ in range(2)]
    arrays = (ids.copy(), ids.copy(), *lists, *rig.layers[0].figures[1].values())
    with pytest.raises(ValueError, match="at most 64 ids, got 65"):
        assign_on_tensors(ids, 1, 80, 0, *rig.pools[0][1].values(), 1, 0, 4, *arrays)
