"""A loopback server that answers chat requests with bytes of our choosing: every way in which a 200 can be empty.

Raw asyncio streams, so that headers, chunk framing, resets and silences are exactly what the test says.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[["Exchange"], Awaitable[None]]

WORDS = "the engine reads the log and finds a fault near line nine of the parser while it was busy ".split()


def delta(index: int = 0, finish: str | None = None, **fields: object) -> bytes:
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return event({"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]})


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def usage(prompt: int = 10, completion: int = 8) -> bytes:
    figures = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return event({"id": "c1", "choices": [], "usage": figures})


DONE = b"data: [DONE]\n\n"
ROLE = delta(role="assistant", content="")


class Exchange:
    """One request and the connection to answer it on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader, self.writer, self.number = reader, writer, number
        self.method = self.path = ""
        self.body = self.head_bytes = b""

    async def read(self) -> bool:
        head = self.head_bytes = await self.reader.readuntil(b"\r\n\r\n")
        self.method, self.path, _ = head.split(b"\r\n")[0].decode().split(" ", 2)
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        self.body = await self.reader.readexactly(length)
        return True

    async def head(self, status: str = "200 OK", kind: str = "text/event-stream") -> None:
        lines = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        self.writer.write(lines.encode())
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def whole(self, *parts: bytes) -> None:
        """A 200 of these chunks with a clean end."""
        await self.head()
        for part in parts:
            await self.chunk(part)
        await self.end()

    async def json(self, data: object, status: str = "200 OK") -> None:
        body = json.dumps(data).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        await self.writer.drain()


def words(count: int = 8) -> list[bytes]:
    return [delta(content=WORDS[n % len(WORDS)] + f"{n} ") for n in range(count)]


async def good(x: Exchange) -> None:
    await x.whole(ROLE, *words(), delta(finish="stop"), usage(), DONE)


async def zero_bytes(x: Exchange) -> None:
    await x.whole()


async def headers_then_silence(x: Exchange) -> None:
    await x.head()
    await asyncio.Event().wait()


async def error_then_done(x: Exchange) -> None:
    error = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}
    await x.whole(ROLE, *words(4), event(error), DONE)


async def error_frame_only(x: Exchange) -> None:
    await x.whole(event({"error": {"message": "boom", "code": 500}}), DONE)


async def only_terminator(x: Exchange) -> None:
    await x.whole(DONE)


async def role_and_stop(x: Exchange) -> None:
    await x.whole(ROLE, delta(finish="stop"), usage(completion=0), DONE)


async def reasoning_length(x: Exchange) -> None:
    parts = [delta(reasoning=f"hmm {n} ") for n in range(6)]
    await x.whole(ROLE, *parts, delta(content=""), delta(finish="length"), usage(), DONE)


async def reasoning_stop(x: Exchange) -> None:
    parts = [delta(reasoning_content=f"well {n} ") for n in range(6)]
    await x.whole(ROLE, *parts, delta(finish="stop"), usage(), DONE)


async def cut_cleanly(x: Exchange) -> None:
    await x.whole(ROLE, *words(5))


async def cut_by_reset(x: Exchange) -> None:
    await x.head()
    for part in [ROLE, *words(5)]:
        await x.chunk(part)
    await asyncio.sleep(0.05)  # let the bytes arrive before the reset throws them away
    await x.reset()


async def cut_without_last_chunk(x: Exchange) -> None:
    await x.head()
    for part in [ROLE, *words(5)]:
        await x.chunk(part)
    x.writer.close()


async def done_without_finish(x: Exchange) -> None:
    await x.whole(ROLE, *words(5), DONE)


async def finish_without_done(x: Exchange) -> None:
    await x.whole(ROLE, *words(5), delta(finish="stop"))


async def nul_text(x: Exchange) -> None:
    await x.whole(ROLE, *[delta(content="\0\0\0\0") for _ in range(20)], delta(finish="length"), usage(), DONE)


async def one_token(x: Exchange) -> None:
    await x.whole(ROLE, *[delta(content="!!!!") for _ in range(64)], delta(finish="length"), usage(), DONE)


async def stall(x: Exchange) -> None:
    await x.head()
    for part in [ROLE, *words(5)]:
        await x.chunk(part)
    await asyncio.Event().wait()


def call(name: str, arguments: str) -> list[bytes]:
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
    half = len(arguments) // 2
    pieces = [arguments[:half], arguments[half:]]
    rest = [delta(tool_calls=[{"index": 0, "function": {"arguments": piece}}]) for piece in pieces]
    return [ROLE, delta(tool_calls=[first]), *rest, delta(finish="tool_calls"), usage(), DONE]


async def tool_call(x: Exchange) -> None:
    await x.whole(*call("list_dir", '{"path": "/srv/app"}'))


async def tool_markup_key(x: Exchange) -> None:
    await x.whole(*call("list_dir", '{"path</arg_key>": "/srv/app"}'))


async def tool_markup_value(x: Exchange) -> None:
    await x.whole(*call("list_dir", '{"path": "/srv/app</arg_value>"}'))


async def tool_markup_name(x: Exchange) -> None:
    await x.whole(*call("list_dir</arg_value>", "{}"))


async def tool_cut_json(x: Exchange) -> None:
    await x.whole(*call("list_dir", '{"path": "/srv/a'))


async def tool_finish_without_call(x: Exchange) -> None:
    await x.whole(ROLE, *words(3), delta(finish="tool_calls"), usage(), DONE)


async def status_500(x: Exchange) -> None:
    await x.json({"error": {"message": "engine dead", "code": 500}}, "500 Internal Server Error")


async def bad_json(x: Exchange) -> None:
    await x.whole(ROLE, *words(2), b'data: {"choices": [{"delta"\n\n', *words(2), delta(finish="stop"), DONE)


async def html_page(x: Exchange) -> None:
    await x.whole(b"<html><body>It works!</body></html>\n")


async def not_http(x: Exchange) -> None:
    x.writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    await x.writer.drain()
    x.writer.close()


async def close_at_once(x: Exchange) -> None:
    x.writer.close()


async def runaway(x: Exchange) -> None:
    await x.head()
    part = b"".join(words(50))
    while True:
        await x.chunk(part)


Route = Callable[[Exchange], Awaitable[bool]]


async def models(x: Exchange) -> bool:
    """What any OpenAI-compatible server answers beside chat; True when the request was one of these."""
    if x.method == "GET" and x.path == "/v1/models":
        await x.json({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 32768}]})
        return True
    if x.method == "GET":
        await x.json({"error": {"message": "not found"}}, "404 Not Found")
        return True
    return False


@asynccontextmanager
async def serve(handler: Handler, route: Route = models) -> AsyncIterator[str]:
    """Serve ``handler`` for chat requests on a free port; yields the base URL."""
    tasks: set[asyncio.Task[None]] = set()
    number = 0

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while True:
                exchange = Exchange(reader, writer, number + 1)
                await exchange.read()
                if await route(exchange):
                    break
                number += 1
                exchange.number = number
                await handler(exchange)
                break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.sleep(0)
