"""Server-sent events: bytes in, data payloads out (WHATWG HTML, section 9.2; UTF-8, LF, CRLF or CR line ends)."""

from __future__ import annotations

MAX_EVENT = 8 << 20
"""Bytes of one event beyond which the stream is not the protocol any more."""


BOM = b"\xef\xbb\xbf"


class SSEError(ValueError):
    """Bytes that are no event stream."""


class SSEParser:
    """Feed it chunks as they come off the wire; it returns the data payloads that became whole.

    A chunk of whole ``data: ...\\n\\n`` events, what nearly every chunk is, is split without a look at single lines.
    Other fields are allowed and dropped, except ``error:`` (some servers tell of a failure so) and the data of
    ``event: error``, which go to ``errors``. A line that is no field at all is refused, since a reverse proxy's HTML
    page under 200 would otherwise pass for a comment.
    """

    __slots__ = ("_buffer", "_data", "_event", "_skip_lf", "_started", "errors")

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []
        self._event = b""
        self._skip_lf = False
        self._started = False
        self.errors: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads that this chunk completed. Raises ``SSEError`` on bytes that are no event stream."""
        if not self._buffer and not self._data and chunk[:6] == b"data: " and chunk[-2:] == b"\n\n":
            body = chunk[6:-2]
            if b"\r" not in body:
                if b"\n" not in body:
                    return [body]
                parts = body.split(b"\n\ndata: ")
                if not any(b"\n" in part for part in parts):
                    return parts
        return self._slow(chunk)

    def rest(self) -> bytes:
        """Bytes that belong to no whole event yet."""
        return b"\n".join([*self._data, self._buffer]) if self._data else self._buffer

    def _slow(self, chunk: bytes) -> list[bytes]:
        if not chunk:
            return []
        if self._skip_lf:
            self._skip_lf = False
            if chunk[:1] == b"\n":
                chunk = chunk[1:]
        text = self._buffer + chunk
        if not self._started:
            if len(text) < 3 and BOM.startswith(text):
                self._buffer = text
                return []
            self._started = True
            text = text.removeprefix(BOM)
        if text.endswith(b"\r"):
            self._skip_lf = True  # the LF of a CRLF may come with the next chunk
        lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._buffer = lines.pop()
        out: list[bytes] = []
        for line in lines:
            if line:
                self._line(line)
            elif self._data:
                (self.errors if self._event == b"error" else out).append(b"\n".join(self._data))
                self._data, self._event = [], b""
            else:
                self._event = b""
        if len(self._buffer) > MAX_EVENT:
            raise SSEError(f"an event of more than {MAX_EVENT} bytes")
        return out

    def _line(self, line: bytes) -> None:
        name, colon, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value
        elif name == b"error":
            self.errors.append(value)
        elif name not in (b"", b"id", b"retry") or (not colon and name):
            raise SSEError(f"a line that is no field of an event stream: {line[:120]!r}")
