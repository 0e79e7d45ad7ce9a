"""The fewest misses that any replacement policy could have had: for comparison, since it has to know the future.

Belady's rule (L. A. Belady, IBM Systems Journal 5(2), 1966) on the engine's steps: after a step, keep the experts whose
next use comes first, among those in slots and those just fetched. A row may be fetched and not kept (it was in the
staging buffer), so this is the optimum with bypass, and no policy of ``policy.py`` can be below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .counters import ACCESSES, CLEAN_STEPS, COUNTERS, HITS, STEPS, UNIQUE, UNIQUE_HITS
from .jit import compiled

_NEVER = 2**62


@compiled
def _wanted(ids: Any, starts: Any, experts: int, unique: Any, routed: Any, unique_starts: Any) -> None:
    """The different experts of each step, with how often each was routed."""
    place = np.full(experts, -1, dtype=np.int64)
    count = 0
    for step in range(starts.size - 1):
        begin = count
        for pair in range(starts[step], starts[step + 1]):
            expert = ids[pair]
            if not 0 <= expert < experts:
                continue
            if place[expert] >= begin:
                routed[place[expert]] += 1
            else:
                place[expert] = count
                unique[count] = expert
                routed[count] = 1
                count += 1
        unique_starts[step + 1] = count


@compiled
def _next_uses(unique: Any, unique_starts: Any, experts: int, next_use: Any) -> None:
    """The step of each one's next use, ``_NEVER`` for the last."""
    seen = np.full(experts, _NEVER, dtype=np.int64)
    for step in range(unique_starts.size - 2, -1, -1):
        for place in range(unique_starts[step], unique_starts[step + 1]):
            next_use[place] = seen[unique[place]]
            seen[unique[place]] = step


@compiled
def _fewest(unique: Any, routed: Any, starts: Any, next_use: Any, experts: int, slots: int, counts: Any) -> None:
    due = np.full(experts, -1, dtype=np.int64)  # step of the next use of what is in a slot, -1 for what is in none
    held = 0
    for step in range(starts.size - 1):
        if starts[step] == starts[step + 1]:
            continue
        missing = 0
        for i in range(starts[step], starts[step + 1]):
            counts[ACCESSES] += routed[i]
            if due[unique[i]] < 0:
                missing += 1
                held += 1
            else:
                counts[HITS] += routed[i]
                counts[UNIQUE_HITS] += 1
            due[unique[i]] = next_use[i]
        counts[STEPS] += 1
        counts[UNIQUE] += starts[step + 1] - starts[step]
        counts[CLEAN_STEPS] += missing == 0
        while held > slots:
            latest = np.argmax(due)
            due[latest] = -1
            held -= 1


def optimum_counts(ids: NDArray[Any], starts: NDArray[np.int64], experts: int, slots: int) -> NDArray[np.int64]:
    """What one layer would have counted from empty slots: [COUNTERS] int64, of which ``steps``, ``accesses``, ``hits``,
    ``unique``, ``unique_hits`` and ``clean_steps`` are filled (what it fetches where, no one can say).

    ``ids`` [pairs] of all small layer-steps, those of step s at ``starts[s]`` to ``starts[s + 1]``. Raises ValueError
    for a negative number of slots.
    """
    if slots < 0:
        raise ValueError(f"{slots} slots; 0 or more were expected")
    flat = np.ascontiguousarray(ids, dtype=np.int64)
    begins = np.ascontiguousarray(starts, dtype=np.int64)
    unique, routed = np.empty(len(flat), dtype=np.int64), np.empty(len(flat), dtype=np.int64)
    unique_starts = np.zeros(len(begins), dtype=np.int64)
    counts = np.zeros(len(COUNTERS), dtype=np.int64)
    _wanted(flat, begins, experts, unique, routed, unique_starts)
    next_use = np.empty(unique_starts[-1], dtype=np.int64)
    _next_uses(unique, unique_starts, experts, next_use)
    _fewest(unique, routed, unique_starts, next_use, experts, slots, counts)
    return counts


def fewest_misses(steps: Sequence[NDArray[Any]], experts: int, slots: int) -> int:
    """Misses (rows fetched) of one layer, from empty slots, over ``steps``: the ids of each small layer-step.

    Ids outside 0..``experts`` - 1 are skipped and an expert counts once a step, as in the engine. Raises ValueError
    for a negative number of slots.
    """
    flat = np.concatenate([*(np.ravel(ids) for ids in steps), np.zeros(0, dtype=np.int64)]).astype(np.int64)
    starts = np.zeros(len(steps) + 1, dtype=np.int64)
    np.cumsum([np.size(ids) for ids in steps], out=starts[1:])
    counts = optimum_counts(flat, starts, experts, slots)
    return int(counts[UNIQUE] - counts[UNIQUE_HITS])
