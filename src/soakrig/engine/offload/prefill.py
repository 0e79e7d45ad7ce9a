"""Large layer-steps: more routed pairs than the staging buffer has rows, as a prefill chunk has.

Slots are read as they stand, neither filled nor refreshed: a chunk routes to nearly every expert, which says nothing
about recency and would flush the cache. What is missing goes through the staging rows in groups. Each pair's output is
computed once, whole, in the one group that has its expert, and the caller sums over a token's experts once at the end:
summing each group's rounded partial sums gives other numbers, and the tests hold that it stays out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .counters import (
    ACCESSES,
    BAD_IDS,
    CLEAN_STEPS,
    GROUPS,
    HITS,
    SENTINELS,
    STAGED,
    STEPS,
    UNIQUE,
    UNIQUE_HITS,
)
from .settings import SplitName


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


def look_up(checked: CheckedIds, resident: Tensor, counts: Tensor, skew: Tensor) -> list[int]:
    """Count a large layer-step against the slots; returns the missing experts, ascending.

    ``resident`` [experts] int32: arena row or -1. Adds to ``counts`` and ``skew`` [experts]. Waits for the device.
    """
    routed = torch.zeros_like(skew).index_add_(0, checked.safe.reshape(-1), checked.valid.reshape(-1).to(skew.dtype))
    used, here = routed > 0, resident >= 0
    skew += used
    missing: list[int] = torch.nonzero(used & ~here).reshape(-1).tolist()
    unique = int(used.sum())
    if unique:
        counts[STEPS] += 1
        counts[ACCESSES] += routed.sum()
        counts[HITS] += (routed * here).sum()
        counts[UNIQUE] += unique
        counts[UNIQUE_HITS] += unique - len(missing)
        counts[CLEAN_STEPS] += int(len(missing) == 0)
    return missing


@dataclass(frozen=True, slots=True)
class Group:
    """What goes through the staging rows at a time: ``experts`` ascending, needed by tokens ``start`` to ``stop``.

    ``whole``: these tokens have no other group, and what they find in slots is served with this one. Without it the
    group is one of several for all tokens, and ``with_slots`` says whether it is the one that serves the slots too.
    """

    start: int
    stop: int
    experts: list[int]
    whole: bool
    with_slots: bool


def groups_of(
    checked: CheckedIds, resident: Tensor, missing: list[int], rows: int, split: SplitName, counts: Tensor
) -> Iterator[Group]:
    """The groups of a large layer-step with ``missing`` experts and ``rows`` staging rows, counted as they are given.

    By experts: ``rows`` of them at a time for all tokens, each fetched once. By rows: ranges of tokens that need at
    most so many, see ``row_split``.
    """
    tokens = len(checked.safe)
    if len(missing) <= rows:
        cuts = [Group(0, tokens, missing, whole=True, with_slots=True)]
    elif split == "rows":
        from .row_split import row_ranges

        ranges = row_ranges(checked, resident, rows)
        cuts = [Group(start, stop, experts, whole=True, with_slots=True) for start, stop, experts in ranges]
    else:
        cuts = [
            Group(0, tokens, missing[start : start + rows], whole=False, with_slots=start == 0)
            for start in range(0, len(missing), rows)
        ]
    for one in cuts:
        counts[STAGED] += len(one.experts)
        counts[GROUPS] += 1
        yield one
