"""Large layer-steps: more routed pairs than the staging buffer has rows, as a prefill chunk has.

Slots are read as they stand, neither filled nor refreshed: a chunk routes to nearly every expert, which says nothing
about recency and would flush the cache. What is missing goes through the staging rows in groups. Each pair's output is
computed once, whole, in the one group that has its expert, and the caller sums over a token's experts once at the end:
summing each group's rounded partial sums gives other numbers, and the tests hold that it stays out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .counters import (
    ACCESSES,
    BAD_IDS,
    CLEAN_STEPS,
    GROUPS,
    HITS,
    IN_PLACE,
    SENTINELS,
    STAGED,
    STEPS,
    UNIQUE,
    UNIQUE_HITS,
)


@dataclass(frozen=True, slots=True)
class CheckedIds:
    """The ids of a layer-step after the check. ``valid`` [tokens, k] bool; ``safe``: the ids, 0 where not valid."""

    valid: Tensor
    safe: Tensor

    def rows(self, of_expert: Tensor, dtype: torch.dtype) -> Tensor:
        """Each pair's entry of ``of_expert`` [experts], -1 where the id is not valid."""
        return torch.where(self.valid, of_expert[self.safe], -1).to(dtype)


def check_ids(ids: Tensor, experts: int, counts: Tensor, bad_tokens: Tensor) -> CheckedIds:
    """Tell routed ids from sentinels (-1 and ``experts``) and from bad ones; no host sync.

    ``ids`` [tokens, k]; adds to ``counts`` [COUNTERS] int64 and marks ``bad_tokens`` [tokens or more] uint8.
    """
    valid = (ids >= 0) & (ids < experts)
    sentinel = (ids == -1) | (ids == experts)
    bad = ~(valid | sentinel)
    counts[SENTINELS] += sentinel.sum()
    counts[BAD_IDS] += bad.sum()
    bad_tokens[: ids.shape[0]] |= bad.any(dim=1).to(torch.uint8)
    return CheckedIds(valid, torch.where(valid, ids, 0).long())


def look_up(checked: CheckedIds, resident: Tensor, counts: Tensor, skew: Tensor, group: int) -> Tensor:
    """Count a large layer-step against the slots; returns the missing experts, ascending, [missing] int64 on the host.

    ``resident`` [experts] int32: arena row or -1; ``group``: rows that are staged at a time, 0 where the bank is read
    in place. Adds to ``counts`` and ``skew`` [experts]. Waits for the device.
    """
    routed = torch.zeros_like(skew).index_add_(0, checked.safe.reshape(-1), checked.valid.reshape(-1).to(skew.dtype))
    used, here = routed > 0, resident >= 0
    skew += used
    missing = torch.nonzero(used & ~here).reshape(-1).cpu()
    unique = int(used.sum())
    if unique:
        counts[STEPS] += 1
        counts[ACCESSES] += routed.sum()
        counts[HITS] += (routed * here).sum()
        counts[UNIQUE] += unique
        counts[UNIQUE_HITS] += unique - len(missing)
        counts[CLEAN_STEPS] += int(len(missing) == 0)
        counts[STAGED if group else IN_PLACE] += len(missing)
        counts[GROUPS] += -(-len(missing) // group) if group else 0
    return missing
