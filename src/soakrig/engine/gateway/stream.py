"""Server-sent events as bytes: cut into whole events however they arrive, and put together again unchanged.

WHATWG HTML, section 9.2: a blank line ends an event; lines end with LF, CRLF or CR. Nothing is dropped: comments, other
fields and odd line ends stay as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from soakrig.engine.gateway.body import Json, glance, write

MAX_EVENT = 8 << 20
"""Bytes of one event beyond which the stream is not the protocol any more."""
DONE = b"[DONE]"

# A CR that LF follows is one line end with it. A CR at the end of what has come so far may be half of one: it waits.
_BOUNDARY = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n|\Z))")
_LINES = re.compile(rb"\r\n|\n|\r")


class EventTooLongError(ValueError):
    """An event without an end."""


class EventCutter:
    """Feed it chunks; it returns the bytes of the events that became whole, joined or one by one.

    All that it returned and ``rest()`` are, joined, exactly what was fed.
    """

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = b""

    def whole(self, chunk: bytes) -> bytes:
        """Bytes up to the end of the last whole event. Raises EventTooLongError."""
        if not self._buffer and chunk[-2:] == b"\n\n":
            return chunk
        text = self._buffer + chunk
        end = self._end(text, max(0, len(self._buffer) - 3))
        self._buffer = text[end:]
        if len(self._buffer) > MAX_EVENT:
            raise EventTooLongError(f"an event of more than {MAX_EVENT} bytes")
        return text[:end]

    def rest(self) -> bytes:
        """What belongs to no whole event yet."""
        return self._buffer

    @staticmethod
    def _end(text: bytes, start: int) -> int:
        if b"\r" not in text:
            found = text.rfind(b"\n\n", start)
            return found + 2 if found >= 0 else 0
        end = 0
        for match in _BOUNDARY.finditer(text):
            end = match.end()
        return end


def split_events(data: bytes) -> list[bytes]:
    """Whole events, one by one, each with the blank line that ends it."""
    if b"\r" not in data:
        parts = data.split(b"\n\n")
        return [part + b"\n\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
    events: list[bytes] = []
    at = 0
    for match in _BOUNDARY.finditer(data):
        events.append(data[at : match.end()])
        at = match.end()
    return [*events, data[at:]] if at < len(data) else events


def payload(event: bytes) -> bytes | None:
    """The data of an event; None where it has none (a comment, a stray line end)."""
    if event[:6] == b"data: " and event.find(b"\n") == len(event) - 2:
        return event[6:-2] if b"\r" not in event else event[6:].rstrip(b"\r\n")
    found: list[bytes] = []
    for line in _LINES.split(event.removeprefix(b"\xef\xbb\xbf")):
        name, colon, value = line.partition(b":")
        if name == b"data":
            found.append(value.removeprefix(b" ") if colon else b"")
    return b"\n".join(found) if found else None


@dataclass(slots=True)
class Event:
    """One event: its bytes, and its data where that is a JSON object. ``changed`` makes ``encoded`` write it anew."""

    raw: bytes
    data: Json | None
    changed: bool = False

    @classmethod
    def parse(cls, raw: bytes) -> Event:
        """An event that is no JSON object passes as it is."""
        text = payload(raw)
        return cls(raw, glance(text) if text is not None and text[:1] == b"{" else None)

    @property
    def is_done(self) -> bool:
        """Whether this is the terminator."""
        return self.data is None and DONE in self.raw and (payload(self.raw) or b"").strip() == DONE

    @property
    def encoded(self) -> bytes:
        """The bytes to send: those that came, unless ``changed``. Fields beside the data stay."""
        if not self.changed or self.data is None:
            return self.raw
        line = b"data: " + write(self.data)
        if self.raw[:5] == b"data:" and self.raw.find(b"\n") == len(self.raw) - 2:
            return line + b"\n\n"
        kept = [one for one in _LINES.split(self.raw) if one and one.partition(b":")[0] != b"data"]
        return b"\n".join([*kept, line]) + b"\n\n"
