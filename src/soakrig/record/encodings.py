"""What a text says once what it is wrapped in is taken off: percent signs, JSON and HTML escapes, base64, hex."""

from __future__ import annotations

import base64
import binascii
import html
import re
from collections.abc import Iterator
from urllib.parse import unquote

DEPTH = 3
"""Wrappings within each other that are taken off."""
PERCENT = re.compile(r"(?<![^\s\"'<>])(?:[^\s\"'<>%]*%[0-9A-Fa-f]{2})+[^\s\"'<>]*")
ESCAPED = re.compile(r"(?<!\S)[^\s]*\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|/)[^\s]*")
BASE64 = re.compile(r"(?<![A-Za-z0-9+/_=-])(?:[A-Za-z0-9+/]{12,}|[A-Za-z0-9_-]{12,})={0,2}")
HEX = re.compile(r"(?<![0-9A-Za-z])(?:(?:0x)?(?:[0-9a-f]{2}){8,}|(?:[0-9A-F]{2}){8,})(?![0-9A-Za-z])")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(/))")
_MARKDOWN = re.compile(r"\\([\\`*_{}\[\]|~$!#+.()-])")
_COMMENT = "<!-- -->"


def unescaped(text: str) -> str:
    r"""``\u0041``, ``\x41`` and ``\/`` of JSON and Python as what they stand for."""
    return _ESCAPE.sub(lambda m: m[3] or chr(int(m[1] or m[2], 16)), text)


def unwrapped(token: str) -> str | None:
    """What base64 or hex digits stand for, where that is text; None where it is none."""
    raws: list[bytes] = []
    if HEX.fullmatch(token):
        raws.append(bytes.fromhex(token.removeprefix("0x")))
    plain = token.rstrip("=").translate(str.maketrans("-_", "+/"))
    for start in range(4):  # a run may begin in the midst of what it joins
        part = plain[start:]
        try:
            raws.append(base64.b64decode(part + "=" * (-len(part) % 4), validate=True))
        except (binascii.Error, ValueError):
            continue
    for raw in raws:
        if (text := _readable(raw)) is not None:
            return text
    return None


def plainer(text: str) -> Iterator[str]:
    """Other readings of ``text``, each one wrapping less; the whole text where an escape goes through it."""
    if "%" in text and (other := unquote(text)) != text:
        yield other
    if "\\" in text and (other := unescaped(text)) != text:
        yield other
    if "&" in text and (other := html.unescape(text)) != text:
        yield other
    if "\\" in text or _COMMENT in text:
        other = _MARKDOWN.sub(r"\1", text.replace(_COMMENT, ""))
        if other != text:
            yield other
    found = [one for pattern in (BASE64, HEX) for match in pattern.finditer(text) if (one := unwrapped(match[0]))]
    if found:
        yield "\n".join(found)


def readings(text: str, depth: int = DEPTH) -> Iterator[str]:
    """``text`` itself and all readings of it, ``depth`` deep."""
    yield text
    if depth:
        for other in plainer(text):
            yield from readings(other, depth - 1)


def _readable(raw: bytes) -> str | None:
    """Bytes that are text in UTF-8 or UTF-16, at least eight characters of it."""
    for encoding in ("utf-8", "utf-16-le"):
        try:
            text = raw.decode(encoding)
        except UnicodeDecodeError:
            continue
        shown = sum(one.isascii() and (one.isprintable() or one in "\r\n\t") for one in text)
        if len(text) >= 6 and shown >= 0.9 * len(text):
            return text
    return None
