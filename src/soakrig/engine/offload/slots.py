"""The slot cache's books: which expert is in which slot. One pool for each layer, or one for all of them.

Holds no weights: rows are numbers. A replay of a routing trace drives these same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .bookkeeping import FETCHES, assign_numba, assign_steps_numba
from .plan import LayerPlan
from .policy import Policy


class SlotPool:
    """``slots`` places for ``keys`` experts, on ``device``; slot 0 is row ``first_row`` of the arena.

    State (see ``bookkeeping.assign_numba``): ``slot_key``, ``key_slot``, ``last``, ``uses``, ``ref``, ``clock``.
    """

    def __init__(self, slots: int, keys: int, first_row: int, policy: Policy, device: torch.device) -> None:
        self.slots = slots
        self.first_row = first_row
        self.policy = policy
        self.slot_key = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self.key_slot = torch.full((keys,), -1, dtype=torch.int32, device=device)
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        self.uses = torch.zeros(slots, dtype=torch.int64, device=device)
        self.ref = torch.zeros(slots, dtype=torch.int32, device=device)
        self.clock = torch.zeros(2, dtype=torch.int64, device=device)

    @property
    def state(self) -> dict[str, Tensor]:
        """Every state tensor by name, in the order in which the bookkeeping takes them."""
        names = ("slot_key", "key_slot", "last", "uses", "ref", "clock")
        return {name: getattr(self, name) for name in names}

    def preload(self, keys: Iterable[int]) -> None:
        """Empty all slots, then fill them from 0 on as before the first step: used once, at time 0.

        ``keys``: hottest first. They are entered coldest first, since ties go to the lowest slot: what is expected to
        be used least is then the first to give way.
        """
        self.slot_key.fill_(-1)
        self.key_slot.fill_(-1)
        for state in (self.last, self.uses, self.ref, self.clock):
            state.zero_()
        for slot, key in enumerate(reversed(list(keys))):
            self.slot_key[slot] = key
            self.key_slot[key] = slot
            self.uses[slot] = 1


Native = Any
"""What the bookkeeping works on: a tensor on CUDA, on the CPU the numpy array that shares its memory."""


def native(tensor: Tensor) -> Native:
    """The tensor as the bookkeeping of its device takes it."""
    return tensor if tensor.is_cuda else tensor.numpy()


@dataclass(frozen=True, slots=True)
class Tally:
    """What a layer's small layer-steps add to: ``counts`` [COUNTERS] and ``skew`` [experts], int64, ``bad_tokens``
    [tokens] uint8."""

    counts: Tensor
    skew: Tensor
    bad_tokens: Tensor


@dataclass(frozen=True, slots=True)
class Fetches:
    """What a small layer-step leaves, in buffers that the next layer-step overwrites.

    ``rows``, ``bank_rows`` [tokens, k]; ``src``, ``dst`` [64] int32, native; ``count``: how many fetches, None where
    only the device knows.
    """

    rows: Tensor
    bank_rows: Tensor
    src: Native
    dst: Native
    count: int | None


class StepBuffers:
    """The output buffers of layer-steps, one set for all layers: they run one after the other.

    Fixed addresses, as a captured graph needs them.
    """

    def __init__(self, device: torch.device) -> None:
        def empty(dtype: torch.dtype) -> Tensor:
            return torch.full((FETCHES,), -1, dtype=dtype, device=device)

        self._src, self._dst = empty(torch.int32), empty(torch.int32)
        self.src, self.dst = native(self._src), native(self._dst)
        # On the CPU all ids are taken as int64, so that one compiled function serves.
        types = (torch.int32, torch.int64) if device.type == "cuda" else (torch.int64,)
        self._rows = {dtype: (empty(dtype), empty(dtype)) for dtype in types}
        self._views: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, Tensor, Native, Native]] = {}

    def rows(self, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor, Native, Native]:
        """``rows`` and ``bank_rows`` in the shape of the ids, and both again, flat and native."""
        found = self._views.get((shape, dtype))
        if found is None:
            both = [one[: shape.numel()] for one in self._rows[dtype]]
            found = (both[0].view(shape), both[1].view(shape), native(both[0]), native(both[1]))
            self._views[shape, dtype] = found
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer by name."""
        named = {"src": self._src, "dst": self._dst}
        for dtype, (rows, bank_rows) in self._rows.items():
            named |= {f"rows.{dtype}": rows, f"bank_rows.{dtype}": bank_rows}
        return named


class LayerSlots:
    """One layer's view of its pool. ``staging_row`` -1: nothing may be fetched, the slots are frozen."""

    def __init__(
        self, pool: SlotPool, experts: int, key_base: int, staging_row: int, buffers: StepBuffers, tally: Tally
    ) -> None:
        self.pool = pool
        self.experts = experts
        self.key_base = key_base
        self._buffers = buffers
        self._cuda = pool.slot_key.is_cuda
        state = [native(one) for one in pool.state.values()]
        self._where: list[Any] = [experts, key_base, *state, int(pool.policy), pool.first_row, staging_row]
        self._tally = (native(tally.counts), native(tally.skew), native(tally.bad_tokens))

    def assign(self, ids: Tensor) -> Fetches:
        """Place the ids of a small layer-step, [tokens, k] with at most 64 pairs, int32 or int64."""
        buffers = self._buffers
        top_k = ids.shape[-1]
        if self._cuda:
            from .assign_kernel import assign

            rows, bank_rows, *flat = buffers.rows(ids.shape, ids.dtype)
            arguments: list[Any] = [ids.reshape(-1), top_k, *self._where, *flat, buffers.src, buffers.dst, *self._tally]
            assign(*arguments)
            return Fetches(rows, bank_rows, buffers.src, buffers.dst, None)
        rows, bank_rows, *flat = buffers.rows(ids.shape, torch.int64)
        raw = ids.reshape(-1).long().numpy()
        arguments = [raw, top_k, *self._where, *flat, buffers.src, buffers.dst, *self._tally]
        count = assign_numba(*arguments)
        if ids.dtype != torch.int64:
            rows, bank_rows = rows.to(ids.dtype), bank_rows.to(ids.dtype)
        return Fetches(rows, bank_rows, buffers.src, buffers.dst, count)

    def assign_steps(self, ids: Native, starts: Native, top_k: int) -> None:
        """Small layer-steps one after the other, on the CPU: ``ids`` int64 [pairs], ``starts`` [steps + 1] where
        each begins. What a replay counts; nobody asks it where a step's experts went.
        """
        buffers = self._buffers
        flat = buffers.rows(torch.Size([FETCHES]), torch.int64)[2:]
        arguments: list[Any] = [ids, starts, top_k, *self._where, *flat, buffers.src, buffers.dst, *self._tally]
        assign_steps_numba(*arguments)

    def resident(self) -> Tensor:
        """Arena row of every expert [experts] int32, -1 where it is in no slot. Nothing is refreshed by looking."""
        slot = self.pool.key_slot[self.key_base : self.key_base + self.experts]
        return torch.where(slot >= 0, slot + self.pool.first_row, slot)


def layer_slots(
    layers: Sequence[LayerPlan], arena: int, staging_row: int, buffers: StepBuffers, tallies: Sequence[Tally]
) -> list[LayerSlots]:
    """The books of ``layers`` in order, their hot sets entered: a pool each, or one of ``arena`` slots for all.

    Slots are numbered through: the rows of each pool begin where those of the one before end.
    """
    device = tallies[0].counts.device if tallies else torch.device("cpu")
    shared: SlotPool | None = None
    if arena:
        keys = sum(layer.experts for layer in layers)
        shared = SlotPool(arena, keys, 0, Policy.named(layers[0].policy), device)
    books: list[LayerSlots] = []
    hot: list[int] = []
    key_base = first_row = 0
    for layer, tally in zip(layers, tallies, strict=True):
        if shared is None:
            pool = SlotPool(layer.slots, layer.experts, first_row, Policy.named(layer.policy), device)
            pool.preload(layer.hot)
            books.append(LayerSlots(pool, layer.experts, 0, staging_row, buffers, tally))
        else:
            hot += [key_base + expert for expert in layer.hot]
            books.append(LayerSlots(shared, layer.experts, key_base, staging_row, buffers, tally))
        first_row += layer.slots
        key_base += layer.experts
    if shared is not None:
        shared.preload(hot)
    return books
