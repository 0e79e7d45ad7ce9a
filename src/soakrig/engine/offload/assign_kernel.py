"""Triton kernel of a small layer-step's bookkeeping: the arrays, the names and the results of ``assign_numba``.

One program does the whole step, so that one launch replaces a chain of small ones and a captured graph can hold it.
All it loads is loaded before a barrier, all it stores is stored behind it, and what changes in between lives in
registers: nothing that was stored is loaded again, whose value another warp might not see yet.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import counters
from .bookkeeping import FETCHES
from .counters import COUNTERS
from .kernels import on_device
from .policy import LFRU_SHIFT, Policy

_CLOSED64 = tl.constexpr(2**63 - 1)
_CLOSED32 = tl.constexpr(2**31 - 1)
_FETCHES = tl.constexpr(FETCHES)
_SHIFT = tl.constexpr(LFRU_SHIFT)
_STATIC = tl.constexpr(int(Policy.STATIC))
_LFRU = tl.constexpr(int(Policy.LFRU))
_CLOCK = tl.constexpr(int(Policy.CLOCK))
_COUNTERS = tl.constexpr(len(COUNTERS))
_COUNTER_LANES = tl.constexpr(1 << (len(COUNTERS) - 1).bit_length())
_STEPS = tl.constexpr(counters.STEPS)
_ACCESSES = tl.constexpr(counters.ACCESSES)
_HITS = tl.constexpr(counters.HITS)
_UNIQUE = tl.constexpr(counters.UNIQUE)
_UNIQUE_HITS = tl.constexpr(counters.UNIQUE_HITS)
_CLEAN_STEPS = tl.constexpr(counters.CLEAN_STEPS)
_FILLS = tl.constexpr(counters.FILLS)
_EVICTIONS = tl.constexpr(counters.EVICTIONS)
_STAGED = tl.constexpr(counters.STAGED)
_IN_PLACE = tl.constexpr(counters.IN_PLACE)
_SENTINELS = tl.constexpr(counters.SENTINELS)
_BAD_IDS = tl.constexpr(counters.BAD_IDS)
SMALLEST = 16
"""Lanes of the narrowest vector: fewer save nothing, and each width is one more kernel to compile."""


@triton.jit
def _count(mask: tl.tensor) -> tl.tensor:
    return tl.sum(mask.to(tl.int32), axis=0)


# Nothing is specialised: one compiled kernel serves all layers, whatever their numbers and the places of their arrays.
_NUMBERS = ["pairs", "top_k", "experts", "key_base", "slots", "first_row", "staging_row"]
_ARRAYS = [
    "ids", "slot_key", "key_slot", "last", "uses", "ref", "clock",
    "rows", "bank_rows", "src", "dst", "counts", "skew", "bad_tokens",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def assign_kernel(
    ids: tl.tensor,
    pairs: tl.tensor,
    top_k: tl.tensor,
    experts: tl.tensor,
    key_base: tl.tensor,
    slots: tl.tensor,
    slot_key: tl.tensor,
    key_slot: tl.tensor,
    last: tl.tensor,
    uses: tl.tensor,
    ref: tl.tensor,
    clock: tl.tensor,
    first_row: tl.tensor,
    staging_row: tl.tensor,
    rows: tl.tensor,
    bank_rows: tl.tensor,
    src: tl.tensor,
    dst: tl.tensor,
    counts: tl.tensor,
    skew: tl.tensor,
    bad_tokens: tl.tensor,
    POLICY: tl.constexpr,  # noqa: N803 - constants of a kernel are written so
    PAIRS: tl.constexpr,  # noqa: N803
    SLOTS: tl.constexpr,  # noqa: N803
) -> None:
    """One layer-step, by one program; see ``bookkeeping.assign_numba`` for the arrays, which are pointers here.

    ``pairs`` ids, ``slots`` slots; ``PAIRS`` and ``SLOTS`` are the powers of two that hold them.
    """
    # Load: the ids, where each is, and what the step before left.
    pair = tl.arange(0, PAIRS)
    given = pair < pairs
    raw = tl.load(ids + pair, mask=given, other=-1)
    routed = given & (raw >= 0) & (raw < experts)
    sentinel = given & ((raw == -1) | (raw == experts))
    bad = given & ((raw < -1) | (raw > experts))
    # The address is clamped as well as masked: an id out of range is no address anywhere below.
    expert = tl.where(routed, raw, 0).to(tl.int32)
    hit_slot = tl.load(key_slot + key_base + expert, mask=routed, other=-1)
    seen = tl.load(skew + expert, mask=routed, other=0)
    time = tl.load(clock)
    hand = tl.load(clock + 1).to(tl.int32)
    slot = tl.arange(0, SLOTS)
    exists = slot < slots
    key = tl.load(slot_key + slot, mask=exists, other=0)
    hit_uses = tl.load(uses + tl.where(hit_slot >= 0, hit_slot, 0), mask=hit_slot >= 0, other=0)
    counter = tl.arange(0, _COUNTER_LANES)
    counted = tl.load(counts + counter, mask=counter < _COUNTERS, other=0)

    # Which pair names an expert first, and the place of every missing expert in the order of first occurrence.
    same = (expert[:, None] == expert[None, :]) & (routed[:, None] & routed[None, :])
    owner = tl.min(tl.where(same, pair[None, :], PAIRS), axis=1)
    first = routed & (owner == pair)
    hit = routed & (hit_slot >= 0)
    first_hit = first & hit
    first_miss = first & (hit_slot < 0)
    before = tl.where(first_miss, 1, 0)[None, :] * (pair[None, :] < owner[:, None]).to(tl.int32)
    place = tl.sum(before, axis=1)
    missing = _count(first_miss)
    routed_pairs = _count(routed)
    any_routed = (routed_pairs > 0).to(tl.int32)
    now = time + any_routed

    # Pin: a slot that is hit is closed before the first victim is looked for.
    victims = tl.where(first_miss, -1, -1)
    victim_keys = victims
    fills = missing * 0
    if POLICY != _STATIC:
        open_slots = exists
        for number in range(pairs):
            pinned = tl.sum(tl.where((pair == number) & hit, hit_slot + 1, 0), axis=0) - 1
            open_slots = open_slots & (slot != pinned)
        fills = tl.minimum(missing, _count(open_slots))

        # Victims: the smallest score, the lowest slot among equals. What closed slots hold does not change any more,
        # so that scores are worked out once.
        if POLICY == _CLOCK:
            marked = tl.load(ref + slot, mask=exists, other=0)
            marked = tl.where(exists & (open_slots == 0), 1, marked)
            is_open = open_slots.to(tl.int32)
            for number in range(fills):
                distance = tl.where(slot >= hand, slot - hand, slot - hand + slots)
                turn = tl.where(marked == 0, SLOTS + distance, 2 * SLOTS + distance)
                score32 = tl.where(is_open == 1, tl.where(key < 0, slot, turn), _CLOSED32)
                best = tl.min(score32, axis=0)
                by_hand = best >= SLOTS
                # From an unmarked slot on nothing is cleared; where all are marked, all are.
                passed = tl.where(best >= 2 * SLOTS, SLOTS, best - SLOTS)
                away = tl.where(best >= 2 * SLOTS, best - 2 * SLOTS, best - SLOTS)
                chosen = tl.where(by_hand, (hand + away) % slots, best)
                marked = tl.where(by_hand & (is_open == 1) & (distance < passed), 0, marked)
                hand = tl.where(by_hand, (chosen + 1) % slots, hand)
                marked = tl.where(slot == chosen, 1, marked)
                is_open = tl.where(slot == chosen, 0, is_open)
                victims = tl.where((place == number) & (routed & (hit_slot < 0)), chosen, victims)
        else:
            used_at = tl.load(last + slot, mask=exists, other=0)
            score = used_at
            if POLICY == _LFRU:
                score = (tl.load(uses + slot, mask=exists, other=0) << _SHIFT) // (now - used_at + 1)
            score = tl.where(open_slots, tl.where(key < 0, -1, score), _CLOSED64)
            for number in range(fills):
                chosen = tl.argmin(score, axis=0)
                score = tl.where(slot == chosen, _CLOSED64, score)
                victims = tl.where((place == number) & (routed & (hit_slot < 0)), chosen, victims)
        victim_keys = tl.load(slot_key + tl.where(victims >= 0, victims, 0), mask=victims >= 0, other=-1)
    filled = first_miss & (victims >= 0)
    evicted = filled & (victim_keys >= 0)
    fetches = tl.where(staging_row >= 0, missing, 0)
    staged = fetches - fills

    # A row for every pair: its slot, or the next staging row, or none where the bank is read in place.
    miss = routed & (hit_slot < 0)
    behind = tl.where(staging_row >= 0, staging_row + place - fills, -1)
    row = tl.where(hit, first_row + hit_slot, tl.where(victims >= 0, first_row + victims, behind))
    row = tl.where(routed, row, -1)

    # Store. Every warp loads for itself, so that none may run ahead and store what another has yet to load.
    tl.debug_barrier()
    tl.store(rows + pair, row, mask=given)
    tl.store(bank_rows + pair, tl.where(miss & (staging_row < 0), expert, -1), mask=given)
    fetch = tl.arange(0, _FETCHES)
    tl.store(src + fetch, tl.full((_FETCHES,), -1, tl.int32), mask=fetch >= fetches)
    tl.store(dst + fetch, tl.full((_FETCHES,), -1, tl.int32), mask=fetch >= fetches)
    fetched = first_miss & (staging_row >= 0)
    tl.store(src + place, expert, mask=fetched)
    tl.store(dst + place, row, mask=fetched)

    touched = tl.where(hit, hit_slot, tl.where(victims >= 0, victims, 0))
    changed = first_hit | filled
    tl.store(last + touched, now + tl.zeros((PAIRS,), tl.int64), mask=changed)
    tl.store(uses + touched, tl.where(hit, hit_uses + 1, 1), mask=changed)
    if POLICY == _CLOCK:
        tl.store(ref + slot, marked, mask=exists)
        tl.store(clock + 1, hand.to(tl.int64))
    else:
        tl.store(ref + touched, tl.full((PAIRS,), 1, tl.int32), mask=changed)
    tl.store(clock, now)
    # The key that leaves is none of this step's, those would have been hits: no two stores to one place.
    tl.store(key_slot + tl.where(evicted, victim_keys, 0), tl.full((PAIRS,), -1, tl.int32), mask=evicted)
    tl.store(key_slot + key_base + expert, victims, mask=filled)
    tl.store(slot_key + touched, key_base + expert, mask=filled)

    added = tl.where(counter == _STEPS, any_routed, 0)
    added = tl.where(counter == _ACCESSES, routed_pairs, added)
    added = tl.where(counter == _HITS, _count(hit), added)
    added = tl.where(counter == _UNIQUE, _count(first), added)
    added = tl.where(counter == _UNIQUE_HITS, _count(first_hit), added)
    added = tl.where(counter == _CLEAN_STEPS, any_routed * (missing == 0).to(tl.int32), added)
    added = tl.where(counter == _FILLS, fills, added)
    added = tl.where(counter == _EVICTIONS, _count(evicted), added)
    added = tl.where(counter == _STAGED, staged, added)
    added = tl.where(counter == _IN_PLACE, missing - fetches, added)
    added = tl.where(counter == _SENTINELS, _count(sentinel), added)
    added = tl.where(counter == _BAD_IDS, _count(bad), added)
    tl.store(counts + counter, counted + added, mask=counter < _COUNTERS)
    tl.store(skew + expert, seen + 1, mask=first)
    tl.store(bad_tokens + pair // top_k, tl.full((PAIRS,), 1, tl.uint8), mask=bad)


def width(number: int) -> int:
    """The power of two that holds ``number`` lanes."""
    return max(SMALLEST, 1 << (number - 1).bit_length())


def warps(slots: int) -> int:
    """Warps for a pool of ``slots``: 8 slots to a thread, so that what is known of them stays in registers."""
    return min(32, max(4, width(slots) // (32 * 8)))


def assign(
    ids: Tensor,
    top_k: int,
    experts: int,
    key_base: int,
    slot_key: Tensor,
    key_slot: Tensor,
    last: Tensor,
    uses: Tensor,
    ref: Tensor,
    clock: Tensor,
    policy: int,
    first_row: int,
    staging_row: int,
    rows: Tensor,
    bank_rows: Tensor,
    src: Tensor,
    dst: Tensor,
    counts: Tensor,
    skew: Tensor,
    bad_tokens: Tensor,
) -> None:
    """``bookkeeping.assign_numba`` on the device: the same arrays as tensors there, changed in place, nothing awaited.

    How many rows have to be fetched only the device knows: the lists ``src`` and ``dst`` end in -1. ValueError for more
    than 64 ids. Triton compiles on the first call for a policy and a number of slots and ids (as powers of two): call
    once before a graph is captured.
    """
    pairs, slots = ids.numel(), slot_key.numel()
    if pairs > FETCHES:
        raise ValueError(f"a small layer-step has at most {FETCHES} ids, got {pairs}")
    # Frozen slots keep what they have, which is what the static policy does.
    kept = Policy.STATIC if staging_row < 0 else Policy(policy)
    searched = slots if kept is not Policy.STATIC else SMALLEST
    with on_device(ids):
        launch: Any = assign_kernel[(1,)]
        launch(
            ids, pairs, top_k, experts, key_base, slots, slot_key, key_slot, last, uses, ref, clock,
            first_row, staging_row, rows, bank_rows, src, dst, counts, skew, bad_tokens,
            POLICY=int(kept), PAIRS=width(pairs), SLOTS=width(searched), num_warps=warps(searched),
        )  # fmt: skip
