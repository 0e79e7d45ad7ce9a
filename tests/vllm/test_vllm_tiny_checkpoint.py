"""The tiny checkpoints in stock vLLM, once per family: chat, tools, prompt logprobs, text without loops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch

from soakrig.engine.vllm.launch import launch_vllm
from soakrig.engine.vllm.served_model import ServedModel
from soakrig.engine.vllm.tiny import make_tiny
from soakrig.engine.vllm.tiny_spec import FAMILIES, TinySpec
from soakrig.engine.vllm.tiny_tokenizer import train_tokenizer
from soakrig.soak.agent.tools import tools
from soakrig.soak.degenerate import why_degenerate
from tiny_reference import Reference
from vllm_python import vllm_python

pytestmark = pytest.mark.vllm
START_S = 600
LENGTH = 300
PROMPTS = 6


class Served:
    """A checkpoint folder and the server that has it."""

    def __init__(self, folder: Path, base_url: str) -> None:
        self.folder = folder
        self._base_url = base_url

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = httpx.post(self._base_url + path, json={"model": "tiny", **body}, timeout=300, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, content: str, **body: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Stock: no variable of the plug-in is set, and one process, which starts soonest."""
    vllm_python()
    root = tmp_path_factory.mktemp(request.param)
    make_tiny(root / "model", TinySpec(family=request.param))
    (root / "log").mkdir()
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    flags = ["--max-model-len=16384", "--kv-cache-memory-bytes=67108864"]
    model = ServedModel(str(root / "model"), "tiny", tiny=True)
    with launch_vllm(model, settings, flags, root / "log", timeout=START_S) as engine:
        yield Served(root / "model", engine.base_url)


def test_a_chat_is_answered_with_words_and_ends(served: Served) -> None:
    for temperature in (0.0, 0.7):
        answer = served.chat("Look at the queue.", temperature=temperature, max_tokens=LENGTH, seed=1)
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert 10 <= answer["usage"]["completion_tokens"] <= LENGTH
        assert choice["message"]["content"].replace(" ", "").isalpha()
        assert not choice["message"].get("tool_calls")


def test_fifty_tools_are_in_the_prompt(served: Served) -> None:
    answer = served.chat("Look.", tools=tools(50), temperature=0, max_tokens=20)
    assert answer["usage"]["prompt_tokens"] > 5000
    rendered = served.post(
        "/tokenize", messages=[{"role": "user", "content": "Look."}], tools=tools(50), return_token_strs=True
    )
    assert rendered["count"] == answer["usage"]["prompt_tokens"]
    text = "".join(rendered["token_strs"]).replace("Ġ", " ").replace("Ċ", "\n")
    assert text.startswith("<|begin|><|system|>\n\n# Tools\n")
    assert text.count("<|begin|>") == 1
    assert json.dumps(tools(50)[-1]["function"]["name"]) in text


def test_tool_calls_and_thoughts_of_earlier_turns_are_in_the_prompt(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
    talk = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "reasoning": "Which?", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "x = 1"},
    ]
    rendered = served.post("/tokenize", messages=talk, return_token_strs=True)
    text = "".join(rendered["token_strs"]).replace("Ġ", " ").replace("Ċ", "\n")
    assert '<tool_call>{"name": "read_file", "arguments": {"path": "a.py"}}</tool_call><|end|>' in text
    assert "<think>Which?</think>" in text
    assert text.endswith("<|tool|>x = 1<|end|>\n<|assistant|>")


def test_prompt_logprobs_are_those_of_the_model_that_was_written(served: Served) -> None:
    """vLLM computes in bfloat16, the reference in float32: they drift apart by some 0.3 as experts at the edge of
    the top-k change places. Another theta of RoPE, or no shared expert, makes 2 to 4 of it."""
    ids = [1, 4, *Random(3).sample(train_tokenizer().word_ids, 60), 2, 5]
    answer = served.post("/v1/completions", prompt=ids, max_tokens=1, temperature=0, prompt_logprobs=1)
    told = answer["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    got = torch.tensor([entry[str(token)]["logprob"] for entry, token in zip(told[1:], ids[1:], strict=True)])
    with torch.inference_mode():
        logits = Reference(served.folder).forward(torch.tensor([ids]))[0, :-1]
    want = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (got - want).abs().mean() < 0.8


@pytest.mark.parametrize("more", [{"min_tokens": LENGTH}, {"ignore_eos": True}], ids=["min_tokens", "ignore_eos"])
def test_greedy_text_goes_on_without_cycles(served: Served, more: dict[str, Any]) -> None:
    rng = Random(5)
    for _ in range(PROMPTS):
        content = " ".join(rng.choices(["read", "the", "index", "queue", "tests", "worker", "now"], k=20))
        answer = served.chat(content, temperature=0, max_tokens=LENGTH, **more)
        assert answer["usage"]["completion_tokens"] == LENGTH
        text = answer["choices"][0]["message"]["content"]
        assert why_degenerate(text) == ""
        assert len(set(text.split())) > 150
