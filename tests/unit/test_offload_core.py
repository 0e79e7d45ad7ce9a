"""The offload core against a plain model: every expert is found with its own weights, and every figure agrees."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_model import LayerModel, PoolModel, Slot
from soakrig.engine.offload.core import ExpertStore, Part
from soakrig.engine.offload.counters import COUNTERS, PATHS
from soakrig.engine.offload.plan import LayerPlan, LayerShape, ModelShape, OffloadPlan
from soakrig.engine.offload.settings import SPLITS, SplitName
from soakrig.errors import EngineStartError

CPU = torch.device("cpu")
POLICIES = ("static", "lru", "lfru", "clock")
MOST_TOKENS = 64
Ids = list[list[int]]


def parameters(layer: int, experts: int) -> dict[str, torch.Tensor]:
    """Two parameters, one of an odd number of bytes, that say which expert of which layer they are."""
    numbers = torch.arange(experts)
    return {
        "weight": (1000.0 * (layer + 1) + numbers.float()).view(-1, 1, 1).expand(experts, 2, 3).contiguous(),
        "scale": ((7 * layer + numbers) % 251).to(torch.uint8).view(-1, 1).expand(experts, 5).contiguous(),
    }


ROW_BYTES = 2 * 3 * 4 + 5


@dataclass
class Rig:
    """A store beside the model of it."""

    store: ExpertStore
    models: list[LayerModel]
    top_k: int

    @classmethod
    def build(
        cls,
        experts: list[int],
        top_k: int,
        slots: list[int],
        policy: str,
        *,
        arena: int = 0,
        staging: bool = True,
        groups: bool = True,
        hot: list[list[int]] | None = None,
        resident: int = 0,
        split: SplitName = "experts",
        one_source: bool = False,
    ) -> Rig:
        """Layers of ``experts``, and ``resident`` more in front that stay on the device."""
        hot = hot or [[] for _ in experts]
        shapes = [LayerShape(layer, experts[0], ROW_BYTES) for layer in range(resident)]
        shapes += [LayerShape(resident + number, count, ROW_BYTES) for number, count in enumerate(experts)]
        plans = [
            LayerPlan(resident + i, count, ROW_BYTES, 0 if arena else slots[i], policy, tuple(hot[i]))
            for i, count in enumerate(experts)
        ]
        plan = OffloadPlan(
            model=ModelShape("model", tuple(shapes), top_k), layers=tuple(plans), arena=arena, staging=staging,
            groups=groups, staging_rows=64, asked_gb=None, trace=None, skew=None, warnings=(),
            split=split,
        )  # fmt: skip
        store = ExpertStore(plan, CPU, MOST_TOKENS, one_source=one_source)
        for shape in shapes:
            store.add_layer(shape.layer, parameters(shape.layer, shape.experts))
        store.finish()
        shared = PoolModel([Slot() for _ in range(arena)], policy)
        models: list[LayerModel] = []
        base = 0
        preload: list[int] = []
        for i, count in enumerate(experts):
            pool = shared if arena else PoolModel([Slot() for _ in range(slots[i])], policy)
            models.append(LayerModel(resident + i, count, base if arena else 0, pool, staging, groups, split))
            preload = [*preload, *(base + expert for expert in hot[i])] if arena else hot[i]
            pool.preload(preload)
            base += count
        return cls(store, models, top_k)

    def step(self, ids: list[Ids]) -> None:
        """One engine step, ``ids`` for each offloaded layer; everything that has to hold after it is checked."""
        tokens = len(ids[0])
        self.store.begin_step(np.zeros(tokens, dtype=np.uint8))
        bad: set[int] = set()
        for model, of_layer in zip(self.models, ids, strict=True):
            place, bad_tokens = model.step(of_layer)
            bad |= bad_tokens
            self.check_layer(model, of_layer, place)
        assert self.store.end_step().bad_tokens == sorted(bad)
        assert self.store.refused == 0
        self.check_counters()

    def check_layer(self, model: LayerModel, ids: Ids, place: dict[int, tuple[str, int]]) -> None:
        wanted = parameters(model.layer, model.experts)
        found = torch.zeros(len(ids), self.top_k, dtype=torch.int64)
        routed = torch.tensor([[int(0 <= expert < model.experts) for expert in numbers] for numbers in ids])
        for part in self.store.parts(model.layer, torch.tensor(ids)):
            if part.tokens is not None:
                inside = torch.zeros(len(ids), 1, dtype=torch.bool)
                inside[part.tokens] = True
                assert torch.equal(part.rows >= 0, inside & routed.bool()), "tokens have to be whole, others elsewhere"
            for token, numbers in enumerate(ids):
                for choice, expert in enumerate(numbers):
                    row = int(part.rows[token, choice])
                    if row < 0:
                        continue
                    found[token, choice] += 1
                    for name, tensor in part.tensors.items():
                        assert torch.equal(tensor[row], wanted[name][expert]), f"expert {expert} has another's {name}"
                    self.check_place(model, part, row, place[expert])
        assert torch.equal(found, routed), "a routed pair has to be in exactly one part, others in none"
        self.check_books(model)

    def check_place(self, model: LayerModel, part: Part, row: int, place: tuple[str, int]) -> None:
        arena = self.store.offloaded[model.layer].arena
        slots = self.store.offloaded[model.layer].slots
        if part.tensors is arena.tensors:
            kind = "staged" if row >= arena.staging_row else "slot"
            number = row - (arena.staging_row if kind == "staged" else slots.pool.first_row)
            assert (kind, number) == place or (place == ("staged", -1) and kind == "staged")
        else:
            assert ("bank", row) == place or (self.store._one_source and place[0] == "slot")

    def check_books(self, model: LayerModel) -> None:
        slots = self.store.offloaded[model.layer].slots
        assert slots.pool.slot_key.tolist() == [-1 if slot.key is None else slot.key for slot in model.pool.slots], (
            "a slot holds another expert than in the model: a hit was evicted, or another victim taken"
        )
        for key, slot in enumerate(slots.pool.key_slot.tolist()):
            assert (model.pool.holder(key) if key in {s.key for s in model.pool.slots} else None) == (
                slot if slot >= 0 else None
            )

    def check_counters(self) -> None:
        counters = self.store.counters()
        for model in self.models:
            skew = self.store.offloaded[model.layer].skew
            assert {expert: count for expert, count in enumerate(skew.tolist()) if count} == dict(model.skew)
            for number, path in enumerate(PATHS):
                counted = dict(zip(COUNTERS, counters[model.layer][number], strict=True))
                assert counted == {name: model.counts[path][name] for name in COUNTERS}, path


def routing(rng: random.Random, experts: int, top_k: int, tokens: int, odd: float) -> Ids:
    """Distinct experts within a token, as a router gives them, with a share of ``odd`` ids: sentinels and bad ones."""
    strange = (-1, experts, experts + 1, -2, 2**31 - 1, -(2**31), 2**40, -(2**63))
    ids = [rng.sample(range(experts), min(top_k, experts)) + [-1] * max(0, top_k - experts) for _ in range(tokens)]
    return [[rng.choice(strange) if rng.random() < odd else expert for expert in token] for token in ids]


@st.composite
def rigs(draw: st.DrawFn) -> tuple[Rig, random.Random, float]:
    layers = draw(st.integers(1, 3))
    experts = [draw(st.integers(1, 90)) for _ in range(layers)]
    top_k = draw(st.integers(1, 8))
    policy = draw(st.sampled_from(POLICIES))
    arena = draw(st.just(0) | st.integers(1, sum(experts)))
    slots = [draw(st.integers(0, count)) for count in experts]
    rng = random.Random(draw(st.integers(0, 2**32)))
    hot: list[list[int]] = []
    left = arena
    for i, count in enumerate(experts):
        most = draw(st.integers(0, min(count, left if arena else slots[i])))
        hot.append(rng.sample(range(count), most))
        left -= most if arena else 0
    rig = Rig.build(
        experts, top_k, slots, policy, arena=arena, staging=draw(st.booleans()), groups=draw(st.booleans()), hot=hot,
        resident=draw(st.integers(0, 1)), split=draw(st.sampled_from(SPLITS)), one_source=draw(st.booleans()),
    )  # fmt: skip
    return rig, rng, draw(st.sampled_from((0.0, 0.0, 0.1, 0.6, 1.0)))


@given(rigs(), st.lists(st.integers(1, MOST_TOKENS), min_size=1, max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_routing_finds_its_own_weights_and_counts_as_the_model(
    rig: tuple[Rig, random.Random, float], tokens: list[int]
) -> None:
    built, rng, odd = rig
    for count in tokens:
        # Mostly small steps: there the policy acts.
        count = min(count, max(1, 64 // built.top_k)) if rng.random() < 0.7 else count
        built.step([routing(rng, model.experts, built.top_k, count, odd) for model in built.models])


@given(
    st.sampled_from(POLICIES),
    st.integers(0, 4),
    st.booleans(),
    st.lists(st.lists(st.lists(st.integers(-3, 7), min_size=2, max_size=2), min_size=1, max_size=5), max_size=10),
)
@settings(max_examples=300, deadline=None)
def test_small_cases_with_duplicates_and_every_kind_of_id(
    policy: str, slots: int, staging: bool, steps: list[Ids]
) -> None:
    rig = Rig.build([5], 2, [slots], policy, staging=staging, hot=[list(range(slots // 2))])
    for ids in steps:
        rig.step([ids])


@pytest.mark.parametrize("top_k", [64, 65, 90])
def test_a_token_may_have_more_choices_than_there_are_staging_rows(top_k: int) -> None:
    rig = Rig.build([90], top_k, [4], "lru", hot=[[1, 2]])
    for tokens in (1, 3):
        rig.step([routing(random.Random(tokens), 90, top_k, tokens, 0.1)])


def test_an_expert_routed_twice_is_fetched_once() -> None:
    rig = Rig.build([8], 2, [2], "lru")
    rig.step([[[3, 3], [3, 1], [1, 3]]])
    counted = dict(zip(COUNTERS, rig.store.counters()[0][0], strict=True))
    assert (counted["accesses"], counted["unique"], counted["fills"], counted["staged"]) == (6, 2, 2, 0)


def test_every_hit_is_pinned_before_a_victim_is_looked_for() -> None:
    """The trap: by age expert 0 is the victim, but it is used again behind the miss in the same step."""
    rig = Rig.build([8], 2, [2], "lru")
    rig.step([[[0, 1]]])
    rig.step([[[1, 1]]])
    rig.step([[[5, 0]]])
    slots = rig.store.offloaded[0].slots
    assert slots.pool.slot_key.tolist() == [0, 5]


def test_lfru_counts_one_use_a_layer_step() -> None:
    """At the miss the scores are 2/5, 2/3 and 1/2: were a second pair of a step a use too, expert 0 would stay."""
    rig = Rig.build([8], 2, [3], "lfru")
    for expert in (0, 0, 1, 1, 2, 3):
        rig.step([[[expert, expert]]])
    assert rig.store.offloaded[0].slots.pool.slot_key.tolist() == [3, 1, 2]


def test_without_a_slot_left_rows_go_to_staging() -> None:
    rig = Rig.build([70], 8, [3], "lru")
    rig.step([[list(range(start, start + 8)) for start in range(0, 64, 8)]])
    counted = dict(zip(COUNTERS, rig.store.counters()[0][0], strict=True))
    assert (counted["fills"], counted["staged"], counted["groups"]) == (3, 61, 0)


def test_a_large_step_neither_fills_nor_refreshes() -> None:
    rig = Rig.build([90], 8, [4], "lru", hot=[[1, 2, 3, 4]])
    before = [tensor.clone() for tensor in rig.store.offloaded[0].slots.pool.state.values()]
    rig.step([routing(random.Random(1), 90, 8, 20, 0.0)])
    assert all(torch.equal(a, b) for a, b in zip(before, rig.store.offloaded[0].slots.pool.state.values(), strict=True))
    counted = dict(zip(COUNTERS, rig.store.counters()[0][1], strict=True))
    assert counted["groups"] == 2
    assert counted["staged"] == counted["unique"] - counted["unique_hits"] > 64


def test_int32_ids_are_taken_and_given_back_as_int32() -> None:
    rig = Rig.build([9, 9], 4, [3, 9], "clock")
    for layer in (0, 1):
        for tokens in (4, 40):
            ids = torch.tensor(routing(random.Random(tokens), 9, 4, tokens, 0.2)).clamp(-(2**31), 2**31 - 1)
            ids = ids.to(torch.int32)
            rig.store.begin_step(np.zeros(tokens, dtype=np.uint8))
            assert {part.rows.dtype for part in rig.store.parts(layer, ids)} == {torch.int32}


def test_a_resident_layer_skips_what_names_no_expert() -> None:
    """-1 and 9 are sentinels, 10 and -2 bad: none of them may be used as an index."""
    store = Rig.build([9], 2, [3], "lru", resident=1).store
    ids = torch.tensor([[0, 9], [-1, 8], [10, 1], [9, -2]])
    for tokens in (4, 33):
        several = ids.repeat(9, 1)[:tokens]
        store.begin_step(np.zeros(tokens, dtype=np.uint8))
        (part,) = store.parts(0, several)
        assert torch.equal(part.rows, torch.where((several >= 0) & (several < 9), several, -1))
        assert store.end_step().bad_tokens == [row for row in range(tokens) if row % 4 > 1]
    store.begin_step(np.zeros(1, dtype=np.uint8))
    (part,) = store.parts(0, torch.tensor([[9, 9]]))
    assert part.rows.tolist() == [[-1, -1]]
    small, large = (dict(zip(COUNTERS, path, strict=True)) for path in store.counters()[0])
    assert [small[name] for name in ("steps", "accesses", "sentinels", "bad_ids")] == [1, 3, 5, 2]
    assert [large[name] for name in ("steps", "accesses", "sentinels", "bad_ids")] == [1, 25, 25, 16]


def test_buffers_stay_where_they_are_and_a_moved_one_is_named() -> None:
    rig = Rig.build([9], 4, [3], "lru", resident=1)
    before = rig.store.addresses()
    rng = random.Random(3)
    for tokens in (1, 16, 40, 3):
        rig.step([routing(rng, 9, 4, tokens, 0.1)])
    rig.store.check_addresses(before)
    pool = rig.store.offloaded[1].slots.pool
    pool.last = pool.last.clone()
    with pytest.raises(EngineStartError, match=r"1 buffers moved after graph capture, slots\.1\.last"):
        rig.store.check_addresses(before)


def test_parameters_that_do_not_fit_the_plan_are_refused() -> None:
    store = Rig.build([8], 2, [2], "lru").store
    with pytest.raises(EngineStartError, match="added twice"):
        store.add_layer(0, parameters(0, 8))
    fresh = ExpertStore(store.plan, CPU, MOST_TOKENS)
    with pytest.raises(EngineStartError, match=r"shape \(7, 2, 3\); an expert axis of 8"):
        fresh.add_layer(0, parameters(0, 7))
    with pytest.raises(EngineStartError, match="24 bytes; the plan was made for 29"):
        fresh.add_layer(0, {"weight": parameters(0, 8)["weight"]})
    with pytest.raises(EngineStartError, match=r"these came without experts: \[0\]"):
        fresh.finish()


def test_a_stranger_in_the_fetch_list_is_refused_by_the_gather_itself() -> None:
    rig = Rig.build([8], 2, [2], "lru")
    staging, arena = rig.store.offloaded[0].staging, rig.store.offloaded[0].arena
    arena.tensors["weight"].fill_(-7.0)
    src = torch.tensor([8, -1, 9, -5, 2**31 - 1, 3, 3, 3, 11], dtype=torch.int32)
    dst = torch.tensor([0, 1, 2, 3, 4, 66, -2, -1, -1], dtype=torch.int32)
    staging.gather(src.numpy(), dst.numpy())
    assert rig.store.refused == 6 * 2, "each of the two parameters refuses the same six"
    assert (arena.tensors["weight"] == -7.0).all()


def test_copies_of_neighbours_bring_each_expert_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of large layer-steps on CUDA, runs of neighbours as one copy each, taken by CPU tensors here."""
    rig = Rig.build([30], 2, [2], "lru")
    staging, arena = rig.store.offloaded[0].staging, rig.store.offloaded[0].arena
    monkeypatch.setattr(staging, "_cuda", True)
    experts = [0, 1, 2, 4, 6, 7, 11, 29]
    staging.copy(experts, arena.staging_row)
    for name, wanted in parameters(0, 30).items():
        rows = arena.tensors[name][arena.staging_row : arena.staging_row + len(experts)]
        assert torch.equal(rows, wanted[experts])


def test_memory_is_asked_for_in_exact_sizes() -> None:
    experts, wide = 33, 40_000
    shape = LayerShape(0, experts, wide)
    plan = OffloadPlan(
        model=ModelShape("model", (shape,), 2), layers=(LayerPlan(0, experts, wide, 4, "lru", ()),), arena=0,
        staging=True, groups=True, staging_rows=64, asked_gb=None, trace=None, skew=None, warnings=(),
    )  # fmt: skip
    store = ExpertStore(plan, CPU, MOST_TOKENS)
    store.add_layer(0, {"weight": torch.ones(experts, wide, dtype=torch.uint8)})
    store.finish()
    memory = store.memory()
    asked = experts * wide
    assert memory["bank_bytes_asked"] == asked
    # Rounded up to pages, not to a power of two (2 MiB here).
    assert asked <= memory["bank_bytes_resident"] <= asked + 4096
    assert memory["bank_bytes_pinned"] == 0
    assert memory["slot_bytes"] == 4 * wide
    assert memory["staging_bytes"] == 64 * wide


def test_rows_are_split_where_the_staging_buffer_ends() -> None:
    """Each range of tokens needs at most 64 missing experts, and all of them together more."""
    rig = Rig.build([200], 8, [0], "lru", split="rows")
    rng = random.Random(4)
    rig.step([routing(rng, 200, 8, 40, 0.0)])
    counted = dict(zip(COUNTERS, rig.store.counters()[0][1], strict=True))
    assert counted["groups"] >= 3
    assert counted["staged"] > counted["unique"] > 64
    parts = list(rig.store.parts(0, torch.tensor(routing(rng, 200, 8, 40, 0.0))))
    ends = [(part.tokens.start, part.tokens.stop) for part in parts if part.tokens is not None]
    assert ends[0][0] == 0
    assert ends[-1][1] == 40
    assert all(stop == start for (_, stop), (start, _) in pairwise(ends))


def test_a_restart_forgets_all_steps_and_moves_nothing() -> None:
    rig = Rig.build([30, 30], 4, [5, 6], "clock", hot=[[1, 2, 3], [9]])
    before = rig.store.addresses()
    rng = random.Random(8)
    first = [[routing(rng, 30, 4, 3, 0.1) for _ in range(2)] for _ in range(6)]
    for ids in first:
        rig.step(ids)
    rig.store.restart()
    fresh = Rig.build([30, 30], 4, [5, 6], "clock", hot=[[1, 2, 3], [9]])
    rig.models = fresh.models
    assert rig.store.steps == 0
    for ids in first[::-1]:
        rig.step(ids)
    rig.store.check_addresses(before)
