"""A conversation: what it sends next, and what it makes of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from soakrig.soak.classify import Outcome
from soakrig.soak.reply import Reply

AtLimit = Literal["restart", "stop-growing"]
"""What a conversation does when the next turn would not fit the engine's context."""

CHARS_PER_TOKEN = 3.2
"""For the estimate of a prompt before the engine has measured one; low, so that the estimate is high."""


@dataclass(slots=True)
class Turn:
    """One request, ready to leave. ``turn`` counts from 1 within the conversation, restarts included.

    ``context_tokens``: the expected prompt length, from the engine's last measure plus an estimate of what is new.
    ``part`` counts restarts; ``head``, ``messages`` and ``extra`` are the body's parts, for the record;
    ``tools``: the names that were offered, None where unknown. ``due_s``: when it is to leave at the earliest, in
    seconds after the load's first request; None: at once. ``whole``: the answer is asked for in one piece.
    """

    conversation: int
    turn: int
    part: int
    body: bytes
    context_tokens: int
    tools: frozenset[str] | None
    head: bytes
    messages: Sequence[bytes]
    extra: dict[str, object]
    due_s: float | None = None
    whole: bool = False


class Conversation(Protocol):
    """One agent loop. The load calls ``next_turn`` and, with what came back, ``answered``; in this order, for ever or
    until ``next_turn`` returns None. Never two turns at once."""

    number: int

    def next_turn(self) -> Turn | None: ...

    def answered(self, reply: Reply, outcome: Outcome) -> None: ...
