"""Prompts that an engine has never seen, and what it makes of their tokens: computed afresh, or from a cached prefix.

``prompt_logprobs`` gives the likeliest tokens at every place of a prompt, and always computes it whole: neither vLLM
nor the embedded engine reads its prefix cache for it. What a cached prefix does shows in the next token after a prompt
that the engine has seen before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from soakrig.errors import InconclusiveError, PreflightRefusedError
from soakrig.soak.client import ChatClient
from soakrig.soak.transcripts.filler import WORDS

TOP = 5
"""Alternatives asked for at each place."""
_UNKNOWN = "�"
WHY_NO_TEXT = (
    "equal greedy text is no evidence, and different text is none either: where two tokens are nearly as likely, "
    "rounding that no user would notice picks the other one and the rest of the text follows from it, while a broken "
    "expert that changes numbers everywhere may leave every choice as it was. Prompt log-probabilities show both"
)


@dataclass(frozen=True)
class Top:
    """The likeliest tokens at one place -> logprob in nats. ``floor``: what a token that is not listed has at most;
    ``first``: the likeliest, empty where it has no text of its own."""

    values: dict[str, float]
    floor: float
    first: str


@dataclass(frozen=True)
class Scored:
    """A fresh prompt's places, from its second token on: ``rows[i]`` is before token i + 1, its tokens by id;
    ``texts[i]`` the same by text. ``cached_tokens`` None: the engine does not say."""

    rows: list[Top]
    texts: list[Top]
    cached_tokens: int | None


class EngineGoneError(InconclusiveError):
    """The engine stopped answering in mid-measurement."""


@dataclass
class Scorer:
    """Asks one engine, one request at a time: requests that share a step round differently by themselves."""

    client: ChatClient
    model: str

    async def tokens(self, text: str) -> list[int]:
        """Ids by the engine's own tokenizer. Raises ``PreflightRefusedError`` where it has none to ask."""
        answer = await self._post("/tokenize", {"model": self.model, "prompt": text})
        ids = answer.get("tokens")
        if not isinstance(ids, list) or not ids:
            raise _refused("/tokenize", answer)
        return ids

    async def fresh(self, ids: list[int]) -> Scored:
        """Every place of a prompt. Raises ``PreflightRefusedError`` where the engine gives no prompt logprobs."""
        answer = await self._completion({"prompt": ids, "prompt_logprobs": TOP})
        try:
            rows = answer["choices"][0]["prompt_logprobs"]
            tops = [_tops(row) for row in rows[1:]]
            return Scored([by_id for by_id, _ in tops], [by_text for _, by_text in tops], _cached(answer))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise _refused("prompt_logprobs", answer) from error

    async def text(self, ids: list[int]) -> list[tuple[float, Top]]:
        """Logprob of each token of a text but its first, and what is likeliest there. Raises as ``fresh``."""
        answer = await self._completion({"prompt": ids, "prompt_logprobs": TOP})
        try:
            rows = answer["choices"][0]["prompt_logprobs"][1:]
            own = [float(row[str(token)]["logprob"]) for row, token in zip(rows, ids[1:], strict=True)]
            return [(value, _tops(row)[0]) for value, row in zip(own, rows, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise _refused("prompt_logprobs", answer) from error

    async def next(self, ids: list[int]) -> tuple[Top, int | None]:
        """The place after a prompt, and how many of its tokens came from the cache (None: not told)."""
        answer = await self._completion({"prompt": ids, "logprobs": TOP})
        try:
            top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
            return _top((str(text), float(value)) for text, value in top.items()), _cached(answer)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise _refused("logprobs", answer) from error

    async def _completion(self, fields: dict[str, Any]) -> dict[str, Any]:
        return await self._post("/v1/completions", {"model": self.model, "max_tokens": 1, "temperature": 0, **fields})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self.client.post(path, body)
        if reply is None or reply.status_code >= 500:
            said = "no answer" if reply is None else f"status {reply.status_code}: {reply.text[:160].strip()}"
            raise EngineGoneError(f"POST {path} got {said}", remedy="Look into the engine's log.")
        if reply.status_code != 200:
            raise PreflightRefusedError(
                f"this engine does not take what a comparison needs: POST {path} answered {reply.status_code}: "
                f"{reply.text[:200].strip()}",
                remedy="Prompt log-probabilities by token ids are needed: vLLM and the embedded engine have them.",
            )
        data: Any = orjson.loads(reply.content)
        return data if isinstance(data, dict) else {}


async def fresh_prompts(scorer: Scorer, seed: str, lengths: list[int]) -> list[list[int]]:
    """Token ids of prompts of these lengths that no one has sent before; the same for the same seed."""
    prompts: list[list[int]] = []
    for number, length in enumerate(lengths):
        rng = Random(f"{seed}/{number}")
        ids: list[int] = []
        while len(ids) < length:
            ids += await scorer.tokens(" ".join(rng.choices(WORDS, k=length)))
        prompts.append(ids[:length])
    return prompts


def drift(one: Top, other: Top) -> float:
    """Mean absolute difference in nats over the tokens that both could have listed: those of either from the higher of
    the two floors up. One that the other lacks has at most the floor there, which makes this a lower bound.

    Infinity where one holds no number or has no list; not a number where there is nothing to compare.
    """
    if not one.values or not other.values:
        return math.nan if not one.values and not other.values else math.inf
    if not all(map(math.isfinite, (*one.values.values(), *other.values.values()))):
        return math.inf
    floor = max(one.floor, other.floor)
    tokens = {token for top in (one, other) for token, value in top.values.items() if value >= floor}
    if not tokens:
        return math.nan
    gaps = [abs(one.values.get(token, one.floor) - other.values.get(token, other.floor)) for token in tokens]
    return sum(gaps) / len(gaps)


def same_first(one: Top, other: Top) -> bool:
    """Whether the likeliest token is the same; True where one has no text of its own, as that cannot be told."""
    if not one.first or not other.first:
        return True
    return one.first == other.first


def _tops(row: dict[str, dict[str, Any]]) -> tuple[Top, Top]:
    """A place by id and by text. The prompt's own token is listed too, however unlikely, and is left out then."""
    ranked = [(token, one) for token, one in row.items() if one.get("rank", 0) <= TOP]
    values = [(token, str(one["decoded_token"]), float(one["logprob"])) for token, one in ranked]
    return _top([(token, value) for token, _, value in values]), _top([(text, value) for _, text, value in values])


def _top(pairs: Iterable[tuple[str, float]]) -> Top:
    """The likeliest of a list. Parts of a character are no text that tells tokens apart: they count for the floor."""
    # A completion lists what it wrote besides the likeliest, also where that is not among them.
    ranked = sorted(pairs, key=lambda pair: -pair[1])[:TOP]
    values: dict[str, float] = {}
    for token, value in ranked:
        if _UNKNOWN not in token:
            values.setdefault(token, value)
    first = ranked[0][0] if ranked else ""
    return Top(values, ranked[-1][1] if ranked else 0.0, "" if _UNKNOWN in first else first)


def _cached(answer: dict[str, Any]) -> int | None:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    value = details.get("cached_tokens") if isinstance(details, dict) else None
    return value if type(value) is int else None


def _refused(what: str, answer: dict[str, Any]) -> PreflightRefusedError:
    return PreflightRefusedError(
        f"this engine gives no {what}: {orjson.dumps(answer)[:160].decode('utf-8', 'replace')}",
        remedy="A comparison needs prompt log-probabilities and token ids: vLLM and the embedded engine have them.",
    )
