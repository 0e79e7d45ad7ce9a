"""How large a load is, along the lines that it can be made smaller by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, Self

from soakrig.errors import RecordError

Axis = Literal["conversations", "requests", "stream", "max_tokens", "tools", "context"]
STRUCTURE: tuple[Axis, ...] = ("conversations", "requests")
"""What decides which turns there are at all. Their hazard is measured anew before sizes are looked at."""
SIZES: tuple[Axis, ...] = ("stream", "max_tokens", "tools", "context")
LEAST: Mapping[Axis, int] = {"conversations": 1, "requests": 1, "stream": 0, "max_tokens": 1, "tools": 0}
"""Of ``context`` it depends on what was recorded (``requests.least_context``)."""
WORDS: Mapping[Axis, str] = {
    "conversations": "conversations at once", "requests": "different requests of each", "stream": "streaming",
    "max_tokens": "most tokens of an answer", "tools": "tools", "context": "tokens of the largest prompt",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Shape:
    """``requests``: the last so many of each conversation, sent in turn over and over. ``stream``: 1 or 0. ``context``:
    tokens of the largest prompt, tools included, by the recorded run's own bytes a token."""

    conversations: int
    requests: int
    stream: int
    max_tokens: int
    tools: int
    context: int

    @property
    def name(self) -> str:
        """As arms are called: ``c1-r1-stream-m512-t50-x13012``."""
        how = "stream" if self.stream else "whole"
        return f"c{self.conversations}-r{self.requests}-{how}-m{self.max_tokens}-t{self.tools}-x{self.context}"

    def get(self, axis: Axis) -> int:
        return getattr(self, axis)

    def with_(self, axis: Axis, value: int) -> Self:
        return replace(self, **{axis: value})

    def facts(self) -> dict[str, int]:
        """By axis."""
        return asdict(self)

    @classmethod
    def read(cls, name: str) -> Self:
        """The shape of that name. Raises ``RecordError``."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise RecordError(
                f"{name!r} is no load of a minimisation", remedy="Was its journal made by another version?"
            )
        conversations, requests, how, *sizes = match.groups()
        return cls(int(conversations), int(requests), int(how == "stream"), *map(int, sizes))


_NAME = re.compile(r"c(\d+)-r(\d+)-(stream|whole)-m(\d+)-t(\d+)-x(\d+)")
