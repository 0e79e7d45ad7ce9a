"""A look into a compressed answer that goes on as it came: whether it says anything at all."""

from __future__ import annotations

import zlib

KNOWN = frozenset({"gzip", "x-gzip", "deflate"})
MAX_UNPACKED = 1 << 16
"""Bytes after which an answer is taken to say something, whatever they are."""
_EITHER = 47
"""wbits of zlib: gzip's or zlib's own head, found out by itself."""


class PackedLook:
    """Feed it what arrives; ``text`` is what that unpacks to, up to ``MAX_UNPACKED`` bytes. ``blind``: it cannot be
    read (another encoding, broken, or more than that), so that nobody can say that it is empty."""

    def __init__(self, encoding: str) -> None:
        self.text = b""
        self.blind = encoding.strip().lower() not in KNOWN
        self._unpack = zlib.decompressobj(_EITHER)

    def feed(self, data: bytes) -> None:
        """The next bytes as they came."""
        if self.blind:
            return
        try:
            self.text += self._unpack.decompress(data, MAX_UNPACKED)
        except zlib.error:
            self.blind = True
        self.blind = self.blind or len(self.text) >= MAX_UNPACKED
