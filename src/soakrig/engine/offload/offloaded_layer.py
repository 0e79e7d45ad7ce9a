"""One offloaded layer: where its experts are, and in which parts a layer-step's pairs find them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .arena import Arena
from .bank import Bank
from .counters import IN_PLACE
from .plan import LayerPlan, OffloadPlan
from .prefill import CheckedIds, Group, check_ids, groups_of, look_up

if TYPE_CHECKING:  # numba comes with them, and is imported only where something is offloaded
    from .slots import LayerSlots, Tally
    from .staging import Staging

SMALL, LARGE = 0, 1
"""The two paths of a layer-step, by shape alone: at most as many pairs as there are staging rows, or more."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where some pairs of a layer-step find their experts.

    ``rows`` [tokens, k], the type of the ids: an index into the first axis of every tensor, -1 where the pair is in
    another part, or in none. ``tensors``: parameter name -> [rows, ...]. Both hold until the next part is asked for.
    ``tokens``: those whose every routed pair is in this part, and no other token's is; None where pairs of one token
    may be in several parts.
    """

    rows: Tensor
    tensors: Mapping[str, Tensor]
    tokens: slice | None = None


class OffloadedLayer:
    """A layer's bank, its device rows, its books, and what moves rows between them.

    ``large`` [COUNTERS] int64: the counters of large layer-steps; those of small ones are in ``tally``.
    """

    def __init__(
        self,
        plan: LayerPlan,
        whole: OffloadPlan,
        bank: Bank,
        arena: Arena,
        slots: LayerSlots,
        staging: Staging,
        tally: Tally,
        large: Tensor,
        *,
        one_source: bool,
    ) -> None:
        self.plan = plan
        self.bank = bank
        self.arena = arena
        self.slots = slots
        self.staging = staging
        self.skew = tally.skew
        self._whole = whole
        self._bad_tokens = tally.bad_tokens
        self._large_counts = large
        self._one_source = one_source
        self._device = large.device

    def load_hot(self) -> None:
        """Copy the hot set into its slots, by plain copies: no kernel of ours has to run for it."""
        rows = self.slots.resident().tolist()
        for expert in self.plan.hot:
            for name, tensor in self.bank.host.items():
                self.arena.tensors[name][rows[expert]].copy_(tensor[expert])

    def parts(self, ids: Tensor) -> Iterator[Part]:
        """See ``ExpertStore.parts``."""
        return self._small(ids) if ids.numel() <= self._whole.staging_rows else self._large(ids)

    def _small(self, ids: Tensor) -> Iterator[Part]:
        found = self.slots.assign(ids)
        everyone = slice(0, len(ids))
        if self._whole.staging:
            if found.count != 0:
                self.staging.gather(found.src, found.dst)
            yield Part(found.rows, self.arena.tensors, everyone)
            return
        if self._one_source:
            yield Part(torch.where(found.rows >= 0, ids, found.bank_rows), self.bank.in_place(self._device), everyone)
            return
        if self.slots.pool.slots:
            yield Part(found.rows, self.arena.tensors)
        yield Part(found.bank_rows, self.bank.in_place(self._device))

    def _large(self, ids: Tensor) -> Iterator[Part]:
        plan = self._whole
        counts = self._large_counts
        checked = check_ids(ids, self.plan.experts, counts, self._bad_tokens)
        resident = self.slots.resident()
        missing = look_up(checked, resident, counts, self.skew)
        everyone = slice(0, len(ids))
        if not missing:
            if self.slots.pool.slots:
                yield Part(checked.rows(resident, ids.dtype), self.arena.tensors, everyone)
            return
        if plan.staging and plan.groups:
            for group in groups_of(checked, resident, missing, plan.staging_rows, plan.split, counts):
                yield self._staged(group, checked, resident, ids.dtype)
            return
        counts[IN_PLACE] += len(missing)
        if self._one_source:
            yield Part(torch.where(checked.valid, ids, -1), self.bank.in_place(self._device), everyone)
            return
        if self.slots.pool.slots:
            yield Part(checked.rows(resident, ids.dtype), self.arena.tensors)
        absent = checked.valid & (resident[checked.safe] < 0)
        yield Part(torch.where(absent, ids, -1), self.bank.in_place(self._device))

    def _staged(self, group: Group, checked: CheckedIds, resident: Tensor, dtype: torch.dtype) -> Part:
        self.staging.copy(group.experts, self.arena.staging_row)
        of_expert = resident.clone() if group.with_slots else torch.full_like(resident, -1)
        places = torch.arange(len(group.experts), dtype=resident.dtype, device=resident.device)
        of_expert[torch.tensor(group.experts, device=resident.device)] = places + self.arena.staging_row
        rows = checked.rows(of_expert, dtype)
        if not group.whole:
            return Part(rows, self.arena.tensors)
        rows[: group.start] = -1
        rows[group.stop :] = -1
        return Part(rows, self.arena.tensors, slice(group.start, group.stop))
