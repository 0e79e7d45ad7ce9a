"""Answers that say 200 and are none, however they are packed, labelled or framed."""

from __future__ import annotations

import gzip
import zlib

import pytest

from gateway_bench import bench, broken, fixture, once, refused, run, sse, whole
from soakrig.engine.gateway.packed import MAX_UNPACKED, PackedLook
from wire import loopback
from wire.loopback import DONE, ROLE, Exchange, delta, event

EDITED = {"sanitize_tool_tags": True, "restore_reasoning": True}
SAID = ROLE + delta(content="half an ans")
ERROR = event({"error": {"message": "EngineCore is dead", "type": "InternalServerError", "code": 500}})


def answering(body: bytes, *lines: str, chunked: bool = True, version: str = "1.1") -> loopback.Handler:
    """These header lines and bytes; not ``chunked``: nothing but the closing says where they end."""

    async def handler(x: Exchange) -> None:
        framing = ["Transfer-Encoding: chunked"] if chunked else []
        x.writer.write("\r\n".join([f"HTTP/{version} 200 OK", *lines, *framing, "", ""]).encode())
        if chunked:
            await x.chunk(body)
            await x.end()
        else:
            x.writer.write(body)
            await x.writer.drain()
        x.writer.close()

    return handler


STREAM, JSON = "Content-Type: text/event-stream", "Content-Type: application/json"
EMPTY = {
    "a packed stream of nothing": (gzip.compress(b""), STREAM, "Content-Encoding: gzip"),
    "a packed terminator": (gzip.compress(DONE), STREAM, "Content-Encoding: gzip"),
    "a packed comment": (zlib.compress(b": ping\n\n"), STREAM, "Content-Encoding: deflate"),
    "a packed body of nothing": (gzip.compress(b" "), JSON, "Content-Encoding: gzip"),
    "a label in capitals": (DONE, "Content-Type: TEXT/Event-Stream; charset=utf-8"),
    "a terminator labelled JSON": (DONE, JSON),
    "a terminator without a label": (DONE,),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("policies", [{}, EDITED])
def test_an_empty_200_is_a_502_in_any_dress(name: str, policies: dict[str, bool]) -> None:
    async def main() -> None:
        body, *lines = EMPTY[name]
        refused(await once(answering(body, *lines), **policies), 502, "engine_empty")

    run(main)


def test_a_packed_stream_goes_on_unread_once_it_says_something() -> None:
    async def main() -> None:
        pack = zlib.compressobj(wbits=31)
        parts = [
            pack.compress(b": ping\n\n") + pack.flush(zlib.Z_SYNC_FLUSH),
            pack.compress(SAID + DONE) + pack.flush(),
        ]

        async def handler(x: Exchange) -> None:
            x.writer.write(f"HTTP/1.1 200 OK\r\n{STREAM}\r\nContent-Encoding: gzip\r\n".encode())
            x.writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
            for part in parts:
                await x.chunk(part)
            await x.end()

        answer = await once(handler)
        assert (answer.status, answer.clean, answer.body) == (200, True, b"".join(parts))

    run(main)


def test_what_cannot_be_unpacked_is_never_called_empty() -> None:
    bomb = PackedLook("gzip")
    bomb.feed(gzip.compress(b"\n" * (1 << 24)))
    assert bomb.blind
    assert len(bomb.text) <= MAX_UNPACKED
    for encoding, data in (("br", b"\x06"), ("gzip", b"no gzip")):
        look = PackedLook(encoding)
        look.feed(data)
        assert look.blind


def test_a_stream_labelled_in_capitals_is_passed_on_as_it_comes() -> None:
    async def main() -> None:
        async def handler(x: Exchange) -> None:
            await x.head(kind="Text/Event-Stream")
            await x.chunk(SAID)
            x.writer.close()

        broken(await once(handler), "engine_died")

    run(main)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("policies", [{}, EDITED])
@pytest.mark.parametrize("cut", [len(SAID), len(SAID) - 20])
def test_where_only_the_closing_ends_a_stream_it_needs_its_terminator(
    version: str, policies: dict[str, bool], cut: int
) -> None:
    async def main() -> None:
        answer = await once(answering(SAID[:cut], STREAM, chunked=False, version=version), **policies)
        broken(answer, "engine_died")
        good = SAID + delta(finish="stop") + DONE
        answer = await once(answering(good, STREAM, chunked=False, version=version), **policies)
        assert (answer.status, answer.clean, answer.body) == (200, True, good)

    run(main)


def test_where_only_the_closing_ends_a_body_it_has_to_be_whole() -> None:
    async def main() -> None:
        body = fixture("clean-toolcall.json")
        refused(await once(answering(body[:-9], JSON, chunked=False, version="1.0")), 502, "engine_died")
        answer = await once(answering(body, JSON, chunked=False, version="1.0"))
        assert (answer.status, answer.body) == (200, body)

    run(main)


def test_words_that_are_no_event_are_told() -> None:
    async def main() -> None:
        answer = await once(answering(b"upstream connect error", STREAM))
        refused(answer, 502, "engine_empty")
        assert "upstream connect error" in answer.error["message"]

    run(main)


@pytest.mark.parametrize(
    "handler",
    [
        sse(ERROR + DONE),
        sse(SAID + ERROR + DONE),
        sse(b'data: {"object": "error", "message": "dead"}\n\n' + DONE),
        whole(b'{"error": {"message": "dead"}}'),
    ],
)
def test_an_error_of_the_engine_s_own_is_not_counted_as_ok(handler: loopback.Handler) -> None:
    async def main() -> None:
        async with bench(handler) as b:
            assert (await b.ask()).clean, "it passes as the engine said it"
            await b.counted("requests_total", 1, outcome="engine_error")

    run(main)


def test_answers_that_speak_of_errors_are_ok() -> None:
    async def main() -> None:
        for handler in (
            sse(ROLE + delta(content='{"error": 1}') + DONE),
            whole(b'{"error": null, "output": ["error"]}'),
        ):
            async with bench(handler) as b:
                await b.ask()
                await b.counted("requests_total", 1, outcome="ok")

    run(main)


def test_only_generations_count_as_first_bytes() -> None:
    async def main() -> None:
        async with bench() as b:
            await b.ask(None, "/health")
            await b.ask()
            await b.counted("requests_total", 2)
            assert b.count("first_byte_seconds_count") == 1

    run(main)
