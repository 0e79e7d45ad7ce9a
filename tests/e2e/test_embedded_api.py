"""The embedded engine's HTTP endpoints against a running engine: shapes, streams, tools, log-probabilities, limits."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from e2e.test_embedded_process import Engine, Json, body, events, running, until

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does one thing to a file.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "mode": {"enum": ["fast", "slow", "naïve"]},
                    "limit": {"type": "integer", "minimum": 1, "maximum": 9},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["path", "mode"],
            },
        },
    }
    for name in ("read_file", "read_file_lines", "delete")
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("api"), "--max-model-len", "6000", "--kv-tokens", "24000") as started:
        yield started


def streamed(engine: Engine, content: str, **fields: Any) -> tuple[list[Json], str]:
    """All chunks of a stream, and what ended it."""
    with engine.stream(content, **fields) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last = list(events(response))
    return [json.loads(chunk) for chunk in chunks], last


def deltas(chunks: list[Json], key: str) -> str:
    return "".join(chunk["choices"][0]["delta"].get(key) or "" for chunk in chunks if chunk["choices"])


def test_a_stream_has_role_first_then_reasoning_then_text_then_finish_usage_and_done(engine: Engine) -> None:
    chunks, last = streamed(engine, "Hello", stream_options={"include_usage": True}, seed=1)
    assert last == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    kinds = [next(iter(chunk["choices"][0]["delta"]), "end") for chunk in chunks[1:-1]]
    assert re.fullmatch("(reasoning )+(content )+end", " ".join(kinds))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    usage = chunks[-1]["usage"]
    assert chunks[-1]["choices"] == []
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 20 < usage["completion_tokens"] < 140
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_is_left_out_unless_asked_for(engine: Engine) -> None:
    chunks, last = streamed(engine, "Hello", seed=1)
    assert last == "[DONE]"
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    chunks, _ = streamed(engine, "Hi", stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1


@pytest.mark.parametrize("seed", range(6))
def test_a_streamed_tool_call_parses_and_satisfies_its_schema(engine: Engine, seed: int) -> None:
    chunks, last = streamed(engine, "Read it", tools=TOOLS, tool_choice="required", seed=seed)
    assert last == "[DONE]"
    parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert parts[0]["id"].startswith("call_")
    assert (parts[0]["index"], parts[0]["type"]) == (0, "function")
    assert parts[0]["function"]["name"] in ("read_file", "read_file_lines", "delete")
    assert all(set(part) == {"index", "function"} and set(part["function"]) == {"arguments"} for part in parts[1:])
    arguments = json.loads("".join(part["function"]["arguments"] for part in parts))
    assert isinstance(arguments["path"], str)
    assert arguments["mode"] in ("fast", "slow", "naïve")
    assert 1 <= arguments.get("limit", 1) <= 9
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert deltas(chunks, "content") == ""


def test_whole_and_streamed_answers_agree(engine: Engine) -> None:
    fields: Json = {"tools": TOOLS, "tool_choice": "required", "seed": 3}
    message = engine.chat("Read it", **fields).json()["choices"][0]["message"]
    chunks, _ = streamed(engine, "Read it", **fields)
    parts = [part["function"] for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    call = message["tool_calls"][0]["function"]
    assert call == {"name": parts[0]["name"], "arguments": "".join(part["arguments"] for part in parts)}
    assert message["content"] is None
    assert message["reasoning"] == deltas(chunks, "reasoning")


def test_tool_choice_is_obeyed(engine: Engine) -> None:
    named = {"type": "function", "function": {"name": "delete"}}
    message = engine.chat("x", tools=TOOLS, tool_choice=named).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "delete"
    for seed in range(8):
        assert (
            engine.chat("x", tools=TOOLS, tool_choice="none", seed=seed).json()["choices"][0]["finish_reason"] == "stop"
        )
    reasons = [engine.chat("x", tools=TOOLS, seed=seed).json()["choices"][0]["finish_reason"] for seed in range(20)]
    assert set(reasons) == {"stop", "tool_calls"}


def test_thinking_can_be_switched_off(engine: Engine) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message = engine.chat("x", **off).json()["choices"][0]["message"]
    assert message["reasoning"] is None
    assert message["content"]
    assert engine.chat("x").json()["choices"][0]["message"]["reasoning"]


def test_the_same_seed_repeats_and_greedy_repeats(engine: Engine) -> None:
    def text(**fields: Any) -> str:
        message = engine.chat("Tell me", **fields).json()["choices"][0]["message"]
        return f"{message['reasoning']}|{message['content']}"

    assert text(seed=5) == text(seed=5) != text(seed=6)
    assert text(temperature=0) == text(temperature=0)
    assert text() != text()


def test_a_conversation_is_taken_from_the_cache_turn_by_turn(engine: Engine) -> None:
    messages: list[Json] = [{"role": "system", "content": "Work. " * 200}, {"role": "user", "content": "Go"}]
    before = 0
    for turn in range(4):
        answer = engine.client.post(
            "/v1/chat/completions", json={"messages": messages, "tools": TOOLS, "seed": turn}
        ).json()
        usage, message = answer["usage"], answer["choices"][0]["message"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= before - 16
        assert usage["prompt_tokens_details"]["cached_tokens"] % 16 == 0
        before = usage["prompt_tokens"]
        messages.append({key: message[key] for key in ("role", "content", "reasoning", "tool_calls")})
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "x\n" * 40} for call in message["tool_calls"]
        ]
        messages += results
        messages.append({"role": "user", "content": "And now?"})


def test_logprobs_cover_every_token(engine: Engine) -> None:
    answer = engine.chat("x", logprobs=True, top_logprobs=3, temperature=0, max_tokens=12).json()
    rows = answer["choices"][0]["logprobs"]["content"]
    assert len(rows) == answer["usage"]["completion_tokens"] == 12
    for row in rows:
        assert len(row["top_logprobs"]) == 3
        values = [one["logprob"] for one in row["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert row["logprob"] <= values[0] <= 0
        assert bytes(row["bytes"]).decode() == row["token"]
    chunks, _ = streamed(engine, "x", logprobs=True, top_logprobs=3, temperature=0, max_tokens=12)
    sent = [row for chunk in chunks for row in (chunk["choices"][0]["logprobs"] or {}).get("content", ())]
    assert [row["token"] for row in sent] == [row["token"] for row in rows]


@pytest.mark.parametrize("path", ["chat", "completion"])
def test_prompt_logprobs_have_vllms_shape(engine: Engine, path: str) -> None:
    if path == "chat":
        answer = engine.chat("one two three", prompt_logprobs=2, max_tokens=1).json()
        rows = answer["prompt_logprobs"]
    else:
        answer = engine.client.post(
            "/v1/completions", json={"prompt": "one two three", "prompt_logprobs": 2, "max_tokens": 1}
        ).json()
        rows = answer["choices"][0]["prompt_logprobs"]
    assert len(rows) == answer["usage"]["prompt_tokens"]
    assert rows[0] is None
    for row in rows[1:]:
        assert 2 <= len(row) <= 3
        assert all(key.isdecimal() and set(one) == {"logprob", "rank", "decoded_token"} for key, one in row.items())
        assert {1, 2} <= {one["rank"] for one in row.values()}


def test_completions_take_text_and_ids_and_run_to_their_limit(engine: Engine) -> None:
    ids = engine.client.post("/tokenize", json={"prompt": "def f(x):"}).json()["tokens"]
    answers = [
        engine.client.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": 30, "temperature": 0, "logprobs": 1}
        ).json()
        for prompt in ("def f(x):", ids)
    ]
    one, other = (answer["choices"][0] for answer in answers)
    assert one["text"] == other["text"] == "".join(one["logprobs"]["tokens"])
    assert one["finish_reason"] == "length"
    assert answers[0]["usage"]["completion_tokens"] == 30 == len(one["logprobs"]["token_logprobs"])
    with engine.client.stream(
        "POST", "/v1/completions", json={"prompt": ids, "max_tokens": 30, "temperature": 0, "stream": True}
    ) as response:
        *chunks, last = list(events(response))
    assert last == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == one["text"]
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"


def test_max_tokens_cuts_and_says_length(engine: Engine) -> None:
    answer = engine.chat("x", max_tokens=3).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    cut = engine.chat("x", tools=TOOLS, tool_choice="required", max_completion_tokens=45, seed=2).json()
    assert cut["choices"][0]["finish_reason"] in ("length", "tool_calls")


def test_tokenize_counts_what_a_chat_would_be_charged(engine: Engine) -> None:
    counted = engine.client.post("/tokenize", json={**body("Count me"), "tools": TOOLS}).json()
    charged = engine.chat("Count me", tools=TOOLS, max_tokens=1).json()["usage"]["prompt_tokens"]
    assert counted["count"] == charged == len(counted["tokens"])
    assert counted["max_model_len"] == 6000


def test_what_does_not_fit_is_refused_with_both_numbers(engine: Engine) -> None:
    answer = engine.chat("x", max_tokens=7000)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    prompt = engine.chat("x", max_tokens=1).json()["usage"]["prompt_tokens"]
    assert f"the maximum context length is 6000 tokens, but {prompt + 7000} were requested" in error["message"]
    assert engine.chat("word " * 7000).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "said"),
    [
        ("POST", "/v1/chat/completions", body("x", temprature=1), 400, "temprature"),
        ("POST", "/v1/chat/completions", body("x", model="gpt"), 404, "'gpt'"),
        (
            "POST",
            "/v1/chat/completions",
            body("x", tools=[{"function": {"name": "f", "parameters": {"type": "x"}}}]),
            400,
            "'x'",
        ),
        ("POST", "/v1/completions", {"prompt": []}, 400, "empty"),
        ("POST", "/v1/completions", {"prompt": [9999]}, 400, "9999"),
        ("POST", "/v1/embeddings", {}, 404, "/v1/embeddings"),
        ("GET", "/v1/chat/completions", None, 405, "GET"),
    ],
)
def test_refusals_are_openai_errors(
    engine: Engine, method: str, path: str, content: Any, status: int, said: str
) -> None:
    answer = engine.client.request(method, path, json=content)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_requests_share_steps(engine: Engine) -> None:
    results: list[Json] = []

    def one(number: int) -> None:
        results.append(engine.chat(f"Number {number}", max_tokens=300, ignore_eos=True, seed=number).json())

    steps = engine.metric("vllm:iteration_tokens_total_count")
    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    until(lambda: engine.metric("vllm:num_requests_running") >= 4, "requests to run together")
    for thread in threads:
        thread.join()
    assert [result["usage"]["completion_tokens"] for result in results] == [300] * 6
    assert engine.metric("vllm:iteration_tokens_total_count") - steps < 1200


def test_counters_count_what_usage_says(engine: Engine) -> None:
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    )
    before = {name: engine.metric(name) for name in names}
    usages = [engine.chat("Count " * 50, seed=1).json()["usage"] for _ in range(2)]
    moved = [engine.metric(name) - before[name] for name in names]
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    assert moved == [
        prompt,
        sum(usage["completion_tokens"] for usage in usages),
        prompt,
        usages[1]["prompt_tokens_details"]["cached_tokens"],
    ]
    text = engine.client.get("/metrics").text
    for name in (
        "vllm:iteration_tokens_total_bucket",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        'vllm:request_success_total{finished_reason="stop"',
        "vllm:time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_sum",
    ):
        assert name in text
    assert "_created" not in text


def test_a_scrape_is_cheap(engine: Engine) -> None:
    began = time.perf_counter()
    for _ in range(40):
        engine.client.get("/metrics")
    # Some 0.7 ms here; the room is for a busy machine.
    assert (time.perf_counter() - began) / 40 < 0.02


def test_a_seven_thousand_token_prompt_and_its_resend_are_fast(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        text = "".join(f"- entry {number}: the parser reads one line of input\n" for number in range(640))
        answer, first = _timed(engine, text)
        assert 7000 < answer["usage"]["prompt_tokens"] < 10000
        assert first < 6.0
        again, second = _timed(engine, text + "and a little more")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 7000
        assert second < first
        resident = engine.worker.memory_info().rss + psutil.Process(engine.process.pid).memory_info().rss
        assert resident < 1.2 * 2**30


def _timed(engine: Engine, text: str) -> tuple[Json, float]:
    began = time.monotonic()
    return engine.chat(text, max_tokens=1).json(), time.monotonic() - began


def test_the_settings_say_what_is_in_force(engine: Engine) -> None:
    report = engine.client.get("/soakrig/settings").json()
    assert set(report) == {
        "engine", "version", "pid", "worker_pid", "settings", "config", "plant", "simulated", "offload",
    }  # fmt: skip
    assert report["pid"] == engine.process.pid
    assert report["config"]["max_model_len"] == 6000
    assert report["settings"]["VLLM_MOE_DMA_STAGING"] == {"value": 1, "source": "default", "obeyed": True}
    assert (report["plant"], report["simulated"]) == (None, False)
