"""There and back over real sockets, byte for byte without a policy."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from gateway_bench import CHAT, FIXTURES, bench, fixture, once, run, sse, whole
from wire import loopback
from wire.loopback import ROLE, Exchange, delta

STREAMS = sorted(path.name for path in FIXTURES.glob("*.sse"))
REQUESTS = sorted(path.name for path in FIXTURES.glob("req-*.json"))
NOT_EMPTY = [name for name in STREAMS if name not in ("200-empty.sse", "200-done-only.sse")]
STATUS = {"500-tool-json.json": "500 Internal Server Error", "502-json.json": "502 Bad Gateway"}
WHOLE = sorted(path.name for path in FIXTURES.glob("*.json") if not path.name.startswith(("req-", "503-")))
HOP = {"connection", "transfer-encoding", "keep-alive"}


@pytest.mark.parametrize("name", NOT_EMPTY)
def test_a_stream_passes_byte_for_byte(name: str) -> None:
    async def main() -> None:
        answer = await once(sse(fixture(name)))
        assert (answer.status, answer.clean) == (200, True)
        assert answer.body == fixture(name)
        assert answer.headers["content-type"] == "text/event-stream"

    run(main)


@pytest.mark.parametrize("policies", [{}, {"sanitize_tool_tags": True}])
def test_a_terminator_without_its_blank_line_passes(policies: dict[str, bool]) -> None:
    async def main() -> None:
        for last in (b"data: [DONE]", b"data: [DONE]\n", b""):
            body = ROLE + b"".join(loopback.words(2)) + delta(finish="stop") + last

            async def handler(x: Exchange, body: bytes = body) -> None:
                await x.whole(body)

            async with bench(handler, **policies) as b:
                assert (await b.ask()).body == body
                await b.counted("requests_total", 1, outcome="ok" if last else "unterminated")

    run(main)


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_answer_passes_byte_for_byte(name: str) -> None:
    async def main() -> None:
        status = STATUS.get(name, "200 OK")
        answer = await once(whole(fixture(name), status))
        assert (answer.status, answer.clean) == (int(status[:3]), True)
        assert answer.body == fixture(name)

    run(main)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_passes_byte_for_byte(name: str) -> None:
    async def main() -> None:
        async with bench() as b:
            await b.ask(fixture(name))
            assert b.stub.bodies == [fixture(name)]

    run(main)


@pytest.mark.parametrize("name", ["clean-toolcall.sse", "clean-toolcall.json"])
def test_a_clean_call_passes_byte_for_byte_with_every_policy_on(name: str) -> None:
    async def main() -> None:
        data = fixture(name)
        handler = sse(data) if name.endswith("sse") else whole(data)
        policies = {"sanitize_tool_tags": True, "mirror_content": True, "restore_reasoning": True}
        async with bench(handler, **policies) as b:
            answer = await b.ask(fixture("req-first.json"))
            assert answer.body == data
            assert b.stub.bodies == [fixture("req-first.json")]

    run(main)


def test_headers_pass_but_for_those_of_the_connection() -> None:
    async def main() -> None:
        more = ["X-Request-Id: 7", "Set-Cookie: a=1", "Set-Cookie: b=2", "Server: stub", "Keep-Alive: timeout=5"]
        async with bench(whole(b'{"x": 1}', "201 Created", *more)) as b:
            sent = {"Authorization": "Bearer mine", "X-Trace": "t", "Accept-Encoding": "gzip", "User-Agent": "me/1",
                    "X-Hop": "h", "Connection": "close, X-Hop", "TE": "trailers"}  # fmt: skip
            answer = await b.ask(b"{}", f"{CHAT}?beta=1%20x", headers=sent)
            head = b.stub.heads[0].decode()
        assert head.startswith(f"POST {CHAT}?beta=1%20x HTTP/1.1\r\n")
        lines = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:] if line)}
        assert lines.pop("host").startswith("127.0.0.1:")
        assert lines.pop("connection") == "close", "the gateway's own connection to the engine"
        assert lines == {
            "authorization": "Bearer mine", "x-trace": "t", "accept-encoding": "gzip", "user-agent": "me/1",
            "content-type": "application/json", "content-length": "2",
        }  # fmt: skip
        assert answer.status == 201
        ours = {k: v for k, v in answer.headers.items() if k not in HOP}
        assert ours == {"content-type": "application/json", "content-length": "8", "x-request-id": "7",
                        "set-cookie": "b=2", "server": "stub"}  # fmt: skip

    run(main)


def test_nothing_is_added_and_nothing_said_twice_is_lost() -> None:
    async def main() -> None:
        async with bench() as b:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(b.url.rpartition(":")[2]))
            odd = b"x-tag: one\r\nx-tag: two\r\n"
            writer.write(
                b"POST "
                + CHAT.encode()
                + b"?q=a+b%2Fc&e= HTTP/1.1\r\nHost: x\r\n"
                + odd
                + b"Content-Length: 2\r\n\r\n{}"
            )
            await reader.readuntil(b"[DONE]")
            writer.close()
            head = b.stub.heads[0]
        assert head.startswith(b"POST " + CHAT.encode() + b"?q=a+b%2Fc&e= HTTP/1.1\r\n")
        names = sorted(line.partition(b":")[0].lower() for line in head.strip().split(b"\r\n")[1:])
        assert names == [b"connection", b"content-length", b"host", b"x-tag", b"x-tag"]
        assert odd in head.lower()

    run(main)


def test_a_packed_answer_passes_unread() -> None:
    async def main() -> None:
        packed = gzip.compress(fixture("stream-reasoning-vllm.sse"))

        async def handler(x: Exchange) -> None:
            head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
            x.writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            await x.chunk(packed)
            await x.end()

        for policies in ({}, {"mirror_content": True}):
            async with bench(handler, **policies) as b:
                answer = await b.ask(headers={"Accept-Encoding": "gzip"})
                assert answer.body == packed
                wanted = b"accept-encoding: " + (b"identity" if policies else b"gzip")
                assert wanted in b.stub.heads[0].lower()

    run(main)
