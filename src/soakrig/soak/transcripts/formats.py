"""Which format a transcript has, by what stands in it and never by its name; what fits none is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from soakrig.errors import UsageError
from soakrig.soak.transcripts import mooncake, openai_jsonl, sharegpt
from soakrig.soak.transcripts.mooncake import BLOCK_TOKENS
from soakrig.soak.transcripts.request import FormatName, Recorded

SHAPES = (
    'OpenAI: {"messages": [...]} or a list of messages a line; '
    'ShareGPT: {"conversations": [...]}, in an array or one a line; '
    'Mooncake: {"timestamp", "input_length", "output_length", "hash_ids"} a line.'
)


def read_file(path: Path, block_tokens: int = BLOCK_TOKENS) -> Recorded:
    """Everything in a transcript file. Raises ``UsageError`` with the first line that does not fit, and why."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"--transcript {path} cannot be read: {error.strerror}", remedy="Give a transcript or a run folder."
        ) from error
    if not raw.strip():
        raise UsageError(f"--transcript {path} holds no request", remedy=SHAPES)
    whole = _array(raw, path.name)
    if whole is not None:
        return _sharegpt(((f"{path.name} item {number}", item) for number, item in enumerate(whole, 1)))
    form = _form(raw, path.name)
    if form == "sharegpt":
        return _sharegpt(_lines(raw, path.name))
    found = Recorded(form)
    if form == "mooncake":
        for number, (where, data) in enumerate(_lines(raw, path.name), 1):
            found.entries.append(mooncake.read_entry(data, where, number, block_tokens))
        late = [e for a, e in zip(found.entries, found.entries[1:], strict=False) if e.due_s < a.due_s]
        if late:
            raise UsageError(
                f"{late[0].where}: its timestamp is before that of the line above; arrivals were expected in order",
                remedy="Sort the file by timestamp.",
            )
        first = found.entries[0].due_s
        for entry in found.entries:
            entry.due_s -= first
    else:
        found.sessions = [[openai_jsonl.read_line(data, where) for where, data in _lines(raw, path.name)]]
    return found


def _form(raw: bytes, name: str) -> FormatName:
    where, data = next(_lines(raw, name))
    if openai_jsonl.fits(data):
        return "openai"
    if sharegpt.fits(data):
        return "sharegpt"
    if mooncake.fits(data):
        return "mooncake"
    if isinstance(data, dict):
        what = f"an object with {', '.join(map(repr, data)) or 'nothing in it'}"
    else:
        what = f"{type(data).__name__} {data!r:.60}"
    raise UsageError(f"{where} fits no format of a transcript: it is {what}", remedy=SHAPES)


def _array(raw: bytes, name: str) -> list[Any] | None:
    """The file's items where it is one JSON array of objects that are no messages."""
    if raw.lstrip()[:1] != b"[":
        return None
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None  # several lines, each a message list
    if not data or not isinstance(data[0], dict) or "role" in data[0]:
        return None
    if not sharegpt.fits(data[0]):
        raise UsageError(
            f"{name} is one array, whose first item fits no format: it has {', '.join(map(repr, data[0]))}",
            remedy=f"{SHAPES} Requests in an array: write one a line (jq -c '.[]').",
        )
    return data


def _lines(raw: bytes, name: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            yield where, orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise UsageError(
                f"{where} is no JSON: {error}", remedy="Expected one JSON value a line, or one array in all."
            ) from error


def _sharegpt(items: Iterator[tuple[str, Any]]) -> Recorded:
    found = Recorded("sharegpt")
    notes: set[str] = set()
    empty = 0
    for where, data in items:
        session = sharegpt.read_conversation(data, where, notes)
        empty += not session
        found.sessions += [session] if session else []
    found.notes = sorted(notes)
    if empty:
        found.notes.append(f"{empty} conversations in which nobody asks anything are left out")
    if not found.sessions:
        raise UsageError("no conversation of the transcript holds a question", remedy=SHAPES)
    return found
