"""The runner in this process: batching, prefix cache, preemption, aborts and limits do not change what is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_bench import TOKENIZER, Bench, prompt
from soakrig.engine.embedded.reply_script import ReplySpec
from soakrig.engine.embedded.sampling import SamplingParams

TOOL = {
    "name": "search",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
        "required": ["query", "kind"],
    },
}


def alone(number: int, length: int = 200) -> str:
    bench = Bench()
    bench.add("x", prompt(number, length))
    bench.run()
    return bench.text("x")


def test_a_batch_writes_what_each_writes_alone() -> None:
    bench = Bench(max_num_batched_tokens=128)
    for number in range(6):
        bench.add(str(number), prompt(number, 100 + 50 * number))
    bench.run()
    for number in range(6):
        assert bench.text(str(number)) == alone(number, 100 + 50 * number)
        assert bench.end(str(number))["completion_tokens"] == 41
    assert bench.runner.scheduler.pool.usage == 0.0


def test_a_cached_prefix_is_not_computed_again_and_changes_nothing() -> None:
    bench = Bench()
    bench.add("first", prompt(1))
    bench.run()
    bench.prompt_counts.clear()
    bench.add("again", prompt(1))
    bench.add("longer", prompt(1) + prompt(2, 30))
    bench.run()
    assert bench.end("first")["cached_tokens"] == 0
    assert bench.end("again")["cached_tokens"] == 192
    assert bench.end("longer")["cached_tokens"] == 192
    assert bench.text("again") == bench.text("first")
    # Cached tokens count as prompt tokens done, as they do for vLLM.
    assert sum(bench.prompt_counts) == 200 + 230
    assert bench.runner.scheduler.prefix_hits == 384
    cold = Bench(prefix_cache=False)
    cold.add("longer", prompt(1) + prompt(2, 30))
    cold.run()
    assert cold.text("longer") == bench.text("longer")
    assert cold.runner.scheduler.prefix_queries == 0


def test_a_prompt_of_whole_blocks_still_computes_its_last_token() -> None:
    bench = Bench()
    for name in ("first", "again"):
        bench.add(name, prompt(1, 192))
        bench.run()
    assert bench.end("again")["cached_tokens"] == 176
    assert bench.text("again") == bench.text("first")


def test_a_long_prompt_is_counted_chunk_by_chunk_next_to_a_decode() -> None:
    bench = Bench(max_num_batched_tokens=64)
    bench.add("short", prompt(1, 20))
    bench.step()
    bench.add("long", prompt(2, 500))
    bench.prompt_counts.clear()
    written: list[int] = []
    while bench.runner.scheduler.running[-1].in_prompt or not written:
        bench.step()
        written.append(sum(event.get("n", 0) for event in bench.events["short"]))
    assert bench.prompt_counts[0] == 63
    assert sum(bench.prompt_counts) == 500
    assert written == sorted(set(written)), "the decode waited for the prefill"


def test_blocks_running_out_preempts_the_youngest_and_changes_nothing() -> None:
    bench = Bench(kv_tokens=640, max_model_len=640, max_num_batched_tokens=64, prefix_cache=False)
    for number in range(4):
        bench.add(str(number), prompt(number, 140), ReplySpec(text_tokens=150), max_tokens=200)
    while not any("finish" in event for event in bench.events["0"]):
        bench.step()
        assert "0" in {sequence.id for sequence in bench.runner.scheduler.running} or bench.events["0"][-1]["finish"]
    bench.run()
    assert bench.runner.scheduler.preemptions > 0
    assert sum(bench.prompt_counts) == 4 * 140, "a preempted prompt was counted twice"
    for number in range(4):
        quiet = Bench()
        quiet.add("x", prompt(number, 140), ReplySpec(text_tokens=150), max_tokens=200)
        quiet.run()
        assert quiet.runner.scheduler.preemptions == 0
        assert bench.text(str(number)) == quiet.text("x")
    assert bench.runner.scheduler.pool.usage == 0.0


def test_more_requests_than_places_wait() -> None:
    bench = Bench(max_num_seqs=2)
    for number in range(5):
        bench.add(str(number), prompt(number, 40))
    bench.step()
    assert len(bench.runner.scheduler.running) == 2
    assert len(bench.runner.scheduler.waiting) == 3
    bench.run()
    assert all(bench.end(str(number))["finish"] == "stop" for number in range(5))


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_an_abort_frees_the_blocks(steps: int) -> None:
    bench = Bench(max_num_batched_tokens=64)
    bench.add("x", prompt(1))
    for _ in range(steps):
        bench.step()
    assert bench.runner.scheduler.abort("x")
    assert not bench.runner.scheduler.abort("x")
    assert bench.runner.scheduler.pool.usage == 0.0
    assert not bench.runner.scheduler.has_work


def test_a_seed_repeats_a_hot_reply_and_another_seed_does_not() -> None:
    bench = Bench()
    for name, seed in (("a", 1), ("b", 1), ("c", 2), ("d", None), ("e", None)):
        bench.add(name, prompt(1), sampling=SamplingParams(temperature=1.0, seed=seed))
        bench.run()
    assert bench.text("a") == bench.text("b")
    assert len({bench.text(name) for name in "acde"}) == 4


def test_the_same_seed_replies_differently_to_another_prompt() -> None:
    bench = Bench()
    spec = ReplySpec(thinking=True, tools=[TOOL], call=None)
    for number in range(24):
        bench.add(str(number), prompt(number), spec, sampling=SamplingParams(seed=0), max_tokens=500)
    bench.run()
    reasons = [bench.end(str(number))["finish"] for number in range(24)]
    assert {"stop", "tool_calls"} == set(reasons)
    assert reasons.count("tool_calls") > reasons.count("stop")
    assert len({bench.end(str(number))["completion_tokens"] for number in range(24)}) > 8


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_call_is_whole_and_thinking_comes_first(logprobs: int | None) -> None:
    bench = Bench()
    spec = ReplySpec(thinking=True, tools=[TOOL, {"name": "search_all", "parameters": {}}], call=True)
    bench.add("x", prompt(3), spec, max_tokens=500, logprobs=logprobs)
    bench.run()
    kinds = [event["c"] for event in bench.events["x"] if event.get("t")]
    assert kinds[0] == "reasoning"
    assert kinds.index("name") > max(place for place, kind in enumerate(kinds) if kind == "reasoning")
    assert bench.text("x", "name") in ("search", "search_all")
    arguments = json.loads(bench.text("x", "arguments"))
    assert isinstance(arguments, dict)
    assert bench.end("x")["finish"] == "tool_calls"
    counted = sum(event.get("n", 0) for event in bench.events["x"])
    assert counted == bench.end("x")["completion_tokens"]
    if logprobs is not None:
        rows = [row for event in bench.events["x"] for row in event.get("lp", ())]
        assert len(rows) == counted
        assert all(len(row) in (2, 3) and row[0][1] <= 0.0 for row in rows)


@pytest.mark.parametrize("limit", [1, 2, 5, 9, 14, 20, 30])
def test_a_limit_cuts_a_call_and_says_so(limit: int) -> None:
    full = Bench()
    spec = ReplySpec(tools=[TOOL], call=True)
    full.add("x", prompt(3), spec, max_tokens=500)
    full.run()
    bench = Bench()
    bench.add("x", prompt(3), spec, max_tokens=limit)
    bench.run()
    end = bench.end("x")
    needed = full.end("x")["completion_tokens"]
    assert end["completion_tokens"] == min(limit, needed)
    assert end["finish"] == ("length" if limit < needed else "tool_calls")
    assert full.text("x", "arguments").startswith(bench.text("x", "arguments"))


def test_a_stop_string_ends_the_text_before_it() -> None:
    whole = alone(4)
    stop = whole[20:26]
    bench = Bench()
    bench.add("x", prompt(4), stop=[stop, "never there"])
    bench.run()
    assert bench.text("x") == whole[: whole.index(stop)]
    assert bench.end("x")["finish"] == "stop"


def test_one_token_repeats_to_the_limit() -> None:
    bench = Bench()
    bench.add("x", prompt(1), ReplySpec(one_token=77), max_tokens=50)
    bench.run()
    assert bench.text("x") == TOKENIZER.text_of[77] * 50
    assert bench.end("x")["finish"] == "length"


def test_prompt_logprobs_are_the_same_in_chunks_and_skip_the_cache() -> None:
    rows: list[Any] = []
    for budget in (2048, 50):
        bench = Bench(max_num_batched_tokens=budget)
        bench.add("warm", prompt(1))
        bench.run()
        bench.add("x", prompt(1), prompt_logprobs=3, max_tokens=4)
        bench.run()
        rows.append(bench.events["x"][0]["prompt_logprobs"])
        assert bench.end("x")["cached_tokens"] == 0
    one, other = rows
    assert one[0] is None
    assert len(one) == len(other) == 200
    for place in range(1, 200):
        assert one[place][0][0] == prompt(1)[place]
        assert one[place][0][1] == pytest.approx(other[place][0][1], abs=1e-3)
        assert [row[2] for row in one[place][1:]] == sorted(row[2] for row in one[place][1:])


def test_prompt_logprobs_come_once_after_a_preemption() -> None:
    bench = Bench(max_num_batched_tokens=50)
    bench.add("x", prompt(1), prompt_logprobs=1, max_tokens=4)
    bench.step()
    bench.step()
    (sequence,) = bench.runner.scheduler.running
    bench.runner.scheduler._preempt(sequence)
    bench.run()
    (rows,) = (event["prompt_logprobs"] for event in bench.events["x"] if "prompt_logprobs" in event)
    assert [row[0][0] for row in rows[1:]] == prompt(1)[1:]


def test_logprobs_of_a_reply_are_those_of_the_same_tokens_in_a_prompt() -> None:
    bench = Bench()
    bench.add("x", prompt(3), ReplySpec(tools=[TOOL], call=True), max_tokens=500, logprobs=0)
    bench.run()
    rows = [row for event in bench.events["x"] for row in event.get("lp", ())]
    bench.add("check", prompt(3) + [row[0][0] for row in rows], prompt_logprobs=0, max_tokens=1)
    bench.run()
    checked = bench.events["check"][0]["prompt_logprobs"][200:]
    assert [row[0][1] for row in rows] == pytest.approx([row[0][1] for row in checked], abs=1e-3)


def test_a_schema_that_cannot_be_written_ends_only_its_own_request() -> None:
    endless: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    bench = Bench()
    bench.add("bad", prompt(1), ReplySpec(tools=[{"name": "f", "parameters": endless}], call=True), max_tokens=900)
    bench.add("good", prompt(2))
    bench.run()
    assert "nests more than" in bench.events["bad"][-1]["error"]
    assert bench.text("good") == alone(2)
    assert bench.runner.scheduler.pool.usage == 0.0
