"""One layer-step of the slot cache on the CPU: which expert is where, who gives way, what has to be fetched.

The Triton kernel in ``assign_kernel.py`` takes the same arrays under the same names and does the same.
"""

from __future__ import annotations

from typing import Any

from .counters import (
    ACCESSES,
    BAD_IDS,
    CLEAN_STEPS,
    EVICTIONS,
    FILLS,
    HITS,
    IN_PLACE,
    SENTINELS,
    STAGED,
    STEPS,
    UNIQUE,
    UNIQUE_HITS,
)
from .jit import compiled
from .plan import STAGING_ROWS
from .policy import NONE, victim

FETCHES = STAGING_ROWS
"""Length of a fetch list: a small layer-step has at most so many pairs."""


@compiled
def assign_numba(
    ids: Any,
    top_k: int,
    experts: int,
    key_base: int,
    slot_key: Any,
    key_slot: Any,
    last: Any,
    uses: Any,
    ref: Any,
    clock: Any,
    policy: int,
    first_row: int,
    staging_row: int,
    rows: Any,
    bank_rows: Any,
    src: Any,
    dst: Any,
    counts: Any,
    skew: Any,
    bad_tokens: Any,
) -> int:
    """Place every id of a small layer-step; returns how many rows have to be fetched (the length used of ``src``).

    In: ``ids`` [n] int32 or int64, n <= 64, ``top_k`` to a token; ``experts`` of the layer; ``key_base``: key of its
    expert 0 in this pool; ``first_row``: the row of slot 0; ``staging_row``: the first staging row, or -1 where
    nothing may be fetched (then the slots are frozen, whatever the policy, and misses are for ``bank_rows``).
    State of the pool: ``slot_key`` [slots] int32 (-1: free), ``key_slot`` [keys] int32 (-1: in no slot), ``last``,
    ``uses`` [slots] int64, ``ref`` [slots] int32, ``clock`` [2] int64: the time and CLOCK's hand.
    Out: ``rows`` [n] of the arena, -1 for sentinels, bad ids and what is read in place; ``bank_rows`` [n]: the expert
    where it is read in place, else -1; ``src``, ``dst`` [64] int32: expert and row of each fetch, -1 behind the last.
    Added to: ``counts`` [COUNTERS] int64, ``skew`` [experts] int64 (layer-steps that routed to the expert); set:
    ``bad_tokens`` [tokens] uint8.
    """
    src[:] = -1
    dst[:] = -1
    routed = 0
    for pair in range(ids.size):
        expert = ids[pair]
        rows[pair] = -1
        bank_rows[pair] = -1
        if 0 <= expert < experts:
            routed += 1
        elif expert in {-1, experts}:
            counts[SENTINELS] += 1
        else:
            counts[BAD_IDS] += 1
            bad_tokens[pair // top_k] = 1
    if routed == 0:
        return 0
    now = clock[0] + 1
    clock[0] = now
    unique_hits = 0
    # Every hit is pinned (its last use is now) before the first victim is looked for.
    for pair in range(ids.size):
        expert = ids[pair]
        if not 0 <= expert < experts:
            continue
        slot = key_slot[key_base + expert]
        if slot < 0:
            continue
        rows[pair] = first_row + slot
        counts[HITS] += 1
        if last[slot] != now:
            last[slot] = now
            uses[slot] += 1
            ref[slot] = 1
            skew[expert] += 1
            unique_hits += 1
    missing = 0
    staged = 0
    for pair in range(ids.size):
        expert = ids[pair]
        if rows[pair] >= 0 or not 0 <= expert < experts:
            continue
        place = NONE
        for earlier in range(missing):
            if src[earlier] == expert:
                place = earlier
                break
        if place == NONE:
            place = missing
            missing += 1
            src[place] = expert
            skew[expert] += 1
            if staging_row >= 0:
                slot = victim(policy, now, slot_key, last, uses, ref, clock)
                if slot == NONE:
                    dst[place] = staging_row + staged
                    staged += 1
                else:
                    if slot_key[slot] >= 0:
                        key_slot[slot_key[slot]] = -1
                        counts[EVICTIONS] += 1
                    slot_key[slot] = key_base + expert
                    key_slot[key_base + expert] = slot
                    last[slot] = now
                    uses[slot] = 1
                    ref[slot] = 1
                    dst[place] = first_row + slot
                    counts[FILLS] += 1
        if staging_row >= 0:
            rows[pair] = dst[place]
        else:
            bank_rows[pair] = expert
    counts[STEPS] += 1
    counts[ACCESSES] += routed
    counts[UNIQUE] += unique_hits + missing
    counts[UNIQUE_HITS] += unique_hits
    counts[CLEAN_STEPS] += missing == 0
    counts[STAGED] += staged
    if staging_row < 0:
        counts[IN_PLACE] += missing
        src[:] = -1
        return 0
    return missing


@compiled
def assign_steps_numba(
    ids: Any,
    starts: Any,
    top_k: int,
    experts: int,
    key_base: int,
    slot_key: Any,
    key_slot: Any,
    last: Any,
    uses: Any,
    ref: Any,
    clock: Any,
    policy: int,
    first_row: int,
    staging_row: int,
    rows: Any,
    bank_rows: Any,
    src: Any,
    dst: Any,
    counts: Any,
    skew: Any,
    bad_tokens: Any,
) -> None:
    """Small layer-steps one after the other, for a replay: ``ids`` [pairs] of all of them, those of step s at
    ``starts[s]`` to ``starts[s + 1]``. The rest is ``assign_numba``'s; only the last step's placement is left.
    """
    for step in range(starts.size - 1):
        assign_numba(
            ids[starts[step] : starts[step + 1]],
            top_k,
            experts,
            key_base,
            slot_key,
            key_slot,
            last,
            uses,
            ref,
            clock,
            policy,
            first_row,
            staging_row,
            rows,
            bank_rows,
            src,
            dst,
            counts,
            skew,
            bad_tokens,
        )
