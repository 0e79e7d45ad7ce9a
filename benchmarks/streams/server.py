"""A loopback server that streams chat answers at a known pace and remembers when it wrote what.

    python -m streams.server [--deltas 64] [--itl-ms 20] [--ttft-ms 50]

Raw HTTP/1.1 on uvloop, so that it costs less than any client. An answer has the shape in which vLLM streams: a role
chunk, the deltas, a chunk with the finish reason, one with usage and no choices, ``[DONE]``; each event is an HTTP
chunk and a write of its own. With ``--itl-ms 0`` nothing waits. Prints its port and serves until its standard input
is closed, so that it cannot outlive whoever started it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

SYLLABLES = ["ka", "lo", "mi", "ter", "sun", "va", "dor", "el", "pri", "noc", "tha", "wex", "bul", "gri", "sam", "ode"]
CHARS_PER_TOKEN = 4


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    head = {"id": "chatcmpl-6f1d2c", "object": "chat.completion.chunk", "created": 1764428400, "model": "m"}
    return b"data: " + json.dumps({**head, "choices": choices, **more}, separators=(",", ":")).encode() + b"\n\n"


def choice(delta: dict[str, Any], finish: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}]


def word(n: int) -> str:
    """A word that does not come again soon, so that nobody takes the text for a loop."""
    return " " + SYLLABLES[n * 7 % 16] + SYLLABLES[n // 16 * 5 % 16] + SYLLABLES[(n * n + 3) % 16]


@dataclass
class Pace:
    """The schedule (seconds), the frames made beforehand, and what was really done."""

    deltas: int
    itl: float
    ttft: float
    role: bytes = b""
    words: list[bytes] = field(default_factory=list[bytes])
    tail: bytes = b""
    ttfts: list[float] = field(default_factory=list[float])
    itls: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        self.role = chunk(event(choice({"role": "assistant", "content": ""}), prompt_token_ids=None))
        self.words = [chunk(event(choice({"content": word(n)}))) for n in range(self.deltas)]
        self.tail = chunk(event(choice({}, "stop")))

    def usage(self, body_bytes: int) -> bytes:
        prompt = max(1, body_bytes // CHARS_PER_TOKEN)
        figures = {
            "prompt_tokens": prompt,
            "completion_tokens": self.deltas,
            "total_tokens": prompt + self.deltas,
        }
        return chunk(event([], usage=figures))

    def take(self) -> dict[str, float]:
        """Seconds from a request's last byte to its first delta's write and between deltas, means; then forget."""
        seen = {
            "streams": len(self.ttfts),
            "ttft_s": statistics.fmean(self.ttfts) if self.ttfts else 0.0,
            "itl_s": statistics.fmean(self.itls) if self.itls else 0.0,
        }
        self.ttfts.clear()
        self.itls.clear()
        return seen


class Connection(asyncio.Protocol):
    """One connection; requests on it one after the other."""

    def __init__(self, pace: Pace, loop: asyncio.AbstractEventLoop) -> None:
        self.pace, self.loop = pace, loop
        self.buffer = bytearray()
        self.close_after = False
        self.timer: asyncio.TimerHandle | None = None
        self.asked_at = self.first_at = 0.0
        self.sent = self.body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = cast(socket.socket, transport.get_extra_info("socket"))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = bytes(self.buffer[:end]).lower().split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        size = int(fields.get(b"content-length", b"0"))
        if len(self.buffer) < end + 4 + size:
            return
        del self.buffer[: end + 4 + size]
        self.close_after = fields.get(b"connection", b"") == b"close"
        self.body_bytes = size
        path = lines[0].split(b" ")[1]
        if lines[0].startswith(b"post "):
            self.begin()
        elif path == b"/v1/models":
            self.whole({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 32768}]})
        elif path == b"/health":
            self.whole({})
        elif path == b"/pace":
            self.whole(self.pace.take())
        else:
            self.whole({"error": {"message": "not found"}}, b"404 Not Found")

    def whole(self, data: object, status: bytes = b"200 OK") -> None:
        body = json.dumps(data).encode()
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self.transport.write(head + body)
        self.end()

    def begin(self) -> None:
        self.asked_at = time.monotonic()
        kind = b"Content-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.transport.write(b"HTTP/1.1 200 OK\r\n" + kind)
        self.transport.write(self.pace.role)
        self.sent = 0
        if self.pace.itl:
            self.timer = self.loop.call_at(self.loop.time() + self.pace.ttft, self.tick, self.loop.time())
            return
        self.first_at = time.monotonic()
        for frame in self.pace.words:
            self.transport.write(frame)
        self.finish()

    def tick(self, started: float) -> None:
        """Write one delta, and set the timer to the next one's own moment, so that lateness does not add up."""
        if self.sent == 0:
            self.first_at = time.monotonic()
        self.transport.write(self.pace.words[self.sent])
        self.sent += 1
        if self.sent == self.pace.deltas:
            self.finish()
            return
        due = started + self.pace.ttft + self.sent * self.pace.itl
        self.timer = self.loop.call_at(due, self.tick, started)

    def finish(self) -> None:
        self.pace.ttfts.append(self.first_at - self.asked_at)
        if self.pace.deltas > 1:
            self.pace.itls.append((time.monotonic() - self.first_at) / (self.pace.deltas - 1))
        self.transport.write(self.pace.tail)
        self.transport.write(self.pace.usage(self.body_bytes))
        self.transport.write(chunk(b"data: [DONE]\n\n"))
        self.transport.write(b"0\r\n\r\n")
        self.end()

    def end(self) -> None:
        if self.close_after:
            self.transport.close()


async def serve(pace: Pace) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(pace, loop), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--deltas", type=int, default=64)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    options = parser.parse_args()
    uvloop.run(serve(Pace(options.deltas, options.itl_ms / 1e3, options.ttft_ms / 1e3)))


if __name__ == "__main__":
    main()
