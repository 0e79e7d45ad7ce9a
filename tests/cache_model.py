"""A plain model of the slot cache, written from docs/offload.md and not from the code: sets, dicts and sorting."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SMALL_PAIRS = 64


@dataclass
class Slot:
    key: int | None = None
    last: int = 0
    uses: int = 0
    ref: bool = False


@dataclass
class PoolModel:
    """The slots of a pool; a key is whatever names an expert in it."""

    slots: list[Slot]
    policy: str
    now: int = 0
    hand: int = 0

    def preload(self, keys: list[int]) -> None:
        """``keys``: hottest first; the coldest is in the first slot, and so the first to give way."""
        for slot, key in zip(self.slots, keys[::-1], strict=False):
            slot.key, slot.uses = key, 1

    def holder(self, key: int) -> int | None:
        found = [number for number, slot in enumerate(self.slots) if slot.key == key]
        assert len(found) <= 1, "an expert in two slots"
        return found[0] if found else None

    def victim(self, pinned: set[int]) -> int | None:
        if self.policy == "static":
            return None
        empty = [number for number, slot in enumerate(self.slots) if slot.key is None]
        if empty:
            return empty[0]
        loose = [number for number in range(len(self.slots)) if number not in pinned]
        if not loose:
            return None
        if self.policy == "lru":
            return min(loose, key=lambda number: (self.slots[number].last, number))
        if self.policy == "lfru":
            return min(loose, key=lambda number: (self._score(self.slots[number]), number))
        in_order = sorted(loose, key=lambda number: (number - self.hand) % len(self.slots))
        chosen = next((number for number in in_order if not self.slots[number].ref), None)
        passed = in_order if chosen is None else in_order[: in_order.index(chosen)]
        for number in passed:
            self.slots[number].ref = False
        chosen = in_order[0] if chosen is None else chosen
        self.hand = (chosen + 1) % len(self.slots)
        return chosen

    def _score(self, slot: Slot) -> int:
        return slot.uses * 2**32 // (self.now - slot.last + 1)


@dataclass
class LayerModel:
    """One layer over its pool. ``placed``: (layer, expert) -> ("slot", n), ("staged", n) or ("bank", expert)."""

    layer: int
    experts: int
    key_base: int
    pool: PoolModel
    staging: bool
    groups: bool
    split: str = "experts"
    counts: dict[str, Counter[str]] = field(default_factory=lambda: {"small": Counter(), "large": Counter()})
    skew: Counter[int] = field(default_factory=Counter)

    def step(self, ids: list[list[int]]) -> tuple[dict[int, tuple[str, int]], set[int]]:
        """Where each routed expert is found, and the tokens with bad ids."""
        flat = [number for token in ids for number in token]
        path = "small" if len(flat) <= SMALL_PAIRS else "large"
        counts = self.counts[path]
        routed = [number for number in flat if 0 <= number < self.experts]
        counts["sentinels"] += sum(number in (-1, self.experts) for number in flat)
        good = {*range(self.experts), -1, self.experts}
        counts["bad_ids"] += sum(number not in good for number in flat)
        bad_tokens = {token for token, numbers in enumerate(ids) if any(number not in good for number in numbers)}
        if not routed:
            return {}, bad_tokens
        wanted = list(dict.fromkeys(routed))
        held = {expert: self.pool.holder(self.key_base + expert) for expert in wanted}
        hits = {expert: slot for expert, slot in held.items() if slot is not None}
        missing = [expert for expert in wanted if expert not in hits]
        counts["steps"] += 1
        counts["accesses"] += len(routed)
        counts["hits"] += sum(expert in hits for expert in routed)
        counts["unique"] += len(wanted)
        counts["unique_hits"] += len(hits)
        counts["clean_steps"] += not missing
        self.skew.update(wanted)
        place = {expert: ("slot", slot) for expert, slot in hits.items()}
        if path == "large":
            place |= self._large(missing, ids, counts)
        else:
            place |= self._small(hits, missing, counts)
        return place, bad_tokens

    def _large(self, missing: list[int], ids: list[list[int]], counts: Counter[str]) -> dict[int, tuple[str, int]]:
        if not (self.staging and self.groups):
            counts["in_place"] += len(missing)
            return {expert: ("bank", expert) for expert in missing}
        if missing and self.split == "rows":
            ranges = self.ranges(set(missing), ids)
            counts["staged"] += sum(len(needed) for needed in ranges)
            counts["groups"] += len(ranges)
            return dict.fromkeys(missing, ("staged", -1))  # another place in each range
        counts["staged"] += len(missing)
        counts["groups"] += -(-len(missing) // 64)
        return {expert: ("staged", number % 64) for number, expert in enumerate(sorted(missing))}

    def ranges(self, missing: set[int], ids: list[list[int]]) -> list[set[int]]:
        """What each range of tokens needs: a token that would bring more than 64 together begins the next one."""
        found: list[set[int]] = [set()]
        for token in ids:
            needed = missing & set(token)
            if len(found[-1] | needed) > SMALL_PAIRS:
                found.append(set())
            found[-1] |= needed
        return found

    def _small(self, hits: dict[int, int], missing: list[int], counts: Counter[str]) -> dict[int, tuple[str, int]]:
        pool = self.pool
        pool.now += 1
        for slot in hits.values():
            state = pool.slots[slot]
            state.last, state.uses, state.ref = pool.now, state.uses + 1, True
        if not self.staging:
            counts["in_place"] += len(missing)
            return {expert: ("bank", expert) for expert in missing}
        pinned, place, staged = set(hits.values()), dict[int, tuple[str, int]](), 0
        for expert in missing:
            slot = pool.victim(pinned)
            if slot is None:
                place[expert] = ("staged", staged)
                staged += 1
                counts["staged"] += 1
                continue
            counts["fills"] += 1
            counts["evictions"] += pool.slots[slot].key is not None
            pool.slots[slot] = Slot(self.key_base + expert, pool.now, 1, ref=True)
            pinned.add(slot)
            place[expert] = ("slot", slot)
        return place
