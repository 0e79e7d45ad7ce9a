"""A gateway on a real port, a stub of an upstream behind it, and a client that sees every byte, all in one loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from soakrig.engine.gateway.app import Gateway
from soakrig.engine.gateway.policies import Policies
from soakrig.engine.gateway.proxy import Waits
from soakrig.engine.gateway.server import bind, http_server
from soakrig.engine.gateway.upstream import Upstream
from wire import loopback

FIXTURES = Path(__file__).parent / "fixtures" / "wire" / "gateway"
CHAT = "/v1/chat/completions"
QUICK = Waits(stall=5.0, first_byte=20.0)


def fixture(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


@dataclass
class Answer:
    """What a client got. ``clean``: the transfer ended as HTTP says it must."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    clean: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


async def request(
    url: str,
    body: bytes | None = b"{}",
    path: str = CHAT,
    headers: dict[str, str] | None = None,
    method: str = "",
) -> Answer:
    """One request over a raw socket; reads until the server ends it or the answer is whole."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sent = {"Host": host, "Content-Type": "application/json", "Connection": "close", **(headers or {})}
    if body is not None:
        sent.setdefault("Content-Length", str(len(body)))
    verb = method or ("GET" if body is None else "POST")
    head = f"{verb} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in sent.items()) + "\r\n"
    writer.write(head.encode() + (body or b""))
    try:
        return await read_answer(reader)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    answer = Answer()
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    answer.status = int(head[0].split(" ")[1])
    answer.headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
    try:
        if answer.headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                answer.body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
        else:
            answer.body = await reader.readexactly(int(answer.headers["content-length"]))
        answer.clean = True
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        answer.body += getattr(error, "partial", b"")
    return answer


class Stub:
    """A stub of an upstream: answers every generating request by ``handler`` and remembers what it was sent."""

    def __init__(self, handler: loopback.Handler, **routes: Any) -> None:
        self.handler, self.routes = handler, {path.replace("__", "/"): body for path, body in routes.items()}
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.asked: list[str] = []

    async def handle(self, x: loopback.Exchange) -> None:
        self.heads.append(x.head_bytes)
        self.bodies.append(x.body)
        await self.handler(x)

    async def route(self, x: loopback.Exchange) -> bool:
        self.asked.append(x.path)
        path = x.path.partition("?")[0]
        known = self.routes.get(path)
        if known is not None:
            if callable(known):
                await known(x)
            else:
                await x.json(known)
            return True
        if path in ("/tokenize", "/health"):
            await x.json({"error": {"message": "not found"}}, "404 Not Found" if path == "/tokenize" else "200 OK")
            return True
        return await loopback.models(x)

    def sent(self, number: int = -1) -> Any:
        return json.loads(self.bodies[number])


@dataclass
class Bench:
    """``url``: the gateway's; ``stub_url``: the stub's own."""

    url: str
    stub_url: str
    gateway: Gateway
    stub: Stub
    upstream: Upstream

    async def ask(self, body: bytes | dict[str, Any] | None = b"{}", path: str = CHAT, **more: Any) -> Answer:
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        return await request(self.url, raw, path, **more)

    async def counted(self, name: str, expected: float, **labels: str) -> None:
        """Wait until a counter says so: it is raised after the client has its answer."""
        async with asyncio.timeout(5):
            while self.count(name, **labels) != expected:
                await asyncio.sleep(0.01)

    def count(self, name: str, **labels: str) -> float:
        """Sum of a counter's samples that carry these labels."""
        found = 0.0
        for family in text_string_to_metric_families(self.gateway.counters.exposition().decode()):
            for sample in family.samples:
                if sample.name == f"soakrig_gateway_{name}" and labels.items() <= sample.labels.items():
                    found += sample.value
        return found


@asynccontextmanager
async def bench(
    handler: loopback.Handler = loopback.good,
    *,
    waits: Waits = QUICK,
    upstream: dict[str, Any] | None = None,
    routes: dict[str, Any] | None = None,
    url: str = "",
    named: dict[str, Upstream] | None = None,
    gateway: dict[str, Any] | None = None,
    **policies: Any,
) -> AsyncIterator[Bench]:
    """``policies`` by name; ``url`` in place of the stub's own; ``upstream``, ``gateway``: further arguments."""
    stub = Stub(handler, **(routes or {}))
    async with loopback.serve(stub.handle, stub.route) as behind:
        up = Upstream("stub", policies=Policies(**policies), **{"url": url or behind, **(upstream or {})})
        made = Gateway(up, named, waits=waits, **(gateway or {}))
        async with standing(made) as front:
            yield Bench(front, behind, made, stub, up)


@asynccontextmanager
async def standing(gateway: Gateway) -> AsyncIterator[str]:
    """Serve a gateway; yields its URL."""
    listener = bind("127.0.0.1", 0)
    ready = asyncio.Event()
    server = http_server(gateway, ready.set)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        await ready.wait()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        # Not by should_exit: uvicorn looks at it ten times a second.
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for tasks in list(server.server_state.tasks):
            tasks.cancel()
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)
        for connection in list(server.server_state.connections):
            connection.shutdown()
        for one in server.servers:
            one.close()
        await gateway.aclose()
        listener.close()


def sse(data: bytes) -> loopback.Handler:
    """Answers with these bytes as one stream, an HTTP chunk an event, and a clean end."""

    async def handler(x: loopback.Exchange) -> None:
        await x.head()
        for event in data.split(b"\n\n"):
            if event:
                await x.chunk(event + b"\n\n")
        await x.end()

    return handler


def whole(body: bytes, status: str = "200 OK", *more: str) -> loopback.Handler:
    """Answers with these bytes as JSON, and further header lines."""

    async def handler(x: loopback.Exchange) -> None:
        lines = ["Content-Type: application/json", f"Content-Length: {len(body)}", *more, "Connection: close"]
        x.writer.write(
            f"HTTP/1.1 {status}\r\n{''.join(f'{line}{chr(13)}{chr(10)}' for line in lines)}\r\n".encode() + body
        )
        await x.writer.drain()

    return handler


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(limited())


async def once(handler: loopback.Handler, body: bytes = b'{"model":"m"}', **more: Any) -> Answer:
    async with bench(handler, **more) as b:
        return await b.ask(body)


def broken(answer: Answer, kind: str) -> None:
    """An answer that began and was broken off: one error frame at its end, no terminator, no clean end."""
    assert answer.status == 200
    assert not answer.clean
    assert b"[DONE]" not in answer.body
    last = answer.body.split(b"\n\n")[-2]
    assert last.startswith(b"data: ")
    error = json.loads(last[6:])["error"]
    assert error["type"] == kind
    assert "stub at http://127.0.0.1:" in error["message"]
    assert answer.body.count(b'"error"') == 1


def refused(answer: Answer, status: int, kind: str, named: str = "stub at http://127.0.0.1:") -> None:
    """An answer of the gateway's own, whole and in JSON, that names the engine and its URL."""
    assert (answer.status, answer.clean) == (status, True)
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["type"] == kind
    assert answer.error["code"] == status
    assert named in answer.error["message"]
