"""Engines that die, fall silent or say nothing: no client takes any of it for an answer."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from gateway_bench import CHAT, bench, broken, fixture, once, refused, request, run, sse, whole
from soakrig.engine.gateway.proxy import Waits
from wire import loopback
from wire.loopback import DONE, ROLE, Exchange, delta


def test_nothing_listens_there() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as held:
            port = held.getsockname()[1]
        async with bench(url=f"http://127.0.0.1:{port}") as b:
            answer = await b.ask()
            refused(answer, 502, "engine_unreachable")
            assert f"http://127.0.0.1:{port}" in answer.error["message"]
            await b.counted("requests_total", 1, outcome="engine_unreachable")

    run(main)


def test_an_engine_that_says_itself_that_it_loads_gets_a_retry_after() -> None:
    async def main() -> None:
        body = fixture("503-health.json")
        answer = await once(whole(body, "503 Service Unavailable"))
        assert (answer.status, answer.body, answer.headers["retry-after"]) == (503, body, "5")
        own = await once(whole(body, "503 Service Unavailable", "Retry-After: 60"))
        assert own.headers["retry-after"] == "60"

    run(main)


async def close_at_once(x: Exchange) -> None:
    x.writer.close()


async def head_then_reset(x: Exchange) -> None:
    await x.head()
    await x.reset()


async def half_an_event_then_close(x: Exchange) -> None:
    await x.head()
    await x.chunk(ROLE[:20])
    x.writer.close()


async def short_body(x: Exchange) -> None:
    x.writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 400\r\n\r\n{"id": "c')
    await x.writer.drain()
    x.writer.close()


@pytest.mark.parametrize("handler", [close_at_once, head_then_reset, half_an_event_then_close, short_body])
@pytest.mark.parametrize("policies", [{}, {"sanitize_tool_tags": True, "restore_reasoning": True}])
def test_death_before_the_first_event_is_a_502(handler: loopback.Handler, policies: dict[str, bool]) -> None:
    async def main() -> None:
        refused(await once(handler, **policies), 502, "engine_died")

    run(main)


@pytest.mark.parametrize("name", ["200-empty.sse", "200-done-only.sse"])
def test_an_empty_stream_is_a_502(name: str) -> None:
    async def main() -> None:
        refused(await once(sse(fixture(name))), 502, "engine_empty")

    run(main)


def test_an_empty_body_is_a_502_where_an_answer_was_asked_for() -> None:
    async def main() -> None:
        refused(await once(whole(b"")), 502, "engine_empty")
        refused(await once(whole(b" \n")), 502, "engine_empty")

        async def healthy(x: Exchange) -> None:
            x.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await x.writer.drain()

        async with bench(routes={"__health": healthy}) as b:
            health = await b.ask(None, "/health")
            assert (health.status, health.body, health.clean) == (200, b"", True)

    run(main)


def test_comments_go_on_at_once_and_an_end_behind_them_is_broken() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def handler(x: Exchange) -> None:
            await x.head()
            await x.chunk(b": waiting\n\n")
            await go.wait()
            await x.end()

        async with bench(handler) as b:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(b.url.rpartition(":")[2]))
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            await reader.readuntil(b": waiting\n\n")
            go.set()
            rest = await reader.read()
            writer.close()
        assert b'"engine_empty"' in rest
        assert not rest.endswith(b"0\r\n\r\n")

    run(main)


async def after_words(x: Exchange) -> None:
    await x.head()
    for part in [ROLE, *loopback.words(3)]:
        await x.chunk(part)
    await x.writer.drain()


async def cut_clean_close(x: Exchange) -> None:
    await after_words(x)
    x.writer.close()


async def cut_inside_event(x: Exchange) -> None:
    await after_words(x)
    await x.chunk(delta(content="half")[:-8])
    x.writer.close()


@pytest.mark.parametrize("handler", [cut_clean_close, cut_inside_event])
@pytest.mark.parametrize("policies", [{}, {"sanitize_tool_tags": True, "restore_reasoning": True}])
def test_death_in_the_middle_is_one_error_frame_and_a_break(
    handler: loopback.Handler, policies: dict[str, bool]
) -> None:
    async def main() -> None:
        async with bench(handler, **policies) as b:
            answer = await b.ask()
            broken(answer, "engine_died")
            assert answer.body.startswith(ROLE + b"".join(loopback.words(3)))
            await b.counted("requests_total", 1, outcome="engine_died")
            await b.counted("in_flight", 0)

    run(main)


def test_a_death_in_the_responses_api_has_its_own_event() -> None:
    async def main() -> None:
        async with bench(cut_clean_close) as b:
            answer = await b.ask(path="/v1/responses")
        last = answer.body.split(b"\n\n")[-2].split(b"\n")
        assert last[0] == b"event: error"
        event = json.loads(last[1][6:])
        assert (event["type"], event["code"]) == ("error", "engine_died")
        assert not answer.clean

    run(main)


def test_a_stream_of_stated_length_breaks_without_a_frame() -> None:
    async def main() -> None:
        async def handler(x: Exchange) -> None:
            x.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 900\r\n\r\n" + ROLE)
            await x.writer.drain()
            x.writer.close()

        answer = await once(handler)
        assert (answer.headers["content-length"], answer.body, answer.clean) == ("900", ROLE, False)

    run(main)


def test_a_break_after_the_terminator_is_a_whole_answer() -> None:
    async def main() -> None:
        async def handler(x: Exchange) -> None:
            await after_words(x)
            await x.chunk(delta(finish="stop") + DONE)
            x.writer.close()

        answer = await once(handler)
        assert answer.clean
        assert answer.body.endswith(DONE)

    run(main)


def test_an_end_without_a_terminator_passes_and_is_counted() -> None:
    async def main() -> None:
        async with bench(sse(fixture("200-cut.sse"))) as b:
            answer = await b.ask()
            assert answer.body == fixture("200-cut.sse")
            await b.counted("requests_total", 1, outcome="unterminated")
        async with bench(sse(fixture("clean-toolcall.sse"))) as b:
            await b.ask()
            await b.counted("requests_total", 1, outcome="ok")

    run(main)


async def silent_after_words(x: Exchange) -> None:
    await after_words(x)
    await asyncio.Event().wait()


def test_silence_in_the_middle_ends_at_the_limit() -> None:
    async def main() -> None:
        began = time.monotonic()
        answer = await once(silent_after_words, waits=Waits(stall=0.4, first_byte=60))
        broken(answer, "engine_stalled")
        assert 0.4 <= time.monotonic() - began < 5

    run(main)


def test_silence_before_the_first_byte_ends_when_health_is_silent_too() -> None:
    async def main() -> None:
        async def never(x: Exchange) -> None:
            await asyncio.Event().wait()

        dead = await once(never, waits=Waits(stall=0.3, first_byte=60), routes={"__health": never})
        refused(dead, 504, "engine_stalled")
        assert "/health does not answer" in dead.error["message"]
        sick = whole(b"{}", "503 Service Unavailable")
        said = await once(
            loopback.headers_then_silence, waits=Waits(stall=0.3, first_byte=60), routes={"__health": sick}
        )
        refused(said, 504, "engine_stalled")
        assert "/health answers 503" in said.error["message"]

    run(main)


def test_a_long_prefill_is_waited_for_while_health_answers_but_not_for_ever() -> None:
    async def main() -> None:
        asked = asyncio.Event()

        async def slow(x: Exchange) -> None:
            await x.head()
            await asked.wait()
            await x.chunk(ROLE + b"".join(loopback.words(2)) + delta(finish="stop") + DONE)
            await x.end()

        async def health(x: Exchange) -> None:
            if len(b.stub.asked) >= 6:
                asked.set()
            await x.json({})

        async with bench(slow, waits=Waits(stall=0.1, first_byte=60), routes={"__health": health}) as b:
            answer = await b.ask()
            assert answer.clean
            assert answer.body.endswith(DONE)
            assert b.stub.asked.count("/health") >= 3
        late = await once(loopback.headers_then_silence, waits=Waits(stall=0.2, first_byte=0.7))
        refused(late, 504, "engine_stalled")
        assert "within 0.7 s" in late.error["message"]

    run(main)


def test_headers_wait_for_the_first_byte() -> None:
    async def main() -> None:
        go, headed = asyncio.Event(), asyncio.Event()

        async def handler(x: Exchange) -> None:
            await x.head()
            headed.set()
            await go.wait()
            await x.chunk(ROLE)
            await x.end()

        async with bench(handler) as b:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(b.url.rpartition(":")[2]))
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            await headed.wait()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await reader.read(1)
            go.set()
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.close()

    run(main)


@pytest.mark.parametrize("handler", [silent_after_words, loopback.headers_then_silence])
def test_a_client_that_goes_away_ends_the_request_at_the_engine(handler: loopback.Handler) -> None:
    async def main() -> None:
        gone, begun = asyncio.Event(), asyncio.Event()

        async def watching(x: Exchange) -> None:
            task = asyncio.ensure_future(handler(x))
            begun.set()
            await x.reader.read()  # ends when the gateway closes its connection
            task.cancel()
            gone.set()

        async with bench(watching) as b:
            client = asyncio.ensure_future(b.ask())
            await begun.wait()
            client.cancel()
            await asyncio.gather(client, return_exceptions=True)
            await gone.wait()
            await b.counted("requests_total", 1, outcome="client_gone")

    run(main)


def test_many_at_once_do_not_mix() -> None:
    async def main() -> None:
        async def echo(x: Exchange) -> None:
            name = json.loads(x.body)["n"]
            await x.whole(ROLE, *[delta(content=f"{name}-{n} ") for n in range(20)], delta(finish="stop"), DONE)

        async with bench(echo, sanitize_tool_tags=True, restore_reasoning=True) as b:
            answers = await asyncio.gather(*(request(b.url, json.dumps({"n": n}).encode()) for n in range(40)))
        for number, answer in enumerate(answers):
            assert answer.body.count(f'"{number}-'.encode()) == 20

    run(main)
