"""The offline optimum: no schedule does better, and no policy of the engine reaches below it."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_model import LayerModel, PoolModel, Slot
from soakrig.engine.offload.optimum import fewest_misses


def by_trying_everything(steps: list[list[int]], slots: int) -> int:
    """Every choice of what to keep after every step."""

    @cache
    def best(step: int, held: frozenset[int]) -> int:
        if step == len(steps):
            return 0
        wanted = frozenset(steps[step])
        pool = sorted(held | wanted)
        keep = [frozenset(kept) for kept in combinations(pool, min(slots, len(pool)))]
        return len(wanted - held) + min(best(step + 1, kept) for kept in keep)

    return best(0, frozenset())


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=7), st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_it_is_the_least_of_all_schedules(steps: list[list[int]], slots: int) -> None:
    assert fewest_misses([np.array(one) for one in steps], 5, slots) == by_trying_everything(steps, slots)


@pytest.mark.parametrize("policy", ["static", "lru", "lfru", "clock"])
def test_no_policy_is_below_it(policy: str) -> None:
    rng = random.Random(policy)
    weights = [1 / (rank + 1) for rank in range(24)]
    steps = [rng.choices(range(24), weights, k=4) for _ in range(400)]
    model = LayerModel(0, 24, 0, PoolModel([Slot() for _ in range(8)], policy), staging=True, groups=True)
    for ids in steps:
        model.step([ids])
    counts = model.counts["small"]
    misses = counts["unique"] - counts["unique_hits"]
    fewest = fewest_misses([np.array(one) for one in steps], 24, 8)
    assert fewest < misses
    if policy != "static":  # and it is of their kind: a bound far below would say nothing
        assert misses < 2 * fewest


def test_sentinels_and_bad_ids_are_skipped() -> None:
    assert fewest_misses([np.array([-1, 3, 3, 5, 99])], 5, 2) == 1
    with pytest.raises(ValueError, match="-1 slots"):
        fewest_misses([], 5, -1)
