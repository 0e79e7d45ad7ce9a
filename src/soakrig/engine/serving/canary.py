"""A generation that has to be answered sensibly. A flag such as /health stays up on a frozen engine, and an engine with
broken kernels answers one token for ever without an error."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from soakrig.engine.registry_entry import Canary

Verdict = Literal["sensible", "nonsense", "error", "silent", "refused"]
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_count")
CONNECT_S = 2.0
LEAST_CYCLES = 4
LEAST_CHARACTERS = 8
GARBAGE_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. ``text``: of the answer, or why there is none; ``seconds``: how long it took. ``refused``: nobody
    listens; ``silent``: somebody listens and does not answer; ``moving``: while silent, the engine's token counters
    grew, so that it works for others."""

    verdict: Verdict
    text: str
    seconds: float = 0.0
    moving: bool = False


def ask(base_url: str, model: str, canary: Canary, timeout: float | None = None) -> Answer:
    """Send the canary; ``timeout`` None: its own. Never raises."""
    timeout = canary.timeout_s if timeout is None else timeout
    body = {
        "model": model,
        "messages": [{"role": "user", "content": canary.prompt}],
        "max_tokens": canary.max_tokens,
        "temperature": 0,
    }
    limits = httpx.Timeout(timeout, connect=CONNECT_S)
    began = time.monotonic()
    with httpx.Client(base_url=base_url, timeout=limits, trust_env=False) as client:
        before = _counters(client)
        try:
            reply = client.post("/v1/chat/completions", json=body)
        except httpx.ConnectError as error:
            return Answer("refused", f"nobody listens: {error}")
        except httpx.TimeoutException:
            moving = before is not None and (_counters(client) or before) != before
            return Answer("silent", f"no answer within {timeout:g} s", time.monotonic() - began, moving)
        except httpx.HTTPError as error:
            return Answer("error", f"the connection broke: {error}", time.monotonic() - began)
    seconds = time.monotonic() - began
    if reply.status_code != 200:
        return Answer("error", f"status {reply.status_code}: {reply.text[:300].strip()}", seconds)
    try:
        text, tokens = _read(reply.json())
    except (ValueError, LookupError, TypeError, AttributeError):
        return Answer("error", f"no chat completion: {reply.text[:300].strip()}", seconds)
    why = judge(text, tokens, canary)
    return Answer("nonsense", why, seconds) if why else Answer("sensible", text, seconds)


def judge(text: str, tokens: int, canary: Canary) -> str:
    """Why an answer is none, else an empty string."""
    if canary.expect and not re.search(canary.expect, text):
        return f"{text[:200]!r} does not have {canary.expect!r} in it"
    if canary.accept == "anything":
        return "" if tokens or text else "not one token was generated"
    if not text.strip():
        return "the answer is empty"
    garbage = text.count("\0") + text.count("\ufffd")
    if garbage >= GARBAGE_SHARE * len(text):
        return f"{garbage} of {len(text)} characters are NUL or U+FFFD"
    period = _period(text)
    if len(text) >= LEAST_CHARACTERS and len(text) >= LEAST_CYCLES * period:
        return f"it is {text[:period]!r} over and over"
    return ""


def _period(text: str) -> int:
    """The shortest length at which ``text`` repeats itself from beginning to end, its own where it does not (the last
    border of the prefix function)."""
    border = [0] * len(text)
    k = 0
    for i in range(1, len(text)):
        while k and text[i] != text[k]:
            k = border[k - 1]
        k += text[i] == text[k]
        border[i] = k
    return len(text) - border[-1]


def _read(answer: Any) -> tuple[str, int]:
    """Everything that was said (reasoning, content, calls), and the number of tokens."""
    message = answer["choices"][0]["message"]
    parts = [message.get(name) or "" for name in ("reasoning", "reasoning_content", "content")]
    parts += [f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls") or ()]
    return " ".join(part for part in parts if part), int((answer.get("usage") or {}).get("completion_tokens", 0))


def _counters(client: httpx.Client) -> dict[str, float] | None:
    """The engine's own token counters, None where it shows none."""
    try:
        reply = client.get("/metrics", timeout=CONNECT_S)
    except httpx.HTTPError:
        return None
    found: dict[str, float] = {}
    for line in reply.text.splitlines():
        if line.startswith(COUNTERS):
            name, _, value = line.rpartition(" ")
            try:
                found[name] = float(value)
            except ValueError:
                continue
    return found or None
