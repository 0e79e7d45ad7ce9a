"""One request to an engine and its answer back: nothing is said to the client before the engine has said something.

Headers wait for the first byte of the answer. A death before it is a 502, a silence a 504; after it, one error frame
and a broken connection, so that no client takes what came for a whole answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TypeVar, cast

import httpx
from starlette.types import Receive, Send

from soakrig.engine.gateway import errors
from soakrig.engine.gateway.body import Json, glance, write
from soakrig.engine.gateway.capture import Captures, Exchange
from soakrig.engine.gateway.counters import Counters
from soakrig.engine.gateway.errors import GatewayError
from soakrig.engine.gateway.outgoing import Outgoing
from soakrig.engine.gateway.packed import PackedLook
from soakrig.engine.gateway.reply import Reply
from soakrig.engine.gateway.stream import DONE, EventCutter, EventTooLongError, payload, split_events
from soakrig.engine.gateway.transport import PassingTransport
from soakrig.engine.gateway.upstream import Upstream

T = TypeVar("T")
MAX_ANSWER = 64 << 20
"""Bytes of an answer that is not streamed."""
CONNECT_S = 10.0
ASK_S = 5.0
"""How long a small question beside the load may take."""
TAIL = 64
SHOWN = 200
ERROR = b"error"
CUT = "the connection ended before the {}, and no length was stated"
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
_REQUEST_ONLY = frozenset({b"host", b"content-length", b"expect"})


@dataclass(frozen=True)
class Waits:
    """Seconds. ``stall``: silence in the middle of an answer, and how long before it an engine may fail to answer
    ``/health`` too; ``first_byte``: most that a living engine may take until the answer begins."""

    stall: float = 120.0
    first_byte: float = 1800.0


class Proxy:
    """The engines' side. One connection a request, so that a refusal is the engine's and never a stale connection's."""

    def __init__(self, counters: Counters, waits: Waits, captures: Captures | None = None) -> None:
        self._counters, self._waits, self._captures = counters, waits, captures
        self._transport = PassingTransport(CONNECT_S)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def ask(self, upstream: Upstream, path: str, body: bytes | None = None) -> httpx.Response | None:
        """A small question (POST where it has a body) with a deadline; the answer read whole, None where none came."""
        with contextlib.suppress(GatewayError):
            await upstream.settle()
        if not upstream.url:
            return None
        headers = [(b"content-type", b"application/json")] if body is not None else []
        if upstream.api_key:
            headers.append((b"authorization", f"Bearer {upstream.api_key}".encode()))
        try:
            async with asyncio.timeout(min(ASK_S, self._waits.stall)):
                response = await self._send("POST" if body is not None else "GET", upstream.url + path, headers, body)
                try:
                    await response.aread()
                finally:
                    await response.aclose()
        except (httpx.HTTPError, OSError):  # TimeoutError is an OSError
            return None
        return response

    async def ask_body(self, upstream: Upstream, path: str) -> bytes | None:
        """The body of a 200 to ``ask``."""
        response = await self.ask(upstream, path)
        return response.content if response is not None and response.status_code == 200 else None

    async def count_tokens(self, upstream: Upstream, fields: Json) -> int | None:
        """The tokens of a chat request's prompt by the engine's own ``/tokenize``; None where it has none."""
        names = ("model", "messages", "tools", "chat_template_kwargs")
        question = {name: fields[name] for name in names if fields.get(name) is not None}
        if "messages" not in question:
            return None
        response = await self.ask(upstream, "/tokenize", write(question))
        count = (glance(response.content) or {}).get("count") if response and response.status_code == 200 else None
        return count if type(count) is int else None

    async def relay(self, out: Outgoing, receive: Receive, send: Send, exchange: Exchange | None = None) -> str:
        """Send ``out`` and pass its answer on; what became of it, in a word. A client that goes away ends it."""
        name, began = out.upstream.name, time.monotonic()
        reply = Reply(send, exchange)
        in_flight = self._counters.in_flight.labels(name)
        in_flight.inc()
        work = asyncio.ensure_future(self._answer(out, reply))
        gone = asyncio.ensure_future(_disconnected(receive))
        outcome = "client_gone"
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                outcome = work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            in_flight.dec()
            if out.editor is not None:
                out.editor.close()
                self._counters.remembered.labels(name).set(len(out.upstream.memory))
            self._counters.requests.labels(name, out.path, outcome).inc()
            if exchange is not None and self._captures is not None:
                exchange.outcome, exchange.seconds = outcome, time.monotonic() - began
                if not await self._captures.keep(exchange):
                    self._counters.policy.labels(name, "capture", "lost").inc()
        return outcome

    async def _answer(self, out: Outgoing, reply: Reply) -> str:
        try:
            deadline = asyncio.get_running_loop().time() + self._waits.first_byte
            response = await self._open(out, out.body, deadline)
            if response.status_code == 400 and out.unraised is not None:
                await response.aclose()
                self._counters.policy.labels(out.upstream.name, "min_output_tokens", "undone").inc()
                response = await self._open(out, out.unraised, deadline)
            try:
                kind = response.headers.get("content-type", "").strip().lower()  # RFC 9110, 8.3.1: in any case
                if response.status_code == 200 and kind.startswith("text/event-stream"):
                    return await self._stream(out, response, reply, deadline)
                return await self._whole(out, response, reply, deadline)
            finally:
                await response.aclose()
        except GatewayError as error:
            await reply.fail(error, out.path)
            return error.kind

    async def _open(self, out: Outgoing, body: bytes, deadline: float) -> httpx.Response:
        """The head of the answer."""
        up = out.upstream
        headers = passed_on(out.headers, _REQUEST_ONLY)
        if out.editor is not None:
            headers = [
                *((k, v) for k, v in headers if k.lower() != b"accept-encoding"),
                (b"accept-encoding", b"identity"),
            ]
        content = body if out.method == "POST" else None
        url = f"{up.url}{out.path}{'?' + out.query if out.query else ''}"
        try:
            return await self._patient(out, self._send(out.method, url, headers, content), deadline)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise await up.absent(_short(error)) from error
        except httpx.HTTPError as error:
            raise errors.died(up.name, up.url, _short(error)) from error

    async def _send(
        self, method: str, url: str, headers: list[tuple[bytes, bytes]], content: bytes | None
    ) -> httpx.Response:
        # Straight to the transport: httpx's client would add headers of its own, keep cookies and decode bodies.
        return await self._transport.handle_async_request(httpx.Request(method, url, headers=headers, content=content))

    async def _patient(self, out: Outgoing, work: Awaitable[T], deadline: float) -> T:
        """Wait for the beginning of an answer: up to the deadline, as long as the engine answers ``/health``."""
        task = asyncio.ensure_future(work)
        loop, up = asyncio.get_running_loop(), out.upstream
        try:
            while True:
                left = deadline - loop.time()
                done, _ = await asyncio.wait({task}, timeout=max(0.0, min(self._waits.stall, left)))
                if done:
                    return task.result()
                if loop.time() >= deadline:
                    raise errors.stalled(up.name, up.url, f"no byte of an answer within {self._waits.first_byte:g} s")
                health = await self.ask(up, "/health")
                if task.done():
                    return task.result()
                if health is None or health.status_code >= 500:
                    said = "does not answer" if health is None else f"answers {health.status_code}"
                    why = f"no byte of an answer for {self._waits.stall:g} s, and /health {said}"
                    raise errors.stalled(up.name, up.url, why)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _next(
        self, out: Outgoing, chunks: AsyncIterator[bytes], begun: bool, deadline: float, done: bool = False
    ) -> bytes | None:
        """The next bytes; None at the end, which a break or a silence after the terminator is too."""
        up = out.upstream
        try:
            if not begun:
                return await self._patient(out, _step(chunks), deadline)
            async with asyncio.timeout(self._waits.stall):
                return await _step(chunks)
        except TimeoutError as error:
            if done:
                return None
            raise errors.stalled(up.name, up.url, f"no byte for {self._waits.stall:g} s, connection open") from error
        except httpx.HTTPError as error:
            if done:
                return None
            raise errors.died(up.name, up.url, _short(error), begun=begun) from error

    async def _stream(self, out: Outgoing, response: httpx.Response, reply: Reply, deadline: float) -> str:
        up, began = out.upstream, time.monotonic()
        look = _packed(response)
        packed = look is not None
        editor = None if packed else out.editor
        drop = frozenset({b"content-length"}) if editor is not None else frozenset[bytes]()
        reply.head(200, passed_on(response.headers.raw, drop), packed=packed)
        chunks = aiter(cast(httpx.AsyncByteStream, response.stream))
        cutter, held, tail, real, failed = EventCutter(), b"", b"", False, False
        while (chunk := await self._next(out, chunks, reply.started, deadline, DONE in tail)) is not None:
            if look is not None:
                held += chunk
                if not real:
                    look.feed(chunk)
                    real = look.blind or any(_is_real(event) for event in split_events(look.text))
                    if not real:
                        continue
                data, held = held, b""
            else:
                try:
                    data = cutter.whole(chunk)
                except EventTooLongError as error:
                    raise errors.died(up.name, up.url, str(error), begun=reply.started) from error
                if not data:
                    continue
                tail = (tail + data)[-TAIL:]
                real = real or any(_is_real(event) for event in split_events(data))
                failed = failed or (ERROR in data and any(_says_error(payload(one)) for one in split_events(data)))
                if not reply.started:
                    # A terminator with nothing before it is no answer; a comment is the engine's byte and goes on.
                    held += data
                    if not real and _only_terminators(held):
                        continue
                    data, held = held, b""
            if not reply.started:
                self._first_byte(out, began)
            await reply.write(editor.feed(data) if editor is not None else data)
        rest = cutter.rest()
        if not real and not _is_real(rest):
            what = "only the terminator" if held and not packed else "a stream without an event"
            raise errors.empty(up.name, up.url, what + (f", only {rest[:SHOWN]!r}" if rest.strip() else ""))
        whole = packed or DONE in (tail + rest)[-TAIL:] or out.path == "/v1/responses"
        if not whole and not _has_length(response):
            raise errors.died(up.name, up.url, CUT.format("terminator"), begun=reply.started)
        await reply.write(editor.end(held + rest) if editor is not None else held + rest)
        await reply.end()
        return "engine_error" if failed else "ok" if whole else "unterminated"

    async def _whole(self, out: Outgoing, response: httpx.Response, reply: Reply, deadline: float) -> str:
        up, began = out.upstream, time.monotonic()
        chunks = aiter(cast(httpx.AsyncByteStream, response.stream))
        parts: list[bytes] = []
        size = 0
        while (chunk := await self._next(out, chunks, bool(parts), deadline)) is not None:
            parts.append(chunk)
            size += len(chunk)
            if size > MAX_ANSWER:
                text = f"the engine {up.name} at {up.url} answered more than {MAX_ANSWER} bytes in one piece"
                raise GatewayError(502, "engine_answer_too_long", text)
        body, status = b"".join(parts), response.status_code
        self._first_byte(out, began)
        if status == 200 and out.generates:
            self._refuse_no_answer(up, response, body)
        headers = passed_on(response.headers.raw)
        if status == 200 and out.editor is not None and "content-encoding" not in response.headers:
            edited = out.editor.whole(body)
            if edited is not body:
                headers = [(k, v) for k, v in headers if k.lower() != b"content-length"]
                headers.append((b"content-length", b"%d" % len(edited)))
                body = edited
        if status == 503 and "retry-after" not in response.headers:
            headers.append((b"retry-after", b"%d" % errors.RETRY_AFTER_S))
        reply.head(status, headers)
        await reply.write(body, start=True)
        await reply.end()
        if status == 200 and out.generates and ERROR in body and _says_error(body):
            return "engine_error"
        return "ok" if status < 400 else f"status_{status // 100}xx"

    def _first_byte(self, out: Outgoing, began: float) -> None:
        if out.generates:
            self._counters.first_byte.labels(out.upstream.name).observe(time.monotonic() - began)

    @staticmethod
    def _refuse_no_answer(up: Upstream, response: httpx.Response, body: bytes) -> None:
        """Raises GatewayError for the body of a 200 that is empty, or was plainly cut off."""
        look = _packed(response)
        if look is not None:
            look.feed(body)
            if look.blind:
                return
            body = look.text
        if not body.strip():
            raise errors.empty(up.name, up.url, "an empty body")
        if _only_terminators(body):
            raise errors.empty(up.name, up.url, "only the terminator")
        if look is None and body[:1] == b"{" and not _has_length(response) and glance(body) is None:
            raise errors.died(up.name, up.url, CUT.format("end of its JSON"), begun=True)


def passed_on(
    headers: list[tuple[bytes, bytes]], drop: frozenset[bytes] = frozenset[bytes]()
) -> list[tuple[bytes, bytes]]:
    """Headers that go from one end to the other: all but those of the connection itself, and ``drop``."""
    named = {
        one.strip().lower() for name, value in headers if name.lower() == b"connection" for one in value.split(b",")
    }
    out = HOP_BY_HOP | named | drop
    return [(name, value) for name, value in headers if name.lower() not in out]


def _packed(response: httpx.Response) -> PackedLook | None:
    """A look into a compressed answer, None for one that is not."""
    encoding = response.headers.get("content-encoding", "identity")
    return None if encoding == "identity" else PackedLook(encoding)


def _has_length(response: httpx.Response) -> bool:
    """Whether HTTP itself tells the end of the body from a break. In HTTP/1.0 nothing but the closing does."""
    return any(name in response.headers for name in ("transfer-encoding", "content-length"))


def _says_error(data: bytes | None) -> bool:
    """Whether an event or a body is an error object: OpenAI's, vLLM's older one, or an event of the Responses API."""
    said = (glance(data) if data else None) or {}
    return bool(said.get("error")) or said.get("object") == "error" or said.get("type") in ("error", "response.failed")


def _is_real(event: bytes) -> bool:
    """Whether an event says anything: neither a comment, nor a heartbeat, nor the terminator."""
    text = (payload(event) or b"").strip()
    return bool(text) and text not in (DONE, b"{}")


def _only_terminators(data: bytes) -> bool:
    return all((payload(event) or b"").strip() == DONE for event in split_events(data))


async def _step(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


async def _disconnected(receive: Receive) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
