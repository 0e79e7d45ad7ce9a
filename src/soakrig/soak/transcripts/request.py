"""What a reader gets out of a transcript: requests without bytes yet, session by session."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from soakrig.errors import UsageError

FormatName = Literal["openai", "sharegpt", "mooncake", "run"]

NUMBERS: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,), "max_completion_tokens": (int,), "n": (int,), "seed": (int,), "top_k": (int,),
    "temperature": (int, float), "top_p": (int, float), "min_p": (int, float),
}  # fmt: skip
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


@dataclass(slots=True)
class Request:
    """One request. ``fields``: those beside model, messages, tools and streaming. ``where``: file and line, for what
    is said of it. ``due_s``: when it is to leave, in seconds after the first, where the transcript says."""

    where: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    due_s: float | None = None


@dataclass(slots=True)
class TraceEntry:
    """One arrival of a trace, which has lengths and no text. Lengths are in tokens. ``blocks``: ids of the prompt's
    blocks from its start; equal ids stand for equal text. ``number`` counts from 1."""

    where: str
    number: int
    due_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass
class Recorded:
    """What a file holds: ``sessions`` (each a list of requests that grow on each other) or ``entries`` of a trace.

    ``notes``: what was left out or not understood, in words; all of it is said and recorded.
    """

    form: FormatName
    sessions: list[list[Request]] = field(default_factory=list[list[Request]])
    entries: list[TraceEntry] = field(default_factory=list[TraceEntry])
    notes: list[str] = field(default_factory=list[str])

    @property
    def requests(self) -> int:
        return len(self.entries) or sum(len(session) for session in self.sessions)


def check_keys(data: Mapping[str, Any], known: Collection[str], where: str, reasons: Mapping[str, str]) -> None:
    """Refuse a key that is not ``known``, by name and with the nearest one. ``reasons``: keys that are understood and
    cannot be sent, with why. Raises ``UsageError``."""
    for name in sorted(set(data) - set(known)):
        if name in reasons:
            raise UsageError(f"{where} has {name!r}: {reasons[name]}", remedy="Nothing was sent.")
        near = difflib.get_close_matches(name, known, n=1)
        raise UsageError(
            f"{where} has the unknown field {name!r}" + (f"; {near[0]!r} was meant?" if near else ""),
            remedy=f"Known: {', '.join(sorted(known))}.",
        )


def check_fields(data: Mapping[str, Any], where: str) -> None:
    """Refuse what a server would otherwise refuse, and be blamed for: numbers that are none. Raises ``UsageError``."""
    for name, kinds in NUMBERS.items():
        value = data.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < 1 << 31):
            raise UsageError(f"{where}: {name} is {value!r:.80}, expected a number from 0 up")
    if data.get("n", 1) != 1:
        raise UsageError(f"{where} asks for n={data['n']} answers", remedy="A turn has one answer: leave n out.")


def check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """``messages`` where they are a list that a server would read. Raises ``UsageError`` naming the one that is not."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where} has no messages", remedy='Expected {"messages": [{"role": ..., "content": ...}]}.')
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in ROLES:
            raise UsageError(
                f"{where}: message {number} has the role {role!r}",
                remedy=f"Expected one of {', '.join(sorted(ROLES))}.",
            )
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise UsageError(
                f"{where}: message {number} has a content that is neither text, a list nor null: {content!r:.80}"
            )
    return messages


def check_tools(tools: Any, where: str) -> list[dict[str, Any]]:
    """``tools`` where they are function definitions; an empty list for None. Raises ``UsageError``."""
    if tools is None:
        return []
    if not isinstance(tools, list) or tool_names(tools) is None:
        raise UsageError(f"{where}: tools is no list of function definitions: {tools!r:.80}")
    return tools


def tool_names(tools: Any) -> frozenset[str] | None:
    """The names of function definitions, None where they are none."""
    try:
        return frozenset(str(tool["function"]["name"]) for tool in tools or [])
    except (KeyError, TypeError):
        return None
