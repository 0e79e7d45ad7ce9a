"""JSON on its way through: read without losing anything, written only where something was changed."""

from __future__ import annotations

import json
from typing import Any, cast

import orjson

Json = dict[str, Any]


def read_object(raw: bytes) -> Json | None:
    """A JSON object as Python has it, numbers of any size and lone surrogates included; None for anything else."""
    try:
        data: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return cast(Json, data) if isinstance(data, dict) else None


def glance(raw: bytes) -> Json | None:
    """The same, faster, for a look that changes nothing: a number beyond 64 bits comes out rounded."""
    try:
        data: Any = orjson.loads(raw)
    except ValueError:
        return read_object(raw)  # orjson refuses NaN and half a surrogate pair, which servers do send
    return cast(Json, data) if isinstance(data, dict) else None


def write(data: Json) -> bytes:
    """Compact JSON in UTF-8."""
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()


def objects(value: Any) -> list[Json]:
    """The objects in what should be a list of objects; anything else is left out."""
    return (
        [cast(Json, one) for one in cast(list[Any], value) if isinstance(one, dict)] if isinstance(value, list) else []
    )


def inner(data: Json, name: str) -> Json:
    """The object under ``name``, the one in ``data`` itself; an empty one where there is none."""
    value = data.get(name)
    return cast(Json, value) if isinstance(value, dict) else {}


def text_of(content: Any) -> str:
    """A message's text: a string as it is, of a list its text parts."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in objects(content) if isinstance(part.get("text"), str))
