"""Silence, on a driven clock: two minutes of it take milliseconds here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from soakrig.clock import FakeClock
from soakrig.soak.classify import classify
from soakrig.soak.client import TICK_S, ChatClient, Timeouts
from soakrig.soak.reply import Reply
from soakrig.soak.target import Target
from wire import loopback

LIMITS = Timeouts(connect=2.0, stall=120.0, first_byte=1200.0)


async def settled(condition: Callable[[], bool]) -> None:
    """Let real sockets catch up with the driven clock."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the loopback server did not get there")


class Stalling:
    """A client with one request in flight at a server that falls silent."""

    def __init__(
        self, handler: loopback.Handler, progressing: Callable[[float], bool | None] = lambda within_s: None
    ) -> None:
        self.clock, self.handler, self.progressing = FakeClock(), handler, progressing
        self.lags: list[float] = []

    async def __aenter__(self) -> Stalling:
        self._serving = loopback.serve(self.handler)
        url = await self._serving.__aenter__()
        self.client = ChatClient(Target(url, "m"), self.clock, LIMITS, self.progressing, self.lags.append)
        await self.client.__aenter__()
        self.reply = Reply()
        self.task = asyncio.create_task(self.client.send(b"{}", self.reply))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.client.__aexit__(None, None, None)
        await self._serving.__aexit__(None, None, None)

    async def seconds(self, seconds: float) -> bool:
        """Time passes, tick by tick; whether the turn is over."""
        await self.clock.advance(seconds)
        for _ in range(20):
            await asyncio.sleep(0)
        return self.task.done()


def test_a_stream_that_falls_silent_is_hung_after_the_limit_and_not_before() -> None:
    async def main() -> None:
        async with Stalling(loopback.stall) as s:
            await settled(lambda: s.reply.deltas == 5)
            assert not await s.seconds(119)
            assert await s.seconds(2)
            outcome = classify(s.reply)
            assert outcome.name == "hung"
            assert "after 6 events" in outcome.why

    asyncio.run(main())


def test_silence_before_the_first_byte_counts_as_well() -> None:
    async def main() -> None:
        async with Stalling(loopback.headers_then_silence) as s:
            await settled(lambda: s.reply.status == 200)
            assert not await s.seconds(119)
            assert await s.seconds(2)
            assert "before any data" in classify(s.reply).why

    asyncio.run(main())


def test_a_long_prefill_is_not_hung_while_the_engine_s_counters_move() -> None:
    moving = True

    async def main() -> None:
        nonlocal moving
        async with Stalling(loopback.headers_then_silence, lambda within_s: moving) as s:
            await settled(lambda: s.reply.status == 200)
            assert not await s.seconds(500)
            moving = False
            assert await s.seconds(1)
            assert classify(s.reply).name == "hung"

    asyncio.run(main())


def test_but_not_for_ever() -> None:
    async def main() -> None:
        async with Stalling(loopback.headers_then_silence, lambda within_s: True) as s:
            await settled(lambda: s.reply.status == 200)
            assert not await s.seconds(1199)
            assert await s.seconds(2)

    asyncio.run(main())


def test_a_call_that_the_parser_holds_back_is_not_hung_while_the_counters_move() -> None:
    async def main() -> None:
        async with Stalling(loopback.stall, lambda within_s: True) as s:
            await settled(lambda: s.reply.deltas == 5)
            assert not await s.seconds(1100)
            assert await s.seconds(101)

    asyncio.run(main())


def test_counters_that_may_move_for_another_stream_excuse_less() -> None:
    async def main() -> None:
        async with Stalling(loopback.stall, lambda within_s: True) as s:
            other = asyncio.create_task(s.client.send(b"{}"))
            await settled(lambda: s.reply.deltas == 5 and s.client.received() == 10)
            assert not await s.seconds(590)
            assert await s.seconds(20)
            await other

    asyncio.run(main())


def test_time_in_which_this_tool_was_suspended_does_not_count() -> None:
    async def main() -> None:
        async with Stalling(loopback.stall) as s:
            await settled(lambda: s.reply.deltas == 5)
            s.clock._now += 3600.0  # a suspended process: the clock goes on, nothing runs
            assert not await s.seconds(100)
            assert s.lags
            assert 3599 < s.lags[0] < 3600 + TICK_S
            assert await s.seconds(30)

    asyncio.run(main())


def test_bytes_start_the_count_again() -> None:
    go = asyncio.Event()

    async def drip(x: loopback.Exchange) -> None:
        await x.head()
        await x.chunk(loopback.ROLE)
        await go.wait()
        await x.chunk(loopback.delta(content="late"))
        await asyncio.Event().wait()

    async def main() -> None:
        async with Stalling(drip) as s:
            await settled(lambda: s.reply.events == 1)
            assert not await s.seconds(100)
            go.set()
            await settled(lambda: s.reply.deltas == 1)
            assert not await s.seconds(100)
            assert await s.seconds(25)

    asyncio.run(main())
