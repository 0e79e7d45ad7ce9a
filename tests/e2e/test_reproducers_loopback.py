"""Rows against a loopback server with the row's defect: a model that forgets, markup in calls, a corrupt cache."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest

from reproducing import found, its_own, soak_loopback
from soakrig.bisect.launch_result import signature_of
from wire import loopback
from wire.loopback import DONE, ROLE, Exchange, call, delta, usage


class Model:
    """A server whose next token depends on the prompt alone, with the defects that a test asks for.

    ``forgets``: greets after a tool's result that has no reasoning before it. ``corrupts``: the next token after a
    prompt that was seen before drifts. ``perplexity``: of every prompt. ``offers``: paths that it has. ``cached``: what
    it says came from its prefix cache for a prompt that was seen before, None where it does not say.
    """

    def __init__(
        self, *, forgets: bool = False, corrupts: bool = False, perplexity: float = 20.0, offers: str = "all",
        cached: int | None = None,
    ) -> None:  # fmt: skip
        self.cached = cached
        self.forgets, self.corrupts, self.perplexity, self.offers = forgets, corrupts, perplexity, offers
        self.seen: set[str] = set()

    async def chat(self, x: Exchange) -> None:
        body = json.loads(x.body)
        last, tools = body["messages"][-1], body.get("tools")
        remembers = any(message.get("reasoning_content") for message in body["messages"])
        if self.forgets and last["role"] == "tool" and not remembers:
            parts = [delta(content="Hello! How can I help you today?"), delta(finish="stop")]
        elif tools:
            parts = [delta(reasoning="The user wants it read. "), *call(tools[0]["function"]["name"], "{}")[1:-2]]
        else:
            parts = [*loopback.words(), delta(finish="stop")]
        await x.whole(ROLE, *parts, usage(), DONE)

    async def route(self, x: Exchange) -> bool:
        if x.method == "POST" and x.path in ("/tokenize", "/v1/completions"):
            if self.offers != "all":
                await x.json({"error": {"message": "no such endpoint"}}, "404 Not Found")
                return True
            body = json.loads(x.body)
            await x.json(self.tokenize(body) if x.path == "/tokenize" else self.complete(body))
            return True
        return await loopback.models(x)

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        text = body.get("prompt") or json.dumps(body["messages"])
        return {"tokens": [ord(character) % 256 for character in text], "count": len(text)}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, fresh = body["prompt"], "prompt_logprobs" in body
        key = json.dumps(prompt)
        shift = 0.7 if self.corrupts and not fresh and key in self.seen else 0.0
        usage: dict[str, Any] = {"prompt_tokens": 100, "completion_tokens": 1}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached if key in self.seen and not fresh else 0}
        self.seen.add(key)
        bare = isinstance(prompt, list) and "reasoning_content" not in "".join(map(chr, prompt))
        amnesia = 0.033 if self.forgets and bare else 1e-6
        row = {" wants": math.log(0.9) - shift, " hasn": math.log(amnesia), f" t{zlib.crc32(key.encode()) % 97}": -4.0}
        choice: dict[str, Any] = {"index": 0, "text": " wants", "logprobs": {"top_logprobs": [row]}}
        if fresh:
            each = {"1": {"logprob": -math.log(self.perplexity), "rank": 1}}
            choice["prompt_logprobs"] = [None, *[each] * 30]
        return {"choices": [choice], "usage": usage}


AMNESIA = {"states": 4}
CACHED = {"prompts": 2, "prompt_tokens": 100, "evict": False, "restart": False}


def test_a_model_that_forgets_is_found_both_ways(tmp_path: Path) -> None:
    model = Model(forgets=True)
    result = soak_loopback(
        tmp_path, "amnesia", model.chat, model.route, turns=12, tools=3, max_tokens=64, parameters=AMNESIA
    )
    assert its_own(result, "amnesia")
    assert signature_of(result) == "finding amnesia-mass"
    mass = found(result, "amnesia-mass")
    assert mass.value == pytest.approx(3.3, abs=0.01)
    assert "3.3 % on average" in " ".join(mass.text.replace("of the mass ", "").split())
    assert "with the reasoning restored 0.0001 %" in mass.text
    rate, test = found(result, "greeting-rate"), found(result, "amnesia")
    assert (rate.conversation, test.conversation) == (0, 0)
    assert rate.turn is not None
    assert (test.says, test.kind) == ("fault", "derived")
    assert (test.value or 1) <= 0.01
    assert result.outcomes == {"ok": 24}, "a greeting is a whole answer"


def test_a_model_that_remembers_is_clean(tmp_path: Path) -> None:
    model = Model()
    result = soak_loopback(
        tmp_path, "amnesia", model.chat, model.route, turns=6, tools=3, max_tokens=64, parameters=AMNESIA
    )
    assert (result.verdict, [one.says for one in result.findings]) == ("pass", ["clean", "clean"])


def test_without_a_tokenizer_the_loops_alone_judge(tmp_path: Path) -> None:
    model = Model(forgets=True, offers="chat")
    result = soak_loopback(tmp_path, "amnesia", model.chat, model.route, turns=10, tools=3, parameters=AMNESIA)
    assert its_own(result, "amnesia")
    assert signature_of(result) == "finding amnesia"
    assert (found(result, "amnesia-mass").value, found(result, "amnesia-mass").says) == (None, "note")
    assert "POST /tokenize answered 404" in found(result, "amnesia-mass").text


def test_a_cache_that_gives_a_prefix_back_changed_is_found_when_it_is_warm(tmp_path: Path) -> None:
    model = Model(corrupts=True)
    result = soak_loopback(tmp_path, "restart-prefix", model.chat, model.route, parameters=CACHED)
    assert its_own(result, "restart-prefix")
    assert signature_of(result) == "finding prefix-drift-warm"
    assert found(result, "prefix-drift-cold").says == "clean"
    warm = found(result, "prefix-drift-warm")
    assert warm.value == pytest.approx(0.7 / 3, abs=1e-6)
    assert "the engine does not say what was cached" in warm.text


def test_a_sound_cache_is_clean_and_one_that_cannot_be_asked_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "sound").mkdir()
    (tmp_path / "mute").mkdir()
    model = Model()
    result = soak_loopback(tmp_path / "sound", "restart-prefix", model.chat, model.route, parameters=CACHED)
    assert (result.verdict, result.outcomes) == ("pass", {"ok": 4})
    mute = Model(offers="chat")
    result = soak_loopback(tmp_path / "mute", "restart-prefix", mute.chat, mute.route, parameters=CACHED)
    assert (result.verdict, result.outcomes) == ("inconclusive", {"ok": 4})
    assert any("the drift of logprobs was not measured" in reason for reason in result.unknown)


@pytest.mark.parametrize(
    ("cached", "unknown"), [(0, "prefix-warm"), (40, "prefix-evicted"), (None, None)], ids=["off", "too large", "mute"]
)
def test_a_cache_that_was_not_tried_is_not_clean(tmp_path: Path, cached: int | None, unknown: str | None) -> None:
    """No cache at all has nothing warm, and one that the filling did not empty has nothing evicted."""
    model = Model(cached=cached)
    parameters = {**CACHED, "evict": True, "cache_tokens": 300}
    result = soak_loopback(tmp_path, "restart-prefix", model.chat, model.route, parameters=parameters)
    assert [one.name for one in result.findings if one.says == "unknown"] == ([unknown] if unknown else [])
    assert result.verdict == ("inconclusive" if unknown else "pass"), result.reasons
    assert found(result, "prefix-drift-evicted").says == "clean"


def test_an_eviction_without_a_known_cache_is_unknown(tmp_path: Path) -> None:
    model = Model()
    parameters = {**CACHED, "evict": True}
    result = soak_loopback(tmp_path, "restart-prefix", model.chat, model.route, parameters=parameters)
    assert result.verdict == "inconclusive"
    assert any("--param cache_tokens=N" in reason for reason in result.unknown)


@pytest.mark.parametrize(("perplexity", "verdict"), [(20.0, "pass"), (999.0, "pass"), (1.5e5, "fail")])
def test_the_canary_page_of_a_broken_kernel(tmp_path: Path, perplexity: float, verdict: str) -> None:
    model = Model(perplexity=perplexity)
    result = soak_loopback(tmp_path, "garbage", model.chat, model.route, turns=2)
    assert result.verdict == verdict
    assert found(result, "canary-perplexity").value == pytest.approx(perplexity)
    assert its_own(result, "garbage") is (verdict == "fail")


def test_garbage_of_an_engine_without_logprobs_is_still_seen(tmp_path: Path) -> None:
    result = soak_loopback(tmp_path, "garbage", loopback.one_token, turns=2)
    assert its_own(result, "garbage")
    assert signature_of(result) == "turn degenerate"
    assert found(result, "canary-perplexity").value is None


@pytest.mark.parametrize(
    "handler",
    [loopback.tool_markup_key, loopback.tool_markup_value, loopback.tool_markup_name, loopback.tool_cut_json,
     loopback.tool_finish_without_call],
)  # fmt: skip
def test_markup_in_a_call_at_the_third_turn(tmp_path: Path, handler: loopback.Handler) -> None:
    turns = 0

    async def slips(x: Exchange) -> None:
        nonlocal turns
        turns += b'"tools"' in x.body
        await (handler(x) if turns == 3 and b'"tools"' in x.body else x.whole(*call("list_dir", '{"path": "<div>"}')))

    result = soak_loopback(tmp_path, "tool-tags", slips, turns=5)
    assert its_own(result, "tool-tags")
    assert signature_of(result) == "turn tool_malformed"
    assert result.first_bad is not None
    assert result.first_bad.turn == 3


def test_a_model_that_never_calls_was_not_tried(tmp_path: Path) -> None:
    result = soak_loopback(tmp_path, "tool-tags", loopback.good, turns=3)
    assert (result.verdict, found(result, "tool-calls").says) == ("inconclusive", "unknown")


def test_short_replies_are_no_long_generation(tmp_path: Path) -> None:
    result = soak_loopback(tmp_path, "long-decode", loopback.good, turns=2)
    assert (result.verdict, result.outcomes) == ("inconclusive", {"ok": 2})
    longest = found(result, "longest-reply")
    assert (longest.value, longest.bound, longest.says) == (8.0, ">= 2048 tokens", "unknown")


def test_a_long_reply_that_is_cut_is_the_row_s_fault(tmp_path: Path) -> None:
    async def cut(x: Exchange) -> None:
        await (loopback.cut_cleanly if b"ignore_eos" in x.body else loopback.good)(x)

    result = soak_loopback(tmp_path, "long-decode", cut, turns=2)
    assert its_own(result, "long-decode")
    assert signature_of(result) == "turn truncated"


def test_a_refusal_below_the_advertised_context_is_a_fault(tmp_path: Path) -> None:
    async def small(x: Exchange) -> None:
        if len(x.body) > 8000:
            await x.json({"error": {"message": "CUDA out of memory"}}, "500 Internal Server Error")
        else:
            await x.whole(ROLE, *loopback.words(), delta(finish="stop"), usage(len(x.body) // 4), DONE)

    result = soak_loopback(tmp_path, "long-prefill", small, parameters={"from_tokens": 256, "rungs": 4})
    assert its_own(result, "long-prefill")
    assert result.first_bad is not None
    assert result.first_bad.outcome == "http_error"
    longest = found(result, "longest-prefill").value
    assert longest is not None
    assert 256 < longest < 2000
