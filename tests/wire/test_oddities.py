"""Servers differ: what is legal must be ok, and what only looks nearly right must not."""

from __future__ import annotations

import random

import orjson
import pytest

from soakrig.soak.classify import classify
from soakrig.soak.reply import Reply
from wire import loopback
from wire.oddities import BAD, GOOD
from wire.test_outcomes import TOOLS, ask, outcome_of


@pytest.mark.parametrize("name", GOOD)
def test_odd_but_legal(name: str) -> None:
    found = outcome_of(GOOD[name])
    assert found.name == "ok", found


@pytest.mark.parametrize("name", BAD)
def test_nearly_right(name: str) -> None:
    expected, handler = BAD[name]
    found = outcome_of(handler)
    assert found.name == expected, found


def test_no_leniency_makes_a_cut_stream_ok() -> None:
    _, handler = BAD["empty finish and a cut"]
    assert outcome_of(handler, accept=("null-finish", "no-terminator", "usage-tail")).name == "truncated"


@pytest.mark.parametrize("count", [2**64 - 1, -5, True, 1.5, "9", None])
def test_absurd_usage_is_not_taken_for_a_count(count: object) -> None:
    reply = Reply(status=200)
    figures = orjson.dumps({"choices": [], "usage": {"completion_tokens": 3}}).replace(b"3", _json(count))
    for part in [loopback.ROLE, *loopback.words(4), b"data: " + figures + b"\n\n", loopback.delta(finish="stop")]:
        reply.feed(part, 1.0)
    assert reply.output_tokens == 4, "deltas are counted instead"


def _json(value: object) -> bytes:
    import json

    return json.dumps(value).encode()


def test_a_compressed_answer_is_not_asked_for() -> None:
    import asyncio

    heads: list[bytes] = []

    async def keep(x: loopback.Exchange) -> None:
        heads.append(x.head_bytes)
        await loopback.good(x)

    async def main() -> None:
        async with loopback.serve(keep) as url:
            await ask(url)

    asyncio.run(main())
    accepted = [line for line in heads[0].lower().split(b"\r\n") if line.startswith(b"accept-encoding:")]
    assert accepted == [b"accept-encoding: identity"]


def test_random_bytes_are_never_ok_and_never_crash() -> None:
    rng = random.Random(1)
    whole = b"".join([loopback.ROLE, *loopback.words(), loopback.delta(finish="stop"), loopback.usage(), loopback.DONE])
    pieces = [
        b"data: ",
        b"\n\n",
        b"\r\n",
        b'{"choices":',
        b"[",
        b"]",
        b"}",
        b"null",
        b"[DONE]",
        b'"',
        b"\xff",
        b": x\n",
    ]
    for number in range(4000):
        if number % 2:
            data = b"".join(rng.choice(pieces) for _ in range(rng.randint(0, 30)))
        else:
            data = whole[: rng.randint(0, len(whole) - 16)]
        reply = Reply(status=200)
        for start in range(0, len(data), 37):
            reply.feed(data[start : start + 37], 1.0)
        reply.finish("eof", 2.0)
        assert classify(reply, tools=TOOLS).name != "ok", data


def test_json_of_the_wrong_type_anywhere_is_named_and_does_not_crash() -> None:
    rng = random.Random(2)
    values: list[object] = [None, True, 0, -1, 1.5, "", "x", [], ["x"], {}, {"a": 1}, 2**70]
    base = {
        "choices": [
            {
                "index": 0,
                "delta": {
                    "content": "x",
                    "reasoning": "y",
                    "tool_calls": [{"index": 0, "id": "a", "function": {"name": "list_dir", "arguments": "{}"}}],
                },
                "finish_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    import json

    def mutate(data: object) -> object:
        if rng.random() < 0.12:
            return rng.choice(values)
        if isinstance(data, dict):
            return {key: mutate(value) for key, value in data.items()}
        if isinstance(data, list):
            return [mutate(value) for value in data]
        return data

    for _ in range(4000):
        reply = Reply(status=200)
        for _ in range(3):
            reply.feed(b"data: " + json.dumps(mutate(base)).encode() + b"\n\n", 1.0)
        reply.finish("eof", 2.0)
        assert classify(reply, tools=TOOLS).name != "ok"
        assert reply.output_tokens >= 0
