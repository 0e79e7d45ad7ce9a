"""Request bodies, joined from fragments that were serialised once.

Fifty tools over sixty turns are some 7.5 MB of JSON a conversation, nearly all of it said before: each message is
serialised when it is added, and a turn's body is head + messages + tail, copied and never encoded again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from soakrig.record.request_log import join_body

Message = dict[str, Any]


def fragment(data: Any) -> bytes:
    """JSON in the one form that bodies are made of: compact, keys in the order given."""
    return orjson.dumps(data)


@dataclass
class Head:
    """What stands before the messages in every body of a conversation, and what may differ from turn to turn."""

    model: str
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    fields: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        head = {"model": self.model, **self.fields}
        if self.tools:
            head["tools"] = self.tools
        self.data = fragment(head)[:-1]


@dataclass
class Prompt:
    """A growing message list and its bytes."""

    messages: list[bytes] = field(default_factory=list[bytes])
    _joined: bytearray = field(default_factory=bytearray)

    def add(self, message: Message) -> bytes:
        """Append one message; returns its fragment."""
        data = fragment(message)
        self.add_fragment(data)
        return data

    def add_fragment(self, data: bytes) -> None:
        if self.messages:
            self._joined += b","
        self.messages.append(data)
        self._joined += data

    @property
    def size(self) -> int:
        return len(self._joined)

    def body(self, head: Head, extra: dict[str, Any] | None = None) -> bytes:
        """The body of a turn. ``extra``: fields of this turn alone (its seed, say), after the messages."""
        return join_body(head.data, self._joined, extra)
