"""Single streamed turns that measure an engine: what came back, and when."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from soakrig.soak.classify import classify
from soakrig.soak.client import ChatClient
from soakrig.soak.reply import Reply
from soakrig.soak.request import fragment
from soakrig.soak.transcripts.filler import WORDS


@dataclass(frozen=True)
class TurnShape:
    """``prompt_words`` of text, and ``output_tokens`` of answer: exactly where the engine is ``extended`` (knows
    ``ignore_eos`` and a template without thinking), else at most."""

    prompt_words: int
    output_tokens: int
    extended: bool


async def one_turn(client: ChatClient, model: str, shape: TurnShape, seed: str) -> dict[str, Any]:
    """Send one fresh prompt; the same one for the same seed. Figures are seconds, None where there is none."""
    words = Random(seed).choices(WORDS, k=shape.prompt_words)
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": " ".join(words)}],
        "max_tokens": shape.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if shape.extended:
        body |= {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}
    reply = await client.send(fragment(body))
    outcome = classify(reply, tools=frozenset())
    return {
        "outcome": outcome.name,
        "why": outcome.why[:200],
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": _cached(reply),
        "output_tokens": reply.output_tokens,
        "ttft_s": _since(reply, reply.first_token_at),
        "decode_s": _decode(reply),
        "text": reply.text[:400],
    }


def _since(reply: Reply, moment: float | None) -> float | None:
    return None if moment is None else moment - reply.sent_at


def _decode(reply: Reply) -> float | None:
    """Seconds a token after the first: (last token - first token) / (n - 1)."""
    if reply.first_token_at is None or reply.last_token_at is None or reply.output_tokens < 2:
        return None
    span = reply.last_token_at - reply.first_token_at
    return span / (reply.output_tokens - 1) if span > 0 else None


def _cached(reply: Reply) -> int | None:
    details = (reply.usage or {}).get("prompt_tokens_details") or {}
    value = details.get("cached_tokens") if isinstance(details, dict) else None
    return value if type(value) is int else None
