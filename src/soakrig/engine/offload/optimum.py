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

from .jit import compiled

_NEVER = 2**62


@compiled
def _fewest(experts: Any, starts: Any, next_use: Any, count: int, slots: int) -> int:
    due = np.full(count, -1, dtype=np.int64)  # step of the next use of what is in a slot, -1 for what is in none
    held = 0
    misses = 0
    for step in range(starts.size - 1):
        for i in range(starts[step], starts[step + 1]):
            if due[experts[i]] < 0:
                misses += 1
                held += 1
            due[experts[i]] = next_use[i]
        while held > slots:
            latest = np.argmax(due)
            due[latest] = -1
            held -= 1
    return misses


def fewest_misses(steps: Sequence[NDArray[Any]], experts: int, slots: int) -> int:
    """Misses (rows fetched) of one layer, from empty slots, over ``steps``: the ids of each small layer-step.

    Ids outside 0..``experts`` - 1 are skipped and an expert counts once a step, as in the engine. Raises ValueError
    for a negative number of slots.
    """
    if slots < 0:
        raise ValueError(f"{slots} slots; 0 or more were expected")
    unique = [np.unique(ids[(ids >= 0) & (ids < experts)]) for ids in steps]
    starts = np.zeros(len(unique) + 1, dtype=np.int64)
    np.cumsum([len(one) for one in unique], out=starts[1:])
    flat = np.concatenate([*unique, np.zeros(0, dtype=np.int64)]).astype(np.int64)
    next_use = np.full(len(flat), _NEVER, dtype=np.int64)
    seen: dict[int, int] = {}
    for step in range(len(unique) - 1, -1, -1):
        for place in range(int(starts[step]), int(starts[step + 1])):
            expert = int(flat[place])
            next_use[place] = seen.get(expert, _NEVER)
            seen[expert] = step
    return int(_fewest(flat, starts, next_use, experts, slots))
