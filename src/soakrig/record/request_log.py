"""``requests/``: what re-sends a run, byte for byte, at a fraction of its size.

One file a conversation, one JSON object a line: ``head`` (all fields before the messages, when it changes),
``message`` (one more message), ``part`` (the message list starts over) and ``send`` (a turn left: how many messages
it held, its own fields, its size and digest). Bodies share their messages, so 7.5 MB on the wire are some 250 kB here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from soakrig.errors import RecordError, StoreError
from soakrig.record.store import write_private


def body_digest(body: bytes) -> str:
    """What identifies a body in the record: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(body).hexdigest()[:16]


def join_body(head: bytes, messages: bytes | bytearray, extra: dict[str, Any] | None) -> bytes:
    """A request body: ``head`` is a JSON object without its closing brace, ``messages`` the list's inside."""
    tail = b"," + orjson.dumps(extra)[1:] if extra else b"}"
    return b"".join((head, b',"messages":[', messages, b"]", tail))


@dataclass
class _Written:
    head: bytes = b""
    part: int = -1
    messages: int = 0


class LineStore(Protocol):
    """Where lines go: a run's store, as a rule."""

    def write_lines(self, name: str, lines: list[bytes]) -> None: ...


@dataclass
class RequestLog:
    """Writes ``requests/`` of a run. With ``keep_text`` off only sizes and digests are kept."""

    store: LineStore
    keep_text: bool = True
    _state: dict[int, _Written] = field(default_factory=dict[int, _Written])

    def sent(
        self,
        conversation: int,
        turn: int,
        part: int,
        head: bytes,
        messages: Sequence[bytes],
        extra: dict[str, Any],
        body: bytes,
        due_s: float | None = None,
    ) -> None:
        """Note one body before it leaves; only what is new since the conversation's last turn is written."""
        state = self._state.setdefault(conversation, _Written())
        lines: list[bytes] = []
        if self.keep_text:
            if head != state.head:
                lines.append(b'{"head":' + head + b"}}")
                state.head = head
            if part != state.part:
                lines.append(orjson.dumps({"part": part}))
                state.part, state.messages = part, 0
            lines += [b'{"message":' + message + b"}" for message in messages[state.messages :]]
            state.messages = len(messages)
        send: dict[str, Any] = {
            "turn": turn,
            "messages": len(messages),
            "extra": extra,
            "bytes": len(body),
            "sha256_16": body_digest(body),
        }
        if due_s is not None:
            send["due_s"] = due_s
        lines.append(orjson.dumps({"send": send}))
        self.store.write_lines(f"requests/c{conversation:04}.jsonl", lines)


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """One request as it was sent: ``join_body(head, b",".join(messages), extra)`` gives its bytes. ``due_s``: when it
    was to leave, in seconds after the load's first request, where the load had a clock."""

    conversation: int
    turn: int
    head: bytes
    messages: tuple[bytes, ...]
    extra: dict[str, Any]
    due_s: float | None = None

    @property
    def body(self) -> bytes:
        return join_body(self.head, b",".join(self.messages), self.extra)


def read_requests(folder: Path) -> Iterator[StoredRequest]:
    """Every request of a run folder, conversation by conversation.

    Raises ``RecordError`` with file and line when a body does not come out as it was sent. A cut last line (kill,
    power loss) ends its conversation.
    """
    paths = sorted((folder / "requests").glob("c*.jsonl"))
    if not paths:
        raise RecordError(
            f"{folder} holds no requests", remedy="Only a run folder with requests/c*.jsonl can be re-sent."
        )
    for path in paths:
        conversation = int(path.stem[1:])
        yield from _read_conversation(path, conversation)


def write_requests(folder: Path, conversations: Sequence[Sequence[StoredRequest]]) -> None:
    """``requests/`` in ``folder`` as ``read_requests`` takes it, with no other file; what was there is replaced. Each
    request's own ``conversation`` and ``turn`` do not count: they are numbered by their places."""
    place = folder / "requests"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in place.glob("c*.jsonl"):
            old.unlink()
        for number, requests in enumerate(conversations):
            store = _Lines()
            log = RequestLog(store)
            part, before = 0, 0
            for turn, one in enumerate(requests, 1):
                part += len(one.messages) < before or list(one.messages[:before]) != list(requests[turn - 2].messages)
                before = len(one.messages)
                log.sent(number, turn, part, one.head, one.messages, one.extra, one.body, one.due_s)
            write_private(place / f"c{number:04}.jsonl", b"".join(line + b"\n" for line in store.lines))
    except OSError as error:
        raise StoreError(f"cannot write {place}: {error.strerror or error}", remedy="Free space.") from error


@dataclass
class _Lines:
    """Takes what a request log writes."""

    lines: list[bytes] = field(default_factory=list[bytes])

    def write_lines(self, name: str, lines: Sequence[bytes]) -> None:
        self.lines += lines


def _read_conversation(path: Path, conversation: int) -> Iterator[StoredRequest]:
    head = b""
    messages: list[bytes] = []
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n") or line.startswith(b"\0"):
                return
            if line.startswith(b'{"message":'):
                messages.append(line[len(b'{"message":') : -2])
            elif line.startswith(b'{"head":'):
                head = line[len(b'{"head":') : -3]
            elif line.startswith(b'{"part":'):
                messages = []
            else:
                send = _send(line, path, number)
                stored = StoredRequest(
                    conversation, send["turn"], head, tuple(messages), send["extra"], send.get("due_s")
                )
                if not head or body_digest(stored.body) != send["sha256_16"]:
                    why = "its text was not kept" if not head else "it does not come out as it was sent"
                    raise RecordError(
                        f"{path.name} line {number}: turn {send['turn']} cannot be re-sent: {why}",
                        remedy="A run of a transcript keeps text with --keep-text; otherwise re-send the transcript.",
                    )
                yield stored


def _send(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        return orjson.loads(line)["send"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise RecordError(f"{path.name} line {number} is no line of a request log: {line[:80]!r}") from error
