"""Messages between the server and its worker: a 4-byte big-endian length, then one JSON object."""

from __future__ import annotations

import socket
from typing import Any

import orjson

READ_BYTES = 1 << 18


class Framing:
    """Turns received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that ``data`` completes."""
        buffer = self._buffer
        buffer += data
        found: list[dict[str, Any]] = []
        start = 0
        while len(buffer) - start >= 4:
            end = start + 4 + int.from_bytes(buffer[start : start + 4], "big")
            if len(buffer) < end:
                break
            found.append(orjson.loads(buffer[start + 4 : end]))
            start = end
        del buffer[:start]
        return found


def frame(message: dict[str, Any]) -> bytes:
    """A message with its length before it, as it goes over the connection."""
    body = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY)
    return len(body).to_bytes(4, "big") + body


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Write one message, waiting until it is taken. Raises OSError when the other side is gone."""
    connection.sendall(frame(message))
