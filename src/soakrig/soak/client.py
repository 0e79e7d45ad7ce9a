"""The streaming client: one turn is one HTTP/1.1 request on a connection of its own, read as raw bytes.

A connection of its own, so that a refusal is the engine's and never a stale keep-alive's. httpx speaks over aiohttp's
transport, whose parser is C (see ``benchmarks/client.py`` for what that is worth).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from soakrig.clock import Clock
from soakrig.soak.reply import Reply
from soakrig.soak.target import Target

TICK_S = 0.25
BODY_LIMIT = 64 << 10
MAX_EVENTS = 200_000
"""Events of one turn beyond which a server is taken to ignore every limit and to go on for ever."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds. ``stall``: silence on an open connection, headers and first byte included. While the engine's own
    counters move (``progressing``), silence before the first byte is allowed up to ``first_byte``: a long prefill."""

    connect: float = 10.0
    stall: float = 120.0
    first_byte: float = 1800.0


@dataclass(slots=True)
class _Flight:
    """One request in flight, as the stall watch sees it."""

    reply: Reply
    timeout: asyncio.Timeout
    size: int = -1
    silent: float = 0.0


@dataclass
class ChatClient:
    """Sends request bodies to ``/v1/chat/completions`` and returns what came back. Never raises for what a server
    does; use it as an async context manager.

    ``progressing`` says whether the engine's counters have moved within the stall limit (None: cannot be told).
    The stall watch counts only time in which this tool was awake, so that a suspended tool finds nobody hung.
    """

    target: Target
    clock: Clock
    timeouts: Timeouts = field(default_factory=Timeouts)
    progressing: Callable[[], bool | None] = lambda: None
    on_lag: Callable[[float], None] = lambda seconds: None
    max_events: int = MAX_EVENTS
    flights: dict[int, _Flight] = field(default_factory=dict[int, _Flight])
    _http: httpx.AsyncClient | None = None
    _watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ChatClient:
        def session() -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_no_delay_socket)
            return aiohttp.ClientSession(connector=connector, read_bufsize=1 << 18)

        self._http = httpx.AsyncClient(
            transport=AiohttpTransport(client=session, trust_env=False),
            timeout=httpx.Timeout(None, connect=self.timeouts.connect),
            trust_env=False,
            headers={"Content-Type": "application/json", "Accept": "text/event-stream", **self.target.headers},
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
            reply.finish("stalled", self.clock.monotonic(), f"no byte for {silent:.1f} s, connection open")
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
            return await self._http.get(f"{self.target.base_url}{path}", timeout=timeout)
        except (httpx.HTTPError, OSError):
            return None

    async def _exchange(self, reply: Reply, body: bytes, path: str) -> None:
        assert self._http is not None
        monotonic = self.clock.monotonic
        try:
            async with self._http.stream("POST", f"{self.target.base_url}{path}", content=body) as response:
                reply.status = response.status_code
                reply.content_type = response.headers.get("content-type", "")
                if response.status_code != 200:
                    await _read_body(reply, response)
                else:
                    feed = reply.feed
                    async for chunk in response.aiter_raw():
                        feed(chunk, monotonic())
                        if reply.events > self.max_events:
                            reply.finish("runaway", monotonic(), f"more than {self.max_events} events in one turn")
                            return
            reply.finish("eof", monotonic())
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            ended = "refused" if reply.status is None and _never_connected(error) else "no_response"
            if reply.status is not None:
                ended = "reset"
            reply.finish(ended, monotonic(), _short(error))
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            ended = "reset" if reply.status is not None else "no_response"
            if reply.status is None and _is_bad_http(error):
                reply.malformed = f"no HTTP answer: {_short(error)}"
                ended = "eof"
            reply.finish(ended, monotonic(), _short(error))

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
                if flight.reply.size != flight.size:
                    flight.size, flight.silent = flight.reply.size, 0.0
                    continue
                flight.silent += passed
                if flight.silent < self.timeouts.stall:
                    continue
                if flight.reply.first_byte_at is None and flight.silent < self.timeouts.first_byte:
                    progressing = self.progressing() if progressing is None else progressing
                    if progressing:
                        continue
                flight.timeout.reschedule(asyncio.get_running_loop().time())
                flight.size = -2


async def _read_body(reply: Reply, response: httpx.Response) -> None:
    parts: list[bytes] = []
    size = 0
    async for chunk in response.aiter_bytes():
        parts.append(chunk)
        size += len(chunk)
        reply.size = size
        if size > BODY_LIMIT:
            break
    reply.body = b"".join(parts)[:BODY_LIMIT]


def _no_delay_socket(info: tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]) -> socket.socket:
    family, kind, protocol, _, _ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _never_connected(error: BaseException) -> bool:
    """The transport maps every broken connection to ConnectTimeout; the cause tells a refusal from a later break."""
    return isinstance(error.__cause__, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))


def _is_bad_http(error: BaseException) -> bool:
    return isinstance(error, aiohttp.ClientResponseError) or isinstance(error.__cause__, aiohttp.ClientResponseError)


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error.__cause__ or error).__name__
