"""Every way in which a server can fail to answer has its own outcome, over real sockets; only the good one is ok."""

from __future__ import annotations

import asyncio
import socket

import pytest

from soakrig.clock import RealClock
from soakrig.record.outcome import OutcomeName
from soakrig.soak.classify import Outcome, classify
from soakrig.soak.client import ChatClient, Timeouts
from soakrig.soak.reply import Reply
from soakrig.soak.target import Target
from wire import loopback

TOOLS = {"list_dir", "read_file"}


async def ask(url: str, *, stall: float = 0.6, max_events: int = 10_000) -> Reply:
    client = ChatClient(Target(url, "m"), RealClock(), Timeouts(connect=2.0, stall=stall), max_events=max_events)
    async with client:
        return await client.send(b'{"messages": []}')


def outcome_of(handler: loopback.Handler, accept: tuple[str, ...] = ()) -> Outcome:
    async def main() -> Outcome:
        async with loopback.serve(handler) as url:
            return classify(await ask(url), accept=accept, tools=TOOLS)

    return asyncio.run(main())


CASES: list[tuple[loopback.Handler, OutcomeName]] = [
    (loopback.good, "ok"),
    (loopback.tool_call, "ok"),
    (loopback.zero_bytes, "empty_200"),
    (loopback.only_terminator, "empty_200"),
    (loopback.headers_then_silence, "hung"),
    (loopback.stall, "hung"),
    (loopback.error_then_done, "error_frame"),
    (loopback.error_frame_only, "error_frame"),
    (loopback.role_and_stop, "answerless"),
    (loopback.reasoning_length, "answerless"),
    (loopback.reasoning_stop, "answerless"),
    (loopback.cut_cleanly, "truncated"),
    (loopback.cut_by_reset, "truncated"),
    (loopback.cut_without_last_chunk, "truncated"),
    (loopback.done_without_finish, "truncated"),
    (loopback.finish_without_done, "truncated"),
    (loopback.nul_text, "degenerate"),
    (loopback.one_token, "degenerate"),
    (loopback.runaway, "degenerate"),
    (loopback.tool_markup_key, "tool_malformed"),
    (loopback.tool_markup_value, "tool_malformed"),
    (loopback.tool_markup_name, "tool_malformed"),
    (loopback.tool_cut_json, "tool_malformed"),
    (loopback.tool_finish_without_call, "tool_malformed"),
    (loopback.status_500, "http_error"),
    (loopback.bad_json, "malformed"),
    (loopback.html_page, "malformed"),
    (loopback.not_http, "malformed"),
    (loopback.close_at_once, "refused"),
]


@pytest.mark.parametrize(("handler", "expected"), CASES, ids=[handler.__name__ for handler, _ in CASES])
def test_outcome(handler: loopback.Handler, expected: OutcomeName) -> None:
    found = outcome_of(handler)
    assert found.name == expected, found
    assert bool(found.why) == (expected != "ok"), "every outcome but ok says why"


def test_refused_connection() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take the port
        found = classify(asyncio.run(ask(f"http://127.0.0.1:{held.getsockname()[1]}")))
    assert found.name == "refused"
    assert "Connect" in found.why or "refused" in found.why


@pytest.mark.parametrize(
    ("handler", "name"),
    [(loopback.done_without_finish, "null-finish"), (loopback.finish_without_done, "no-terminator")],
)
def test_a_named_leniency_accepts_and_says_so(handler: loopback.Handler, name: str) -> None:
    found = outcome_of(handler, accept=(name,))
    assert found == Outcome("ok", accepted=[name])


def test_a_leniency_does_not_excuse_anything_else() -> None:
    everything = ("null-finish", "no-terminator", "usage-tail")
    for handler, expected in CASES:
        if handler not in (loopback.done_without_finish, loopback.finish_without_done):
            assert outcome_of(handler, accept=everything).name == expected, handler.__name__


def test_nothing_is_ok_once_the_engine_is_dead() -> None:
    async def main() -> Reply:
        async with loopback.serve(loopback.good) as url:
            return await ask(url)

    reply = asyncio.run(main())
    assert classify(reply).name == "ok"
    assert classify(reply, engine_dead=True).name == "post_mortem"


def test_times_are_those_of_the_first_token_not_of_the_role() -> None:
    async def slow(x: loopback.Exchange) -> None:
        await x.head()
        await x.chunk(loopback.ROLE)
        await asyncio.sleep(0.3)
        await x.chunk(loopback.delta(reasoning="so "))
        await asyncio.sleep(0.2)
        for part in [*loopback.words(), loopback.delta(finish="stop"), loopback.usage(), loopback.DONE]:
            await x.chunk(part)
        await x.end()

    async def main() -> Reply:
        async with loopback.serve(slow) as url:
            return await ask(url)

    reply = asyncio.run(main())
    assert reply.first_byte_at is not None
    assert reply.first_token_at is not None
    assert reply.first_answer_at is not None
    assert reply.first_byte_at - reply.sent_at < 0.25
    assert reply.first_token_at - reply.sent_at >= 0.3
    assert reply.first_answer_at - reply.first_token_at >= 0.19
    assert reply.output_tokens == 8, "usage wins over counted deltas"
    assert reply.deltas == 9
