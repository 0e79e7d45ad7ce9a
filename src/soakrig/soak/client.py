"""The streaming client: one turn is one HTTP/1.1 request on a connection of its own, read as raw bytes.

A connection of its own, so that a refusal is the engine's and never a stale keep-alive's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import httpx
import orjson

from soakrig.clock import Clock
from soakrig.soak.reply import Reply
from soakrig.soak.target import Target
from soakrig.soak.transport import AiohttpStreams, RawStream

TICK_S = 0.25
BODY_LIMIT = 64 << 10
MAX_BYTES = 64 << 20
SHARED = 5
"""Stall limits that a silent stream may take in mid-answer while the engine counts tokens, its own or others'."""
DRAIN_S = 2.0
"""How long a stream may stay open after its terminator: a late error would come now."""
ACCEPT = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
POST_S = 600.0
MAX_EVENTS = 200_000
"""Events of one turn beyond which a server is taken to ignore every limit and to go on for ever."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds. ``stall``: no token on an open connection, headers and keep-alives notwithstanding. While the engine's
    own counters move (``progressing``), the first token is waited for up to ``first_byte``; so is a later one of the
    only stream in flight, and one of several for five times ``stall``."""

    connect: float = 10.0
    stall: float = 120.0
    first_byte: float = 1800.0


@dataclass(slots=True)
class _Flight:
    """One request in flight, as the stall watch sees it."""

    reply: Reply
    timeout: asyncio.Timeout
    mark: tuple[int, bool, int] = (-1, False, 0)
    silent: float = 0.0

    def progress(self) -> tuple[int, bool, int]:
        """What moves only when the engine does: keep-alive comments and empty deltas are no progress."""
        reply = self.reply
        other = reply.size if reply.status is not None and reply.status != 200 else 0
        return reply.deltas, reply.finish_reason is not None, other


@dataclass
class ChatClient:
    """Sends request bodies to ``/v1/chat/completions`` and returns what came back. Never raises for what a server
    does; use it as an async context manager.

    ``progressing`` says whether the engine's counters have moved within so many seconds (None: cannot be told).
    The stall watch counts only time in which this tool was awake, so that a suspended tool finds nobody hung.
    """

    target: Target
    clock: Clock
    timeouts: Timeouts = field(default_factory=Timeouts)
    progressing: Callable[[float], bool | None] = lambda within_s: None
    on_lag: Callable[[float], None] = lambda seconds: None
    max_events: int = MAX_EVENTS
    flights: dict[int, _Flight] = field(default_factory=dict[int, _Flight])
    _http: httpx.AsyncClient | None = None
    _watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ChatClient:
        self._transport = AiohttpStreams(connect=self.timeouts.connect)
        self._headers = {"Content-Type": "application/json", **ACCEPT, **self.target.headers}
        self._http = httpx.AsyncClient(
            transport=self._transport, timeout=httpx.Timeout(None), trust_env=False, headers=self.target.headers
        )
        self._watch = asyncio.create_task(self._stall_watch(), name="stall-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        if self._http is not None:
            await self._http.aclose()

    async def send(self, body: bytes, reply: Reply | None = None, *, path: str = "/v1/chat/completions") -> Reply:
        """Send one body and read its answer to the end, into ``reply`` where the caller wants to look on.
        Cancellation ends the request and is passed on."""
        reply = Reply() if reply is None else reply
        reply.sent_at = self.clock.monotonic()
        try:
            async with asyncio.timeout(None) as timeout:
                self.flights[id(reply)] = _Flight(reply, timeout)
                await self._exchange(reply, body, path)
        except TimeoutError:
            silent = self.flights[id(reply)].silent
            what = "no byte" if reply.size == 0 else "no token"
            reply.finish("stalled", self.clock.monotonic(), f"{what} for {silent:.1f} s, connection open")
        except asyncio.CancelledError:
            reply.finish("cut_by_tool", self.clock.monotonic())
            raise
        finally:
            self.flights.pop(id(reply), None)
        return reply

    async def get(self, path: str, timeout: float = 5.0) -> httpx.Response | None:
        """A small GET beside the load; None when nothing answered in time."""
        assert self._http is not None
        try:
            async with asyncio.timeout(timeout):
                return await self._http.get(f"{self.target.base_url}{path}")
        except (httpx.HTTPError, aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return None

    async def post(self, path: str, data: Any, *, timeout: float = POST_S) -> httpx.Response | None:
        """A question beside the load whose answer comes whole: JSON there and back; None when nothing answered in
        ``timeout`` or the limit of a first byte. It may wait behind the load's own requests."""
        assert self._http is not None
        timeout = min(timeout, self.timeouts.first_byte)
        headers = {"Content-Type": "application/json", **self.target.headers}
        try:
            async with asyncio.timeout(timeout):
                url = f"{self.target.base_url}{path}"
                return await self._http.post(url, content=orjson.dumps(data), headers=headers)
        except (httpx.HTTPError, aiohttp.ClientError, OSError):
            return None

    def received(self) -> int:
        """Tokens that came in on all streams in flight: moves while the engine answers anybody."""
        return sum(flight.reply.deltas for flight in self.flights.values())

    async def _exchange(self, reply: Reply, body: bytes, path: str) -> None:
        monotonic = self.clock.monotonic
        try:
            # Straight to the transport and its raw stream: redirects, cookies and decoding have no place in a turn, and
            # cost as much as the rest of the client (benchmarks/client.py).
            stream = await self._transport.open(f"{self.target.base_url}{path}", self._headers, body)
            try:
                reply.status = stream.status
                if stream.status != 200:
                    await _read_body(reply, stream)
                else:
                    feed, read = reply.feed, stream.read
                    while chunk := await read():
                        feed(chunk, monotonic())
                        if reply.terminated or reply.malformed:
                            break
                        if reply.events > self.max_events or reply.size > MAX_BYTES:
                            what = f"{reply.events} events and {reply.size} bytes in one turn, and no end"
                            reply.finish("runaway", monotonic(), what)
                            return
                    if reply.terminated and not reply.malformed:
                        await self._drain(reply, stream)
            except (aiohttp.ClientError, OSError):
                if stream.status == 200:
                    reply.feed(stream.left(), monotonic())  # the last deltas of a broken stream are evidence
                raise
            finally:
                await stream.aclose()
            reply.finish("eof", monotonic())
        except httpx.ConnectError as error:
            reply.finish("refused", monotonic(), _short(error))
        except httpx.RemoteProtocolError as error:
            reply.malformed = f"{'no HTTP answer' if reply.status is None else 'broken HTTP'}: {_short(error)}"
            reply.finish("eof", monotonic())
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            reply.finish("reset" if reply.status is not None else "no_response", monotonic(), _short(error))

    async def _drain(self, reply: Reply, stream: RawStream) -> None:
        """After the terminator: what still comes is read, and a connection that stays open is left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while chunk := await stream.read():
                    reply.feed(chunk, self.clock.monotonic())

    async def _stall_watch(self) -> None:
        before = self.clock.monotonic()
        while True:
            await self.clock.sleep(TICK_S)
            now = self.clock.monotonic()
            passed = now - before
            before = now
            if passed > 4 * TICK_S:
                self.on_lag(passed - TICK_S)
                passed = TICK_S
            progressing = None
            for flight in list(self.flights.values()):
                mark = flight.progress()
                if mark != flight.mark or flight.reply.terminated:
                    flight.mark, flight.silent = mark, 0.0
                    continue
                flight.silent += passed
                if flight.silent < self.timeouts.stall:
                    continue
                # A long prefill, or a tool call that the engine's parser holds back until it is whole. With several
                # streams in flight the counters may move for the others, so that less is allowed.
                mine = flight.reply.deltas == 0 or len(self.flights) == 1
                limit = self.timeouts.first_byte if mine else SHARED * self.timeouts.stall
                if flight.silent < min(limit, self.timeouts.first_byte):
                    progressing = self.progressing(self.timeouts.stall) if progressing is None else progressing
                    if progressing:
                        continue
                if not flight.timeout.expired():
                    flight.timeout.reschedule(asyncio.get_running_loop().time())


async def _read_body(reply: Reply, stream: RawStream) -> None:
    parts: list[bytes] = []
    while chunk := await stream.read():
        parts.append(chunk)
        reply.size += len(chunk)
        if reply.size > BODY_LIMIT:
            break
    reply.body = b"".join(parts)[:BODY_LIMIT]


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
