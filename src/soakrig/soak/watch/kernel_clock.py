"""From the kernel log's clock to ours.

A record carries microseconds of the kernel's ``local_clock``, which is near CLOCK_MONOTONIC but not equal to it (they
drift apart by parts per million, and neither runs in suspend). A record that is read live came at most the reading's
latency ago, so ``monotonic() - record time`` is the offset of the two clocks plus that latency; the smallest one seen
lately is the best guess of the offset, and converts the rest.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from soakrig.clock import Clock

KEPT_S = 600.0
"""Offsets older than this are forgotten, so that drift over a long soak does not pile up."""
UNSEEN_S = 0.5
"""Error assumed for the offset (then taken as 0) before any live record; 4.5 ms was measured after 30 min of uptime."""


class Moment(NamedTuple):
    """Epoch seconds, monotonic seconds, and how far both may be off."""

    time: float
    mono: float
    error_s: float


class KernelClock:
    """Converts times of records; call ``drained`` whenever the source had nothing more to give."""

    def __init__(self, clock: Clock, prompt: bool) -> None:
        """``prompt``: the source hands records out at once, so one that comes now is younger than the last drain."""
        self._clock = clock
        self._prompt = prompt
        self._offsets: deque[tuple[float, float]] = deque()  # (when, offset), offsets rising: a window's minimum
        self._spread = 0.0
        self._drained = clock.monotonic()

    def drained(self) -> None:
        """Every record older than now has been read."""
        self._drained = self._clock.monotonic()

    def live(self, kernel_us: int | None) -> Moment:
        """The moment of a record that came since the last drain."""
        now, wall = self._clock.monotonic(), self._clock.time()
        gap = max(now - self._drained, 0.0)
        if kernel_us is None:
            return Moment(wall, now, gap)
        offset = now - kernel_us / 1e6
        self._note(now, offset)
        mono = kernel_us / 1e6 + self._offsets[0][1]  # never after now: the smallest offset is at most this one
        if self._prompt:
            mono = max(mono, self._drained)
            return Moment(wall - (now - mono), mono, gap)
        return Moment(wall - (now - mono), mono, max(gap, self._spread))

    def old(self, kernel_us: int) -> Moment:
        """The moment of a record of this boot that was there before the watch began."""
        now, wall = self._clock.monotonic(), self._clock.time()
        offset, error = (self._offsets[0][1], self._spread) if self._offsets else (0.0, UNSEEN_S)
        mono = kernel_us / 1e6 + offset
        return Moment(wall - (now - mono), mono, error)

    def _note(self, now: float, offset: float) -> None:
        while self._offsets and self._offsets[-1][1] >= offset:
            self._offsets.pop()
        self._offsets.append((now, offset))
        while self._offsets[0][0] < now - KEPT_S:
            self._offsets.popleft()
        self._spread = offset - self._offsets[0][1]
