"""Which load to launch next: a pure function of what was seen, so that a search goes on where it was after any end.

Axis by axis the smallest load is tried first, then the geometric middle between what was lost and what was kept, until
they lie within a quarter of each other. Later evidence may turn an earlier decision round (a load that was kept and
then stays clean); the path is walked anew every time and follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from soakrig.bisect.minimize.decision import FAULTS, Demand, Seen, State
from soakrig.bisect.minimize.shape import LEAST, SIZES, STRUCTURE, WORDS, Axis, Shape

WITHIN = 0.2
"""What is kept is at most this share above what could still be the smallest."""
DOUBT, SURE = 2, 12
"""Faults of a load that leave a doubt, and faults of its reference that remove it."""
GIVE_UP, GIVE_UP_AT = 24, 200
"""Times the run's turns without a fault after which the run's own load is given up, and the least of it in turns."""

What = Literal["launch", "minimal", "not again"]


@dataclass(frozen=True)
class Trial:
    """A load that was tried on the way: what for, and what came of it."""

    shape: Shape
    axis: Axis
    state: State
    seen: Seen


@dataclass
class Path:
    """How far the search has come. ``best``: the smallest load that is kept. ``reference``: the arm that it is held
    against. ``next``: what to launch, None at the end. ``turns``: cap of that launch, all conversations together."""

    what: What
    best: Shape
    reference: Shape
    next: Shape | None = None
    turns: int = 0
    why: str = ""
    trials: list[Trial] = field(default_factory=list[Trial])


@dataclass
class _NeedsLaunchError(Exception):
    shape: Shape
    turns: int
    why: str


@dataclass
class Search:
    """``whole``: the run's own shape; ``turns``: how many it had sent when the fault came. ``least_context``: by the
    number of tools. ``known``: what was seen of each shape. ``refused``: why one cannot be used, empty where it can."""

    whole: Shape
    turns: int
    least_context: Callable[[int], int]
    demand: Demand
    known: Mapping[Shape, Seen]
    refused: Callable[[Shape], str] = lambda shape: ""

    def seen(self, shape: Shape) -> Seen:
        """Of one shape."""
        return self.known.get(shape, Seen())

    def walk(self) -> Path:
        """From the beginning as far as the evidence goes."""
        path = Path("launch", self.whole, self.whole)
        try:
            if not self._measure(
                self.whole, "how often the run's own load faults", max(GIVE_UP * self.turns, GIVE_UP_AT)
            ):
                turns = f"no fault in {self.seen(self.whole).exposure:g} turns of its load"
                path.what, path.why = "not again", self.refused(self.whole) or turns
                return path
            for axis in STRUCTURE:
                self._shrink(path, axis)
            self._measure(path.best, "how often what is left of it faults")
            path.reference = path.best
            for axis in SIZES:
                self._shrink(path, axis)
            self._confirm(path)
        except _NeedsLaunchError as need:
            path.next, path.turns, path.why = need.shape, need.turns, need.why
            return path
        path.what, path.why = "minimal", "every axis is at its smallest"
        return path

    def _measure(self, shape: Shape, why: str, give_up: float = math.inf) -> bool:
        seen = self.seen(shape)
        if seen.faults >= FAULTS:
            return True
        if self.refused(shape):
            return False
        if not seen.faults and seen.exposure >= give_up:
            return False
        cap = max(20, 4 * self.turns)
        raise _NeedsLaunchError(shape, cap, f"{why}: {seen.faults} of {FAULTS} faults so far")

    def _shrink(self, path: Path, axis: Axis) -> None:
        """Bring ``path.best`` down along an axis."""
        least = self.least_context(path.best.tools) if axis == "context" else LEAST[axis]
        high = path.best.get(axis)
        if high <= least:
            return
        if self._tried(path, axis, least):
            path.best = path.best.with_(axis, least)
            return
        low = least  # lost
        start = path.best
        while high > (low + 1) * (1.0 + WITHIN):
            middle = min(max(round(math.sqrt(max(low, 1) * high)), low + 1), high - 1)
            if self._tried(path, axis, middle):
                high = middle
                path.best = start.with_(axis, high)
            else:
                low = middle

    def _tried(self, path: Path, axis: Axis, value: int) -> bool:
        """Whether the best load so far may have that value. Asks for launches until that is known."""
        shape = path.best.with_(axis, value)
        reference, seen = self.seen(path.reference), self.seen(shape)
        state: State = "lost" if self.refused(shape) else self.demand.state(reference, seen)
        if state == "open":
            self._surer(path, seen)
            raise _NeedsLaunchError(
                shape, self._cap(path, shape), f"{WORDS[axis]}: {value} in place of {path.best.get(axis)}"
            )
        path.trials.append(Trial(shape, axis, state, seen))
        return state == "kept"

    def _confirm(self, path: Path) -> None:
        """As many faults of the last load as its reference had, and still no doubt."""
        seen, reference = self.seen(path.best), self.seen(path.reference)
        if seen.faults < FAULTS or self.demand.state(reference, seen) == "open":
            self._surer(path, seen)
            why = f"the result checked: {seen.faults} of {FAULTS} faults so far"
            raise _NeedsLaunchError(path.best, self._cap(path, path.best), why)

    def _surer(self, path: Path, seen: Seen) -> None:
        """A load that faults, and seldom, leaves a doubt: perhaps it is the reference that faulted often by luck."""
        reference = self.seen(path.reference)
        expected = seen.exposure * reference.faults / reference.exposure
        if seen.faults >= DOUBT and seen.faults < self.demand.useful * expected and reference.faults < SURE:
            why = f"in doubt of how often it faults itself: {reference.faults} of {SURE} faults so far"
            raise _NeedsLaunchError(path.reference, max(20, 4 * self.turns), why)

    def _cap(self, path: Path, shape: Shape) -> int:
        """Enough that a clean launch decides, and that every request of the load is sent."""
        clean = self.demand.clean_until(self.seen(path.reference), self.seen(shape))
        return max(clean, shape.requests * shape.conversations)
