"""Log-probabilities asked for beside the load: of a prompt's own tokens, and of the token that would follow it.

Both go to ``/v1/completions`` in vLLM's form (``prompt_logprobs`` of the choice; ``logprobs.top_logprobs``). Prompt
log-probabilities are always computed anew: vLLM and the embedded engine read no prefix cache for them. What a cached
prefix does to the numbers shows in the next token's alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from soakrig.record.finding import Weight
from soakrig.soak.reply import token_count
from soakrig.soak.request import Message
from soakrig.soak.stage import Stage

TOP = 20
"""Alternatives asked for: the most that vLLM gives unless told otherwise (--max-logprobs)."""


class NotOfferedError(Exception):
    """The engine does not give these figures; the text says what it answered. ``says``: what a finding makes of that
    where the figure is no must: an engine that does not have them is a note, one that failed to give them is not."""

    def __init__(self, text: str, says: Weight = "note") -> None:
        super().__init__(text)
        self.says: Weight = says


@dataclass(frozen=True)
class NextToken:
    """``row``: the likeliest next tokens, text -> logprob in nats. ``cached``: prompt tokens that came from the prefix
    cache, None where the engine does not say."""

    row: dict[str, float]
    cached: int | None


async def next_token(stage: Stage, prompt: str | list[int], *, fresh: bool = False) -> NextToken:
    """What would follow a prompt. ``fresh``: with the prompt's own logprobs asked for as well, so that no prefix cache
    is read. Raises ``NotOfferedError``."""
    more = {"prompt_logprobs": 0} if fresh else {}
    choice = await _completion(stage, {"prompt": prompt, "logprobs": TOP, **more})
    try:
        row = {str(token): float(value) for token, value in choice["logprobs"]["top_logprobs"][0].items()}
        return NextToken(row, choice["cached"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise NotOfferedError(f"no logprobs.top_logprobs in the answer: {choice!r:.160}") from error


async def prompt_logprobs(stage: Stage, prompt: str | list[int]) -> list[float]:
    """The logprob of each token of a prompt but its first. Raises ``NotOfferedError``."""
    choice = await _completion(stage, {"prompt": prompt, "prompt_logprobs": 0})
    rows: Any = choice.get("prompt_logprobs")
    try:
        return [float(next(iter(row.values()))["logprob"]) for row in rows[1:]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise NotOfferedError(f"no prompt_logprobs in the answer: {choice!r:.160}") from error


async def tokens_of(stage: Stage, **what: Any) -> list[int]:
    """Token ids by the engine's own ``/tokenize``: of ``prompt=``, or of ``messages=`` with ``tools=`` through its chat
    template. Raises ``NotOfferedError``."""
    data = await _asked(stage, "/tokenize", {"model": stage.probe.model, **what})
    ids = data.get("tokens")
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise NotOfferedError(f"no tokens in the answer of /tokenize: {data!r:.160}")
    return ids


async def rendered(stage: Stage, messages: Sequence[Message], tools: Sequence[Message], lead: str) -> list[int]:
    """The prompt of a conversation as its model reads it, the beginning of the reply and then ``lead`` behind it.
    Raises ``NotOfferedError``."""
    more = {"tools": list(tools)} if tools else {}
    ids = await tokens_of(stage, messages=list(messages), add_generation_prompt=True, **more)
    return ids + await tokens_of(stage, prompt=lead, add_special_tokens=False)


def drift(one: dict[str, float], other: dict[str, float]) -> float:
    """Mean absolute difference in nats over the tokens of either; a token that the other lacks has at most the least
    that is listed there. Infinity where either is empty or holds no number."""
    if not one or not other:
        return math.inf
    floors = min(one.values()), min(other.values())
    gaps = [abs(one.get(token, floors[0]) - other.get(token, floors[1])) for token in one.keys() | other.keys()]
    mean = sum(gaps) / len(gaps)
    return mean if math.isfinite(mean) else math.inf


def same_first(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether the likeliest token is the same."""
    return bool(one and other) and max(one, key=lambda t: one[t]) == max(other, key=lambda t: other[t])


async def _completion(stage: Stage, fields: dict[str, Any]) -> dict[str, Any]:
    body = {"model": stage.probe.model, "max_tokens": 1, "temperature": 0, **fields}
    data = await _asked(stage, "/v1/completions", body)
    try:
        choice: dict[str, Any] = dict(data["choices"][0])
        details = (data.get("usage") or {}).get("prompt_tokens_details") or {}
        return {**choice, "cached": token_count(details.get("cached_tokens"))}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise NotOfferedError(f"/v1/completions gave no choice: {data!r:.160}") from error


async def _asked(stage: Stage, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await stage.post(path, body)
    if answer is None:
        raise NotOfferedError(f"POST {path} was not answered", "unknown")
    if answer.status_code != 200:
        said = answer.text[:160].strip() or "an empty body"
        says = "unknown" if answer.status_code >= 500 and answer.status_code != 501 else "note"
        raise NotOfferedError(f"POST {path} answered {answer.status_code}: {said}", says)
    try:
        data = orjson.loads(answer.content)
    except orjson.JSONDecodeError as error:
        raise NotOfferedError(f"POST {path} answered no JSON: {answer.text[:80]!r}") from error
    if not isinstance(data, dict):
        raise NotOfferedError(f"POST {path} answered no object: {answer.text[:80]!r}")
    return data
