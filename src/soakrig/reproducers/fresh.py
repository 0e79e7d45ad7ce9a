"""Conversations of one turn each: every request is new to the engine, so that no prefix cache helps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

from soakrig.soak.agent import results
from soakrig.soak.agent.tools import ToolDefinition
from soakrig.soak.classify import Outcome
from soakrig.soak.conversation import Turn
from soakrig.soak.reply import Reply
from soakrig.soak.request import Head, Message, Prompt

FIRST_GUESS = 2.4
"""Characters of a passage that a token has at least, before an engine has counted any: too long a prompt is refused,
and the refusal would pass for a fault. The embedded engine's tokenizer has 2.5, those of large models 3 to 4."""
_SOURCES = ("read_file", "search_text", "run_tests", "read_log", "git_diff")
_LINES_EACH = 8


@dataclass
class Ask:
    """One request: ``fields`` are those beside model, messages, tools and streaming (``max_tokens`` and so on)."""

    messages: list[Message]
    fields: dict[str, Any]
    tools: list[ToolDefinition] = field(default_factory=list[ToolDefinition])


@dataclass
class FreshConversation:
    """Sends what ``ask`` makes of the turn's number (from 1), a generator of its own and the characters of the messages
    that a token had in the turn before; ends where it returns None. ``seen`` is told what became of each turn."""

    number: int
    model: str
    seed: int
    ask: Callable[[int, Random, float], Ask | None]
    seen: Callable[[Turn, Reply, Outcome], None] = lambda turn, reply, outcome: None
    turn: int = 0
    chars_per_token: float = FIRST_GUESS
    _sent: Turn | None = None
    _chars: int = 0

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
        self._chars = sum(len(str(message.get("content") or "")) for message in ask.messages)
        estimate = int(self._chars / self.chars_per_token)
        self._sent = Turn(
            self.number, self.turn, self.turn, body, estimate, names, head.data, list(prompt.messages), extra
        )
        return self._sent

    def answered(self, reply: Reply, outcome: Outcome) -> None:
        turn = self._sent
        assert turn is not None
        if reply.prompt_tokens:
            self.chars_per_token = self._chars / reply.prompt_tokens
        self.seen(turn, reply, outcome)


def passage(rng: Random, chars: float) -> str:
    """About so many characters of text that was never sent before: it begins with a number of its own.

    The lines are shuffled and not drawn, round after round, so that a token has the same characters in every passage
    of some length: what one measured tells how long another will be.
    """
    parts = [f"Record {rng.getrandbits(64):016x}"]
    size = len(parts[0])
    while size < chars:
        for line in rng.sample(_lines(), len(_lines())):
            parts.append(line)
            size += len(line) + 1
            if size >= chars:
                break
    return "\n".join(parts)[: max(int(chars), len(parts[0]))]


@cache
def _lines() -> tuple[str, ...]:
    """Lines of every kind of tool result, always the same."""
    rng = Random("passage")
    kept: list[str] = []
    for source in _SOURCES:
        lines: list[str] = []
        while len(lines) < _LINES_EACH:
            lines += [line for line in results.result_of(source, rng).splitlines() if line.strip()]
        kept += lines[:_LINES_EACH]
    return tuple(kept)


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}
