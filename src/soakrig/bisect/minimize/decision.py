"""Whether a smaller load still faults often enough: asked after every launch, until it is known.

``Demand.useful`` is the least share of the reference's hazard a turn that is worth keeping. A load is LOST when so few
faults would be improbable (``error``) at just that share, by the bisect's exact test, which carries the uncertainty of
the reference's own few faults. It is KEPT at its second fault if it faults at that share by its own figures; one that
stays in between is judged at the latest after ``MOST``, by a little over half of it.

How often that errs depends on what a load does in truth; docs/minimizing.md has figures. A load that is LOST by error
leaves the result a step too large. One that is KEPT by error is found by the check at the end, which asks the smallest
load for as many faults as its reference had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from soakrig.bisect.statistics import Cell, chance_of_so_few

State = Literal["kept", "lost", "open"]
FAULTS = 5
"""Faults of a reference before anything is held against it, and of the load that is shown in the end."""
LEAST_FAULTS = 2
"""One fault may be luck."""
MOST = 40.0
"""Exposure, in mean exposures between faults of the reference, after which nobody waits any longer."""


@dataclass(frozen=True)
class Seen:
    """Faults in so much exposure, in turns."""

    faults: int = 0
    exposure: float = 0.0


@dataclass(frozen=True)
class Demand:
    """``useful``: share of the reference's hazard a turn. ``error``: chance that a load of just that share is lost."""

    useful: float = 0.5
    error: float = 0.02

    def chance(self, reference: Seen, seen: Seen) -> float:
        """Of so few faults at the share that is demanded."""
        cell = Cell(reference.faults, reference.exposure, seen.faults, seen.exposure)
        return chance_of_so_few([cell], self.useful)

    def state(self, reference: Seen, seen: Seen) -> State:
        """What is known of a load."""
        if seen.exposure <= 0.0:
            return "open"
        if self.chance(reference, seen) <= self.error:
            return "lost"
        expected = seen.exposure * reference.faults / reference.exposure
        if seen.faults >= LEAST_FAULTS and seen.faults >= self.useful * expected:
            return "kept"
        if expected < MOST:
            return "open"
        return "kept" if seen.faults >= max(LEAST_FAULTS, 0.6 * self.useful * expected) else "lost"

    def clean_until(self, reference: Seen, seen: Seen) -> int:
        """Turns more without a fault after which a load that is open is decided, and one that is kept is lost; at
        least 1."""
        undecided = ("open", "kept") if self.state(reference, seen) == "kept" else ("open",)

        def undecided_after(turns: int) -> bool:
            return self.state(reference, Seen(seen.faults, seen.exposure + turns)) in undecided

        high = 1
        while undecided_after(high):
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if undecided_after(middle) else (low, middle)
        return high


def turns_until(hazard: float, chance: float = 0.95) -> int:
    """Turns in which a fault of that hazard comes with that chance."""
    return max(1, math.ceil(math.log(1.0 - chance) / math.log1p(-min(hazard, 0.999))))
