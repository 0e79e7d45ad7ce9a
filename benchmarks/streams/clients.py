"""The clients that are compared: each opens for ``(url, body)`` and gives a coroutine function that sends one request.

All parse every event's JSON and time first and last content; what else they do is their own business. Imports stand
inside the functions, since a rival's environment has no soakrig and ours has no rival.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from orjson import loads

MODEL, PROMPT, MAX_TOKENS = "m", "List what changed in the parser since Monday.", 512


@dataclass
class Stream:
    """One answer as the client saw it. Seconds of the monotonic clock; ``whole``: it was taken for a good one."""

    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    deltas: int = 0
    whole: bool = False

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def itl(self) -> float:
        return (self.last - self.first) / (self.deltas - 1) if self.deltas > 1 else 0.0

    def content(self, now: float) -> None:
        if not self.deltas:
            self.first = now
        self.last = now
        self.deltas += 1


Once = Callable[[], Awaitable[Stream]]
Client = Callable[[str, bytes], AbstractAsyncContextManager[Once]]


@asynccontextmanager
async def soakrig(url: str, body: bytes) -> AsyncGenerator[Once]:
    """Ours, classification included, as `soak run` calls it: a connection a request."""
    from soakrig.clock import RealClock
    from soakrig.soak.classify import classify
    from soakrig.soak.client import ChatClient
    from soakrig.soak.target import Target

    tools = frozenset({"list_dir", "read_file"})
    async with ChatClient(Target(url), RealClock()) as client:

        async def once() -> Stream:
            reply = await client.send(body)
            outcome = classify(reply, accept=(), tools=tools)
            first, last = reply.first_token_at or 0.0, reply.last_token_at or 0.0
            return Stream(reply.sent_at, first, last, reply.deltas, outcome.name == "ok")

        yield once


@dataclass
class Reading:
    """What the two bare loops do with an event: parse it, time content, note the finish reason."""

    stream: Stream = field(default_factory=Stream)
    finished: bool = False

    def event(self, payload: bytes) -> None:

        if payload == b"[DONE]":
            self.stream.whole = self.finished
            return
        choices = loads(payload)["choices"]
        if not choices:
            return
        if choices[0]["delta"].get("content"):
            self.stream.content(time.monotonic())
        if choices[0]["finish_reason"]:
            self.finished = True


@asynccontextmanager
async def bare_asyncio(url: str, body: bytes) -> AsyncGenerator[Once]:
    """The floor: asyncio streams, a connection a request, lines, orjson. It would take nearly anything for ok."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), int(parts.port or 80)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    request = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def once() -> Stream:
        reading = Reading()
        reading.stream.sent = time.monotonic()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request)
        while line := await reader.readline():
            if line.startswith(b"data: "):
                reading.event(line[6:].rstrip())
        writer.close()
        return reading.stream

    yield once


@asynccontextmanager
async def bare_aiohttp(url: str, body: bytes) -> AsyncGenerator[Once]:
    """aiohttp with its C parser and kept connections, ``iter_any`` and orjson, nothing judged."""
    import aiohttp

    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def once() -> Stream:
            reading = Reading()
            reading.stream.sent = time.monotonic()
            rest = b""
            async with session.post(f"{url}/v1/chat/completions", data=body) as response:
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n\n")
                    for line in lines:
                        reading.event(line[6:])
            return reading.stream

        yield once


@asynccontextmanager
async def vllm_request_function(url: str, body: bytes) -> AsyncGenerator[Once]:
    """``vllm bench serve``'s own request function in a session like its own: kept connections, no uvloop. It makes
    its body itself, of the same fields as ours."""
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import (  # pyright: ignore[reportMissingImports]
        RequestFuncInput,
        async_request_openai_chat_completions,
    )

    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, use_dns_cache=True, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=6 * 60 * 60)
    async with aiohttp.ClientSession(connector=connector, trust_env=True, timeout=timeout) as session:

        async def once() -> Stream:
            asked = RequestFuncInput(
                prompt=PROMPT,
                api_url=f"{url}/v1/chat/completions",
                prompt_len=10,
                output_len=MAX_TOKENS,
                model=MODEL,
            )
            sent = time.monotonic()
            got = await async_request_openai_chat_completions(asked, session)
            first = sent + got.ttft
            return Stream(sent, first, first + sum(got.itl), len(got.itl) + 1, bool(got.success))

        yield once


CLIENTS: dict[str, tuple[Client, bool]] = {
    "soakrig": (soakrig, True),
    "bare-asyncio": (bare_asyncio, True),
    "bare-aiohttp": (bare_aiohttp, True),
    "vllm-bench": (vllm_request_function, False),
}
"""The function, and whether it runs on uvloop (ours does under `soak run`; `vllm bench serve` does not)."""
