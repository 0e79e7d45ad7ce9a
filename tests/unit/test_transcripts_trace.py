"""A trace as requests: lengths by the engine's own count, equal beginnings for equal ids, times of the trace."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from soakrig.clock import FakeClock
from soakrig.engine.embedded.tokenizer import Tokenizer
from soakrig.errors import UsageError
from soakrig.soak.conversation import Turn
from soakrig.soak.probe import Probe
from soakrig.soak.target import Target
from soakrig.soak.transcript import Transcript, open_transcript
from soakrig.soak.transcripts.arrivals import TraceText
from soakrig.soak.transcripts.filler import ENOUGH, WORDS, Filler
from soakrig.soak.transcripts.request import TraceEntry
from soakrig.soak.transcripts.token_counts import EngineCounts, EstimatedCounts
from wire import loopback

TOKENIZER = Tokenizer()


class Counts:
    """The embedded engine's own tokenizer, and a template of 5 tokens."""

    how, exact, extended = "here", True, True

    def count(self, text: str, /) -> int:
        return len(TOKENIZER.encode(text))

    def overhead(self) -> int:
        return 5


class Odd(Counts):
    """One in which no word is one token."""

    def count(self, text: str, /) -> int:
        return sum(2 + len(word) // 4 for word in text.split())


def entry(number: int, length: int, *blocks: int) -> TraceEntry:
    return TraceEntry("t", number, number * 10.0, length, 7, blocks)


def text_of(text: TraceText, one: TraceEntry) -> str:
    return text.request(one).messages[0]["content"]


def test_equal_ids_give_equal_beginnings_and_lengths_are_the_traces() -> None:
    text = TraceText(Filler(Counts()), 512)
    one, two = text_of(text, entry(1, 1300, 3, 4, 5)), text_of(text, entry(2, 1100, 3, 4, 9))
    for made, length in ((one, 1300), (two, 1100)):
        assert Counts().count(made) + 5 == length
    shared = " ".join(one.split()[:1024])
    assert two.startswith(shared)
    assert one.split()[1024:1050] != two.split()[1024:1050]
    assert text_of(text, entry(3, 1300, 8, 4, 5)).split()[:512] != one.split()[:512]
    fields = text.request(entry(1, 1300, 3, 4, 5)).fields
    assert fields == {"max_tokens": 7, "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert TraceText(Filler(EstimatedCounts()), 512).request(entry(1, 20)).fields == {"max_tokens": 7}


def test_text_without_ids_is_shared_with_nobody_and_the_same_again() -> None:
    text = TraceText(Filler(Counts(), seed=4), 512)
    assert text_of(text, entry(1, 90)) == text_of(TraceText(Filler(Counts(), seed=4), 512), entry(1, 90))
    assert text_of(text, entry(1, 90)) != text_of(text, entry(2, 90))
    assert text_of(text, entry(1, 90)) != text_of(TraceText(Filler(Counts(), seed=5), 512), entry(1, 90))


def test_speed_stretches_times_and_zero_forgets_them() -> None:
    assert TraceText(Filler(EstimatedCounts()), 512, speed=4.0).request(entry(2, 9)).due_s == 5.0
    assert TraceText(Filler(EstimatedCounts()), 512, speed=0.0).request(entry(2, 9)).due_s is None


@pytest.mark.parametrize("tokens", [1, 2, 17, 400])
def test_filler_has_the_length_where_words_are_one_token_and_comes_near_elsewhere(tokens: int) -> None:
    fits = Filler(Counts())
    assert fits.single
    assert len(fits.words) >= ENOUGH
    assert Counts().count(fits.make(tokens, "k")) == tokens
    odd = Filler(Odd())
    assert not odd.single
    assert abs(Odd().count(odd.make(tokens, "k")) - tokens) <= 4
    assert len(set(WORDS)) == len(WORDS)


def counted(engine: Any) -> tuple[bool, int, int, bool]:
    """What EngineCounts makes of a server: whether it can be asked, a count, the template's overhead."""

    async def run() -> tuple[bool, int, int, bool]:
        async def answer(x: loopback.Exchange) -> None:
            await engine(x, json.loads(x.body))

        async with loopback.serve(answer) as url:
            return await asyncio.to_thread(ask, url)

    def ask(url: str) -> tuple[bool, int, int, bool]:
        with EngineCounts(Target(url, api_key="secret")) as counts:
            there = counts.available()
            return there, counts.count("a b c d") if there else -1, counts.overhead() if there else -1, counts.extended

    return asyncio.run(run())


def test_two_forms_of_tokenize_are_understood_and_none_is_an_estimate() -> None:
    async def vllm(x: loopback.Exchange, body: dict[str, Any]) -> None:
        assert b"bearer secret" in x.head_bytes.lower()
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"] + " m a r k s"
        await x.json({"count": len(text.split()), "tokens": []})

    async def llama(x: loopback.Exchange, body: dict[str, Any]) -> None:
        if "content" not in body:
            return await x.json({"error": "no content"}, "400 Bad Request")
        return await x.json({"tokens": body["content"].split()})

    async def nobody(x: loopback.Exchange, body: dict[str, Any]) -> None:
        await x.json({"error": "not found"}, "404 Not Found")

    assert counted(vllm) == (True, 4, 5, True)
    assert counted(llama) == (True, 4, 0, False)
    assert counted(nobody)[:3] == (False, -1, -1)
    assert EstimatedCounts().count("x" * 320) == 100


def arrivals(folder: Path, **more: Any) -> Transcript:
    path = folder / "t.jsonl"
    rows = [{"timestamp": 2000 * n, "input_length": 20, "output_length": 3, "hash_ids": [n]} for n in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    talk = open_transcript(path, **more)
    talk.prepare(Target("http://127.0.0.1:9"))  # nobody counts there
    return talk


def test_arrivals_are_dealt_in_order_with_their_times(tmp_path: Path) -> None:
    talk = arrivals(tmp_path, places=2)
    assert talk.is_nobodys
    assert "estimated" in talk.facts["trace"]["counted"]
    one, two = talk.conversations(Probe("m"))
    turns = [one.next_turn(), two.next_turn(), two.next_turn(), one.next_turn(), one.next_turn(), two.next_turn()]
    assert [turn.due_s for turn in turns[:5]] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert turns[5] is None
    assert talk.facts["trace"]["output_length"] == "at most"


def test_arrivals_that_do_not_fit_the_context_are_refused_with_numbers(tmp_path: Path) -> None:
    talk = arrivals(tmp_path)
    with pytest.raises(UsageError, match="5 of 5 arrivals do not fit the engine's context of 22 tokens") as caught:
        talk.conversations(Probe("m", context_limit=22))
    assert "t.jsonl line 1" in str(caught.value)
    talk.conversations(Probe("m", context_limit=23))


def test_a_turn_waits_for_its_time_and_not_once_the_load_has_ended() -> None:
    from soakrig.soak.load import Load

    clock = FakeClock()
    load = Load.__new__(Load)
    load.clock, load.began, load.late, load.ended = clock, None, [], None

    def turn(due: float | None) -> Turn:
        return Turn(0, 1, 0, b"", 1, None, b"", [], {}, due)

    async def run() -> None:
        assert await load._due(turn(None))
        assert load.began is None
        assert await load._due(turn(0.0))
        start = clock.monotonic()
        waiting = asyncio.ensure_future(load._due(turn(30.0)))
        await asyncio.sleep(0)
        while not waiting.done():
            await clock.advance(0.125)
        assert 30.0 <= clock.monotonic() - start < 31.0
        assert await load._due(turn(10.0)), "late ones leave at once"
        assert load.late[-1] >= 20.0
        load.ended = "interrupted"
        assert not await load._due(turn(1000.0))

    asyncio.run(run())
