"""A reply: what came back of one turn, put together while it streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from soakrig.soak.sse import SSEError, SSEParser

TERMINAL = frozenset(
    {"stop", "length", "tool_calls", "function_call", "content_filter", "eos", "eos_token", "stop_sequence", "end_turn"}
)
"""Finish reasons that end an answer: OpenAI's, and those of servers that speak its protocol with words of their own."""
KEPT_BYTES = 1 << 20
"""Response bytes kept as evidence (the last ones)."""

Ending = Literal["open", "eof", "reset", "stalled", "refused", "no_response", "cut_by_tool", "runaway"]
"""How the connection ended: ``eof`` is HTTP's own clean end; ``no_response`` a close before the status line."""


def token_count(value: object) -> int | None:
    """A number of tokens as an engine may state it; None for anything else (negative, absurd, no number)."""
    return value if type(value) is int and 0 <= value < 1 << 31 else None


@dataclass(slots=True)
class ToolCall:
    """One call as its fragments came."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])

    @property
    def argument_text(self) -> str:
        return "".join(self.arguments)

    @property
    def whole(self) -> bool:
        """Whether its arguments are complete JSON already."""
        try:
            orjson.loads(self.argument_text)
        except orjson.JSONDecodeError:
            return False
        return True


@dataclass(slots=True)
class Reply:
    """One turn's answer. Moments are seconds of the monotonic clock; the rest is what the bytes said.

    ``feed`` takes raw bytes and the moment at which they were read. Nothing here judges: ``soak.classify`` does.
    ``whole``: the request did not ask for a stream, so that the answer is one JSON object and has no first token.
    """

    sent_at: float = 0.0
    whole: bool = False
    status: int | None = None
    body: bytes = b""
    ending: Ending = "open"
    ending_detail: str = ""
    ended_at: float = 0.0
    first_byte_at: float | None = None
    first_token_at: float | None = None
    first_answer_at: float | None = None
    last_token_at: float | None = None
    gap_max: float = 0.0
    deltas: int = 0
    events: int = 0
    size: int = 0
    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[int, ToolCall] = field(default_factory=dict[int, ToolCall])
    finish_reason: str | None = None
    terminated: bool = False
    usage: dict[str, Any] | None = None
    error: str = ""
    malformed: str = ""
    usage_tail: bool = False
    raw: list[bytes] = field(default_factory=list[bytes])
    raw_dropped: int = 0
    parser: SSEParser = field(default_factory=SSEParser)
    _slots: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def text(self) -> str:
        return "".join(self.content)

    @property
    def reasoning_text(self) -> str:
        return "".join(self.reasoning)

    @property
    def output_tokens(self) -> int:
        """From usage; else counted deltas, which is a lower bound."""
        count = token_count((self.usage or {}).get("completion_tokens"))
        return self.deltas if count is None else count

    @property
    def prompt_tokens(self) -> int | None:
        """From usage; None where the engine did not say."""
        return token_count((self.usage or {}).get("prompt_tokens"))

    def feed(self, chunk: bytes, now: float) -> None:
        """Take in bytes of a 200 stream that were read at ``now``."""
        if self.first_byte_at is None:
            self.first_byte_at = now
        self.size += len(chunk)
        self.raw.append(chunk)
        if self.whole:
            return
        if self.size - self.raw_dropped > 2 * KEPT_BYTES:
            self._drop_oldest()
        if self.malformed:
            return
        try:
            payloads = self.parser.feed(chunk)
        except SSEError as error:
            self.malformed = str(error)
            return
        for payload in payloads:
            if payload[:1] == b"{":
                self._event(payload, now)
            elif payload.strip() == b"[DONE]":
                self.terminated = True
            elif payload.strip():
                self.malformed = f"an event that is no JSON object: {payload[:120]!r}"
        if self.parser.errors:
            self.events += 1
            self._error(self.parser.errors[0].decode("utf-8", "replace"))

    def finish(self, ending: Ending, now: float, detail: str = "") -> None:
        """The connection is over."""
        self.ending, self.ended_at, self.ending_detail = ending, now, detail
        if self.whole:
            self._take_whole(now)
            return
        rest = self.parser.rest().strip()
        if rest in (b"[DONE]", b"data: [DONE]"):  # the last blank line is often left out
            self.terminated = True
        elif ending == "eof" and rest and not self.malformed and self.status == 200:
            self.malformed = f"the stream ended inside an event: {rest[:120]!r}"

    def _take_whole(self, now: float) -> None:
        """The one object of an answer that was not streamed. Its end is HTTP's, which no terminator has to repeat."""
        payload = b"".join(self.raw).strip()
        if not payload or self.status != 200:
            return
        if self.ending != "eof":
            self.events += 1
            return
        self._event(payload, now)
        self.terminated = not self.malformed
        self.first_token_at = self.first_answer_at = self.last_token_at = None

    def _event(self, payload: bytes, now: float) -> None:
        try:
            data = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.events += 1
            self.malformed = f"an event that is no JSON: {payload[:120]!r}"
            return
        if not data:
            return  # an empty object is a heartbeat
        self.events += 1
        try:
            choices = data["choices"]
        except KeyError:
            self._without_choices(data)
            return
        if data.get("error"):
            self._error(data["error"])
        usage = data.get("usage")
        if usage:
            self._usage(usage)
        if not choices:
            return
        try:
            choice = choices[0]
            delta = choice.get("delta") or choice.get("message")
            if delta:
                self._delta(delta, now)
            elif delta is None and choice.get("text"):
                self._delta({"content": choice["text"]}, now)
            if choice.get("error"):
                self._error(choice["error"])
            reason = choice.get("finish_reason")
        except (AttributeError, KeyError, TypeError, IndexError):
            self.malformed = f"an event in which choices are not as the protocol has them: {payload[:120]!r}"
            return
        if reason is not None:
            self._finished(reason)

    def _finished(self, reason: Any) -> None:
        if not isinstance(reason, str):
            self.malformed = f"a finish reason that is no text: {reason!r}"
        elif reason not in ("", "null") and (self.finish_reason is None or self.finish_reason in TERMINAL):
            self.finish_reason = reason  # "" and "null" are what some servers write for none; a bad reason stays

    def _usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.usage = usage
        else:
            self.malformed = f"usage that is no object: {usage!r:.80}"

    def _delta(self, delta: dict[str, Any], now: float) -> None:
        counts = False
        text = delta.get("content")
        if text:
            if not isinstance(text, str):
                raise TypeError
            self.content.append(text)
            counts = True
            if self.first_answer_at is None:
                self.first_answer_at = now
        thought = delta.get("reasoning") or delta.get("reasoning_content")
        if thought:
            if not isinstance(thought, str):
                raise TypeError
            self.reasoning.append(thought)
            counts = True
        calls = delta.get("tool_calls")
        if calls:
            counts = True
            if self.first_answer_at is None:
                self.first_answer_at = now
            for position, part in enumerate(calls):
                self._call(part, position)
        if not counts:
            return
        self.deltas += 1
        if self.last_token_at is None:
            self.first_token_at = now
        elif now - self.last_token_at > self.gap_max:
            self.gap_max = now - self.last_token_at
        self.last_token_at = now

    def _call(self, part: dict[str, Any], position: int) -> None:
        """One fragment of a call. Servers disagree on ``index``: some leave it out, some give every call 0. A name with
        an id of its own always begins a new call."""
        stated = part.get("index")
        index = stated if type(stated) is int and stated >= 0 else max(position, max(self.calls, default=0))
        slot = self._slots.get(index, index)
        function = part.get("function") or {}
        name, call_id = function.get("name") or "", part.get("id") or ""
        arguments = function.get("arguments") or ""
        if not (isinstance(name, str) and isinstance(call_id, str) and isinstance(arguments, str)):
            raise TypeError
        call = self.calls.get(slot)
        if call is not None and name and (call.id != call_id if call_id and call.id else not call_id and call.whole):
            slot = self._slots[index] = max(self.calls) + 1
            call = None
        if call is None:
            call = self.calls[slot] = ToolCall()
        call.id = call_id or call.id
        if name != call.name:
            call.name += name
        if arguments:
            call.arguments.append(arguments)

    def _without_choices(self, data: Any) -> None:
        if isinstance(data, dict):
            if data.get("error"):
                self._error(data["error"])
                return
            if data.get("object") == "error" and data.get("message"):  # vLLM's older form
                self._error(data)
                return
            if data.get("usage"):
                self._usage(data["usage"])
                self.usage_tail = True
                return
        self.malformed = f"an event without choices: {orjson.dumps(data)[:120]!r}"

    def _error(self, error: Any) -> None:
        if not self.error:
            message = error.get("message") if isinstance(error, dict) else None
            self.error = str(message or error)[:500]

    def _drop_oldest(self) -> None:
        kept = b"".join(self.raw)[-KEPT_BYTES:]
        self.raw, self.raw_dropped = [kept], self.size - len(kept)
