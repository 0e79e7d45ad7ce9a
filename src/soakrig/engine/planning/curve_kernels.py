"""LRU for every number of slots in one pass: the compiled loops.

R. L. Mattson et al., IBM Systems Journal 9(2), 1970: under LRU what n slots hold is what n - 1 hold and one more, so
one list in order of last use tells for each access how many slots would have made it a hit. The list is kept as each
expert's place in it, which a few vector instructions update: with some hundred experts that beats any tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soakrig.engine.offload.jit import compiled
from soakrig.engine.offload.plan import STAGING_ROWS


@compiled
def touch(place: Any, expert: int) -> None:
    """Move one expert to the front: all that were before it go one back. ``place`` [experts], uint8 or uint16."""
    before = place[expert]
    for other in range(place.size):
        place[other] += place[other] < before
    place[expert] = 0


@compiled
def sequential_kernel(ids: Any, starts: Any, experts: int, place: Any, seen: Any, hits: Any, counts: Any) -> None:
    """One routed id after another. ``ids`` int16 [rows, layers, k], ``starts`` [steps + 1] the first row of each step;
    state and counts by layer: ``place``, ``seen`` [layers, experts], ``hits`` [layers, experts] int64 (hits from so
    many + 1 slots on), ``counts`` [layers, 2] (steps with a routed id, routed ids).
    """
    for layer in range(ids.shape[1]):
        places, known, found = place[layer], seen[layer], hits[layer]
        for step in range(starts.size - 1):
            routed = 0
            for row in range(starts[step], starts[step + 1]):
                for at in range(ids.shape[2]):
                    expert = ids[row, layer, at]
                    if not 0 <= expert < experts:
                        continue
                    routed += 1
                    if known[expert]:
                        found[places[expert]] += 1
                    else:
                        known[expert] = 1
                    touch(places, expert)
            counts[layer, 0] += routed > 0
            counts[layer, 1] += routed


@compiled
def step_kernel(
    ids: Any, starts: Any, experts: int, place: Any, seen: Any, stamp: Any, first_step: int, unique_hits: Any,
    access_hits: Any, clean: Any, counts: Any,
) -> None:  # fmt: skip
    """Whole engine steps: all ids of a layer-step are looked up before any is moved, an expert counts once, and a large
    layer-step (more than 64 ids) only looks.

    ``starts`` [steps + 1]: first row of each; ``stamp`` [layers, experts] int64: last step an expert was in; counts by
    layer and path (small, large): ``unique_hits``, ``access_hits`` [layers, 2, experts], ``clean`` [layers, 2, experts]
    (steps all in slots from so many + 1 slots on), ``counts`` [layers, 2, 3] (steps, accesses, unique).
    """
    wanted = np.empty(experts, dtype=np.int64)
    for layer in range(ids.shape[1]):
        places, known, stamps = place[layer], seen[layer], stamp[layer]
        for step in range(starts.size - 1):
            path = int((starts[step + 1] - starts[step]) * ids.shape[2] > STAGING_ROWS)
            unique, routed, farthest, cold = 0, 0, 0, False
            for row in range(starts[step], starts[step + 1]):
                for at in range(ids.shape[2]):
                    expert = ids[row, layer, at]
                    if not 0 <= expert < experts:
                        continue
                    routed += 1
                    again = stamps[expert] == first_step + step
                    if not again:
                        stamps[expert] = first_step + step
                        wanted[unique] = expert
                        unique += 1
                    if known[expert]:
                        distance = places[expert]
                        access_hits[layer, path, distance] += 1
                        if not again:
                            unique_hits[layer, path, distance] += 1
                            farthest = max(farthest, distance)
                    else:
                        cold = True
            if routed == 0:
                continue
            counts[layer, path, 0] += 1
            counts[layer, path, 1] += routed
            counts[layer, path, 2] += unique
            if not cold:
                clean[layer, path, farthest] += 1
            if path == 0:
                # In another order at each step: ids come with the likeliest first, and an order that went by it would
                # know more than slots do, among which the engine's ties are drawn.
                for one in range(unique):
                    expert = wanted[(first_step + step + one) % unique]
                    known[expert] = 1
                    touch(places, expert)


@compiled
def skew_kernel(
    ids: Any, starts: Any, experts: int, stamp: Any, first_step: int, used: Any, routed: Any, steps: Any
) -> None:
    """How often each expert was in a small layer-step, and how often it was routed there: ``used``, ``routed`` [layers,
    experts] int64; ``steps`` [layers]: small layer-steps with a routed id."""
    for layer in range(ids.shape[1]):
        for step in range(starts.size - 1):
            if (starts[step + 1] - starts[step]) * ids.shape[2] > STAGING_ROWS:
                continue
            any_routed = False
            for row in range(starts[step], starts[step + 1]):
                for at in range(ids.shape[2]):
                    expert = ids[row, layer, at]
                    if 0 <= expert < experts:
                        any_routed = True
                        routed[layer, expert] += 1
                        if stamp[layer, expert] != first_step + step:
                            stamp[layer, expert] = first_step + step
                            used[layer, expert] += 1
            steps[layer] += any_routed
