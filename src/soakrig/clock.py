"""The real clock and a driven one: what waits takes a ``Clock``, so that eight hours are tested in milliseconds."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Time as the tool sees it. ``monotonic`` is for durations, ``time`` (seconds since the epoch) for people."""

    def monotonic(self) -> float: ...

    def time(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait in a thread until ``event`` is set or ``seconds`` are over; True when it was set."""
        ...


class RealClock:
    """The machine's clock."""

    monotonic = staticmethod(time.monotonic)  # asked once a chunk
    time = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)


class FakeClock:
    """A clock that moves only when told to.

    ``advance`` wakes, in order, every sleeper whose time has come, and lets woken tasks run between two wake-ups; so
    a task that sleeps again inside the window is woken again inside it.
    """

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._serial = 0

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        self._serial += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._serial, future))
        await future

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Never blocks: the time passes at once."""
        if event.is_set():
            return True
        self._now += seconds
        return event.is_set()

    async def advance(self, seconds: float) -> None:
        """Move time on by ``seconds``, waking sleepers as their time comes."""
        target = self._now + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= target:
            when, _, future = heapq.heappop(self._sleepers)
            self._now = max(self._now, when)
            if not future.done():
                future.set_result(None)
            await _settle()
        self._now = target
        await _settle()


async def _settle(rounds: int = 20) -> None:
    """Give tasks that are ready the chance to run up to their next wait."""
    for _ in range(rounds):
        await asyncio.sleep(0)
