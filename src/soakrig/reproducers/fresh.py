"""Conversations of one turn each: every request is new to the engine, so that no prefix cache helps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from soakrig.soak.agent import results
from soakrig.soak.agent.tools import ToolDefinition
from soakrig.soak.classify import Outcome
from soakrig.soak.conversation import CHARS_PER_TOKEN, Turn
from soakrig.soak.reply import Reply
from soakrig.soak.request import Head, Message, Prompt

_SOURCES = ("read_file", "search_text", "run_tests", "read_log", "git_diff")


@dataclass
class Ask:
    """One request: ``fields`` are those beside model, messages, tools and streaming (``max_tokens`` and so on)."""

    messages: list[Message]
    fields: dict[str, Any]
    tools: list[ToolDefinition] = field(default_factory=list[ToolDefinition])


@dataclass
class FreshConversation:
    """Sends what ``ask`` makes of the turn's number (from 1), a generator of its own and the characters that a token of
    this load has had so far; ends where it returns None. ``seen`` is told what became of each turn."""

    number: int
    model: str
    seed: int
    ask: Callable[[int, Random, float], Ask | None]
    seen: Callable[[Turn, Reply, Outcome], None] = lambda turn, reply, outcome: None
    turn: int = 0
    chars_per_token: float = CHARS_PER_TOKEN
    _sent: Turn | None = None

    def next_turn(self) -> Turn | None:
        rng = Random(f"{self.seed}/{self.number}/{self.turn + 1}")
        ask = self.ask(self.turn + 1, rng, self.chars_per_token)
        if ask is None:
            return None
        self.turn += 1
        fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, **ask.fields}
        if ask.tools:
            fields.setdefault("tool_choice", "auto")
        head, prompt = Head(self.model, ask.tools, fields), Prompt()
        for message in ask.messages:
            prompt.add(message)
        extra: dict[str, object] = {"seed": rng.getrandbits(31)}
        body = prompt.body(head, extra)
        names = frozenset(str(tool["function"]["name"]) for tool in ask.tools)
        estimate = int(len(body) / self.chars_per_token)
        self._sent = Turn(
            self.number, self.turn, self.turn, body, estimate, names, head.data, list(prompt.messages), extra
        )
        return self._sent

    def answered(self, reply: Reply, outcome: Outcome) -> None:
        turn = self._sent
        assert turn is not None
        if reply.prompt_tokens:
            self.chars_per_token = sum(map(len, turn.messages)) / reply.prompt_tokens
        self.seen(turn, reply, outcome)


def passage(rng: Random, chars: float) -> str:
    """About so many characters of text that was never sent before: it begins with a number of its own."""
    parts = [f"Record {rng.getrandbits(64):016x}"]
    size = len(parts[0])
    while size < chars:
        parts.append(results.result_of(rng.choice(_SOURCES), rng))
        size += len(parts[-1]) + 1
    return "\n".join(parts)[: max(int(chars), len(parts[0]))]


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}
