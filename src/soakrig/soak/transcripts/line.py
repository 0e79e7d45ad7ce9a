"""One request of a transcript with its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from soakrig.record.request_log import join_body
from soakrig.soak.request import Head, fragment
from soakrig.soak.transcripts.request import Request, tool_names


@dataclass(slots=True)
class Line:
    """The parts that a body is joined from. ``tools``: the names on offer, None where unknown. ``due_s``, ``whole``: as
    in ``Turn``."""

    head: bytes
    messages: Sequence[bytes]
    extra: dict[str, Any]
    tools: frozenset[str] | None
    due_s: float | None = None
    whole: bool = False

    @property
    def body(self) -> bytes:
        return join_body(self.head, b",".join(self.messages), self.extra)


def make_line(request: Request, model: str, max_tokens: int) -> Line:
    """Streaming with usage is asked for, ``model`` is the target's, and ``max_tokens`` is added where no limit
    stands."""
    fields: dict[str, Any] = {**request.fields, "stream": True, "stream_options": {"include_usage": True}}
    if "max_tokens" not in fields and "max_completion_tokens" not in fields:
        fields["max_tokens"] = max_tokens
    head = Head(model, request.tools, fields)
    messages = [fragment(message) for message in request.messages]
    return Line(head.data, messages, {}, tool_names(request.tools), request.due_s)
