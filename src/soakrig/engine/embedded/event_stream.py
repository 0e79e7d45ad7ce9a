"""Answers that last: an event stream, and a JSON answer that is dropped when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .planted import ConnectionCutError

T = TypeVar("T")
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientGoneError(Exception):
    """The client closed the connection before the answer was there."""


class EventStream(Response):
    """Sends frames as they come. Headers go out at once; ``on_end`` runs however the stream ends.

    ConnectionCutError from ``frames`` closes the connection without the end of the chunked body.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        super().__init__()
        self._frames = frames
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        # An empty body message makes the server put the headers on the wire before the first token.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        except ConnectionCutError:
            return
        finally:
            for task in (pump, gone):
                task.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
            await self._frames.aclose()
            self._on_end()

    async def _pump(self, send: Send) -> None:
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class CutAnswer(Response):
    """A planted fault: a whole answer that stops in the middle of its body, the connection closed under it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"4096")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"id":"chatcmpl-', "more_body": True})


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """``work``'s result. Raises ClientGoneError (and cancels it) when the client disconnects first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
