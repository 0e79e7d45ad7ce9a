"""Cuts a large layer-step into ranges of tokens whose missing experts fit the staging rows.

Every token then has all its experts in one part, so that a kernel that sums over a token's experts itself gives the
numbers that it gives with all experts resident. The price: an expert that several ranges need is fetched for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from .jit import compiled
from .prefill import CheckedIds


@compiled
def _cut(ids: Any, valid: Any, absent: Any, most: int, ends: Any) -> int:
    """Fill ``ends`` with the token behind each range; returns how many there are."""
    tokens, top_k = ids.shape
    needed = np.full(absent.size, -1, dtype=np.int64)  # number of the last range that needs the expert
    ranges, held = 0, 0
    for token in range(tokens):
        more = 0
        for choice in range(top_k):
            expert = ids[token, choice]
            if valid[token, choice] and absent[expert] and needed[expert] != ranges:
                needed[expert] = ranges
                more += 1
        if held + more > most:
            ends[ranges] = token
            ranges += 1
            held = 0
            for choice in range(top_k):
                expert = ids[token, choice]
                if valid[token, choice] and absent[expert] and needed[expert] != ranges:
                    needed[expert] = ranges
                    held += 1
        else:
            held += more
    ends[ranges] = tokens
    return ranges + 1


def row_ranges(checked: CheckedIds, resident: Tensor, most: int) -> list[tuple[int, int, list[int]]]:
    """``(start, stop, missing experts ascending)`` of each range of tokens, at most ``most`` missing in each.

    ``resident`` [experts]: -1 where an expert has to be fetched. ``most`` is at least the experts of a token. Waits for
    the device.
    """
    ids, valid = checked.safe.cpu().numpy(), checked.valid.cpu().numpy()
    absent = resident.cpu().numpy() < 0
    ends = np.zeros(len(ids) + 1, dtype=np.int64)
    count = _cut(ids, valid, absent, most, ends)
    found: list[tuple[int, int, list[int]]] = []
    start = 0
    for stop in ends[:count].tolist():
        experts = np.unique(ids[start:stop][valid[start:stop]])
        found.append((start, stop, experts[absent[experts]].tolist()))
        start = stop
    return found
