"""Real clients through the gateway: the openai package streams tool calls for 60 turns, and no thought is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from e2e.soaking import wait_for
from e2e.test_embedded_process import Engine, running
from gateway_process import GatewayProcess
from soakrig.engine.embedded.config import EngineConfig

Clients = Callable[[str], openai.OpenAI]
MODEL = EngineConfig().served_model_name
TURNS = 60
SMALL = ("--layers", "2", "--experts", "8", "--hidden", "64", "--threads", "1", "--max-model-len", "24000",
         "--kv-tokens", "32000")  # fmt: skip
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Part of a harness.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "depth": {"type": "integer", "minimum": 1, "maximum": 4}},
                "required": ["path", "depth"],
            },
        },
    }
    for name in ("list_dir", "read_file")
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("engine"), *SMALL) as started:
        yield started


@pytest.fixture
def client() -> Iterator[Clients]:
    """Makes clients, and closes their connections."""
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0)
        )


def stream_turn(sdk: openai.OpenAI, messages: list[Any], seed: int) -> tuple[dict[str, Any], str, int]:
    """One streamed turn as an agent keeps it, its reasoning apart, and the prompt's tokens."""
    content, thought, calls, prompt = "", "", dict[int, dict[str, Any]](), 0
    stream = sdk.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, stream=True, max_tokens=200, seed=seed,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        if chunk.usage is not None:
            prompt = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            content += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning", None) or ""
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] = part.id or call["id"]
                if part.function is not None:
                    call["function"]["name"] += part.function.name or ""
                    call["function"]["arguments"] += part.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = list(calls.values())
    return message, thought, prompt


def rendered(base: str, messages: list[Any]) -> tuple[str, int]:
    """The prompt as the engine's template renders it, and its length in tokens."""
    asked = {"model": MODEL, "messages": messages, "tools": TOOLS, "return_token_strs": True}
    answer = httpx.post(f"{base}/tokenize", json=asked, timeout=30.0).json()
    return "".join(answer["token_strs"]), answer["count"]


def blocks(prompt: str) -> list[str]:
    """The thinking blocks of a rendered prompt, but for the one that the answer is about to begin."""
    return [part.partition("</think>")[0] for part in prompt.split("<think>")[1:-1]]


def test_60_turns_with_the_openai_package_render_every_earlier_thought(
    engine: Engine, tmp_path: Path, client: Clients
) -> None:
    with GatewayProcess(tmp_path, engine.base, "--policy", "restore_reasoning") as gateway:
        sdk = client(gateway.url)
        messages: list[Any] = [{"role": "user", "content": "Find the parser and say what it does."}]
        thoughts: list[str] = []
        prompts: list[int] = []
        with_calls = 0
        for turn in range(TURNS):
            through, expected = rendered(gateway.url, messages)
            assert blocks(through) == thoughts
            message, thought, prompt = stream_turn(sdk, messages, seed=turn)
            assert prompt == expected, "the engine's prompt is the one that was rendered with every thought"
            assert thought
            assert not any(key.startswith("reasoning") for key in message)
            thoughts.append(thought)
            prompts.append(prompt)
            messages.append(message)
            with_calls += "tool_calls" in message
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": f"{turn}: three files."}
                for call in message.get("tool_calls", ())
            ]
            if "tool_calls" not in message:
                messages.append({"role": "user", "content": f"Go on, step {turn}."})
        assert 20 < with_calls < TURNS, "answers with and without calls were restored"
        through, restored = rendered(gateway.url, messages)
        direct, bare = rendered(engine.base, messages)
        assert blocks(through) == thoughts
        assert len(thoughts) == TURNS
        assert blocks(direct) == [""] * TURNS, "this is what the engine sees without the gateway"
        assert restored - bare >= 6 * TURNS
        assert (
            gateway.metric('soakrig_gateway_policy_total{effect="request",model="upstream",policy="restore_reasoning"}')
            > 60
        )


def test_the_openai_package_sees_the_same_through_the_gateway_and_without(
    engine: Engine, tmp_path: Path, client: Clients
) -> None:
    asked: list[Any] = [{"role": "user", "content": "List the folder."}]
    with GatewayProcess(
        tmp_path, engine.base, "--policy", "sanitize_tool_tags", "--policy", "mirror_content"
    ) as gateway:
        through = stream_turn(client(gateway.url), asked, seed=3)
        direct = stream_turn(client(engine.base), asked, seed=3)
        for message in (through[0], direct[0]):
            for call in message.get("tool_calls", ()):
                call["id"] = "any"
        assert through == direct
        stream = client(gateway.url).chat.completions.create(model=MODEL, messages=asked, stream=True, max_tokens=60)
        deltas = [choice.delta for chunk in stream for choice in chunk.choices]
        mirrored = [getattr(delta, "reasoning_content", None) for delta in deltas]
        assert [one for one in mirrored if one] == [
            delta.reasoning for delta in deltas if getattr(delta, "reasoning", None)
        ]
        assert any(mirrored)
        models = [model.id for model in client(gateway.url).models.list()]
        assert models == [MODEL]


def test_the_openai_package_raises_for_every_death(tmp_path: Path, client: Clients) -> None:
    with running(tmp_path, *SMALL) as engine, GatewayProcess(tmp_path, engine.base, "--stall-timeout", "1") as gateway:
        sdk = client(gateway.url)
        with pytest.raises(openai.NotFoundError, match="there are: " + MODEL):
            sdk.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
        stream = sdk.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True, max_tokens=4000,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        engine.process.kill()
        with pytest.raises(openai.APIError, match="broke off in the middle"):
            for _ in stream:
                pass
        wait_for("the end of the engine", lambda: engine.process.poll() is not None)
        with pytest.raises(openai.InternalServerError, match="cannot be reached") as caught:
            sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        assert caught.value.status_code == 502


def test_the_openai_package_raises_for_a_silent_engine(tmp_path: Path, client: Clients) -> None:
    with running(tmp_path, *SMALL) as engine, GatewayProcess(tmp_path, engine.base, "--stall-timeout", "1") as gateway:
        engine.process.send_signal(signal.SIGSTOP)
        with pytest.raises(openai.InternalServerError, match="is silent") as silent:
            client(gateway.url).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        assert silent.value.status_code == 504
