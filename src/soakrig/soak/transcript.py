"""Real transcripts as loads: OpenAI-format JSONL (one request or one message list a line), or another run's own
``requests/``, which are sent again byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from soakrig.errors import UsageError
from soakrig.record.request_log import join_body, read_requests
from soakrig.soak.classify import Outcome
from soakrig.soak.conversation import CHARS_PER_TOKEN, Turn
from soakrig.soak.reply import Reply
from soakrig.soak.request import Head, fragment

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
FIELDS = frozenset(
    {"messages", "model", "tools", "tool_choice", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed",
     "stop", "stream", "stream_options", "frequency_penalty", "presence_penalty", "n", "user", "response_format",
     "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs", "logprobs", "top_logprobs", "metadata", "store",
     "service_tier", "top_k", "min_p", "repetition_penalty", "thinking_token_budget"}
)  # fmt: skip

NUMBERS: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,), "max_completion_tokens": (int,), "n": (int,), "seed": (int,), "top_k": (int,),
    "temperature": (int, float), "top_p": (int, float), "min_p": (int, float),
}  # fmt: skip


@dataclass(slots=True)
class Line:
    """One request of a transcript, as the parts that its body is joined from."""

    head: bytes
    messages: Sequence[bytes]
    extra: dict[str, Any]
    tools: frozenset[str] | None


@dataclass
class TranscriptConversation:
    """Sends the lines of a transcript in order: once, or ``over_again`` from the beginning when they are through."""

    number: int
    lines: Sequence[Line]
    over_again: bool = False
    turn: int = 0
    part: int = 0
    _measured: dict[int, int] = field(default_factory=dict[int, int])

    def next_turn(self) -> Turn | None:
        if self.turn >= len(self.lines) and not self.over_again:
            return None
        index = self.turn % len(self.lines)
        line = self.lines[index]
        if self.turn and not _extends(line.messages, self.lines[(self.turn - 1) % len(self.lines)].messages):
            self.part += 1
        self.turn += 1
        body = join_body(line.head, b",".join(line.messages), line.extra)
        estimate = self._measured.get(index) or int(len(body) / CHARS_PER_TOKEN)
        return Turn(self.number, self.turn, self.part, body, estimate, line.tools, line.head, line.messages, line.extra)

    def answered(self, reply: Reply, outcome: Outcome) -> None:
        if reply.prompt_tokens:
            self._measured[(self.turn - 1) % len(self.lines)] = reply.prompt_tokens


def read_transcript(path: Path, *, model: str = "", max_tokens: int = 512) -> list[list[Line]]:
    """The conversations of a transcript file or of a run folder, each a list of requests.

    A JSONL file is one conversation. Its requests keep their fields; streaming with usage is asked for, ``model`` is
    the target's, and ``max_tokens`` is added where no limit stands. A run folder gives its bodies unchanged.
    Raises ``UsageError`` with the line's number and the reason, before anything is sent.
    """
    if path.is_dir():
        return _read_run(path)
    if path.exists() and not path.is_file():
        raise UsageError(f"--transcript {path} is neither a file nor a folder", remedy="Give a JSONL file.")
    lines: list[Line] = []
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UsageError(
            f"--transcript {path} cannot be read: {error.strerror}", remedy="Give a JSONL file or a run folder."
        ) from error
    with stream:
        for number, raw in enumerate(stream, 1):
            if raw.strip():
                lines.append(_read_line(raw, f"{path.name} line {number}", model, max_tokens))
    if not lines:
        raise UsageError(f"--transcript {path} holds no request", remedy="Expected one JSON object or list a line.")
    return [lines]


def transcript_facts(path: Path, conversations: Sequence[Sequence[Line]]) -> dict[str, Any]:
    """What the record keeps of a transcript: where it was, how much, and its hash."""
    facts: dict[str, Any] = {"path": str(path.resolve()), "requests": sum(len(lines) for lines in conversations)}
    if path.is_file():
        with path.open("rb") as stream:
            facts["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
    return facts


def _read_run(folder: Path) -> list[list[Line]]:
    conversations: dict[int, list[Line]] = {}
    for stored in read_requests(folder):
        tools = _tool_names(orjson.loads(stored.head + b"}"))
        line = Line(stored.head, stored.messages, stored.extra, tools)
        conversations.setdefault(stored.conversation, []).append(line)
    return list(conversations.values())


def _read_line(raw: bytes, where: str, model: str, max_tokens: int) -> Line:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{where} is no JSON: {error}", remedy="Nothing was sent.") from error
    if isinstance(data, list):
        data = {"messages": data}
    if not isinstance(data, dict):
        raise UsageError(f"{where} is {type(data).__name__}, expected a request object or a list of messages")
    unknown = sorted(set(data) - FIELDS)
    if unknown:
        raise UsageError(f"{where} has the unknown field {unknown[0]!r}", remedy=f"Known: {', '.join(sorted(FIELDS))}.")
    _check_fields(data, where)
    if data.get("n", 1) != 1:
        raise UsageError(f"{where} asks for n={data['n']} answers", remedy="A turn has one answer: leave n out.")
    messages = _messages(data.pop("messages", None), where)
    data.pop("model", None)
    fields: dict[str, Any] = {**data, "stream": True, "stream_options": {"include_usage": True}}
    if "max_tokens" not in fields and "max_completion_tokens" not in fields:
        fields["max_tokens"] = max_tokens
    tools = fields.pop("tools", None) or []
    head = Head(model, tools, fields)
    return Line(head.data, [fragment(message) for message in messages], {}, _tool_names({"tools": tools}))


def _messages(messages: Any, where: str) -> list[dict[str, Any]]:
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


def _check_fields(data: dict[str, Any], where: str) -> None:
    """Types of what a server would otherwise refuse, and be blamed for."""
    for name, kinds in NUMBERS.items():
        value = data.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < 1 << 31):
            raise UsageError(f"{where}: {name} is {value!r:.80}, expected a number from 0 up")
    tools = data.get("tools")
    if tools is not None and (not isinstance(tools, list) or _tool_names(data) is None):
        raise UsageError(f"{where}: tools is no list of function definitions: {tools!r:.80}")


def _extends(messages: Sequence[bytes], before: Sequence[bytes]) -> bool:
    return len(messages) >= len(before) and list(messages[: len(before)]) == list(before)


def _tool_names(data: dict[str, Any]) -> frozenset[str] | None:
    try:
        return frozenset(str(tool["function"]["name"]) for tool in data.get("tools") or [])
    except (KeyError, TypeError):
        return None
