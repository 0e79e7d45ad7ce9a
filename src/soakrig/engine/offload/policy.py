"""Who gives way when a slot is needed: the replacement policies, as one compiled function.

Every policy takes a free slot first and never a pinned one (used in this very layer-step). Ties go to the lowest slot.
The Triton kernel in ``assign_kernel.py`` and the plain model in the tests follow the same rules.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from .jit import compiled


class Policy(IntEnum):
    """The replacement policies of a running engine; the offline optimum is in ``optimum.py``."""

    STATIC = 0
    """A fixed hot set from a profile: what is missing is never kept."""
    LRU = 1
    """The slot whose last use lies furthest back."""
    LFRU = 2
    """The slot with the fewest uses per step since its last use: ``uses / age``, in whole numbers."""
    CLOCK = 3
    """Second chance: a hand goes round, takes the first slot that was not used since it last came by."""

    @classmethod
    def named(cls, name: str) -> Policy:
        """The policy of a plan's name (``"lru"``)."""
        return cls[name.upper()]


NONE = -1
"""No slot may be taken: all are pinned, or the policy keeps what it has."""
LFRU_SHIFT = 32
"""Uses are scaled by two to this power before they are divided by the age, so that the score is a whole number: the
same on every device. Uses stay below 2**31: one a step."""
_STATIC = int(Policy.STATIC)
_LFRU = int(Policy.LFRU)
_CLOCK = int(Policy.CLOCK)


@compiled
def victim(policy: int, now: int, slot_key: Any, last: Any, uses: Any, ref: Any, clock: Any) -> int:
    """The slot to fill next, or ``NONE``. CLOCK clears ``ref`` and moves its hand (``clock[1]``) as it goes.

    ``slot_key`` int32, ``last``, ``uses`` int64, ``ref`` int32: [slots]; a slot is pinned when ``last`` is ``now``.
    """
    slots = slot_key.size
    if policy == _STATIC:
        return NONE
    for slot in range(slots):
        if slot_key[slot] < 0:
            return slot
    if policy == _CLOCK:
        start = clock[1]
        # Twice round: the first time clears what it passes, so that the second finds the first unpinned slot.
        for turn in range(2 * slots):
            slot = (start + turn) % slots
            if last[slot] == now:
                continue
            if ref[slot] == 0:
                clock[1] = (slot + 1) % slots
                return slot
            ref[slot] = 0
        return NONE
    best, best_score = NONE, 0
    for slot in range(slots):
        if last[slot] == now:
            continue
        score = (uses[slot] << LFRU_SHIFT) // (now - last[slot] + 1) if policy == _LFRU else last[slot]
        if best == NONE or score < best_score:
            best, best_score = slot, score
    return best
