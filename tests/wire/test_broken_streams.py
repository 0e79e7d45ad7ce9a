"""What an engine wrote just before its connection broke is in the record, even where the tool was busy meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from soakrig.clock import RealClock
from soakrig.soak.client import ChatClient
from soakrig.soak.target import Target
from soakrig.soak.transport import AiohttpStreams, RawStream
from wire import loopback


async def open_and_look_away(self: AiohttpStreams, url: str, headers: Mapping[str, str], body: bytes) -> RawStream:
    """A tool that does something else until all has arrived and the connection is gone."""
    stream = RawStream(await self._request("POST", url, headers, body))
    async with asyncio.timeout(10):
        while stream._response.content.exception() is None:
            await asyncio.sleep(0)
    return stream


def test_deltas_that_came_with_the_break_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AiohttpStreams, "open", open_and_look_away)

    async def main() -> None:
        async with (
            loopback.serve(loopback.cut_without_last_chunk) as url,
            ChatClient(Target(url, "m"), RealClock()) as client,
        ):
            reply = await client.send(b"{}")
        assert (reply.status, reply.ending, reply.terminated) == (200, "reset", False)
        assert (reply.deltas, reply.text) == (5, "the0 engine1 reads2 the3 log4 ")

    asyncio.run(main())
