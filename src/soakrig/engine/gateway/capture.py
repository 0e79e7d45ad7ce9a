"""Exchanges on disk, for whoever debugs a client: a bounded ring of files that only their owner can read.

Off unless two things are given: the policy of the model, and a folder on the command line. Values whose names say that
they are secrets are hidden (headers, fields, query); what people typed is not, since that is what a capture is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from soakrig.errors import StoreError, UsageError
from soakrig.record.redaction import HIDDEN, is_secret

MAX_FILES = 64
MAX_BYTES = 64 << 20
BODY_BYTES = 1 << 20
"""Most bytes of one body that are kept: its beginning."""
_OURS = re.compile(r"(\d{8})\.json")


@dataclass(slots=True)
class Exchange:
    """One request and what came of it. ``sent`` is the request's body as the engine got it, where it was changed;
    ``answer`` is what the client got."""

    model: str
    path: str
    query: str
    began: float
    headers: list[tuple[str, str]]
    body: bytes
    sent: bytes | None = None
    status: int = 0
    answer_headers: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    answer: bytearray = field(default_factory=bytearray)
    answer_bytes: int = 0
    outcome: str = ""
    seconds: float = 0.0

    def add(self, data: bytes) -> None:
        """Bytes that went to the client."""
        self.answer_bytes += len(data)
        if (room := BODY_BYTES - len(self.answer)) > 0:
            self.answer += data[:room]

    def record(self) -> dict[str, Any]:
        """The exchange as it is written."""
        return {
            "time": self.began,
            "seconds": round(self.seconds, 6),
            "model": self.model,
            "path": self.path,
            "query": hide_query(self.query),
            "outcome": self.outcome,
            "request": {"headers": hide_headers(self.headers), "body": hide_body(self.body)},
            "sent": None if self.sent is None else hide_body(self.sent),
            "answer": {
                "status": self.status,
                "headers": hide_headers(self.answer_headers),
                "bytes": self.answer_bytes,
                "body": hide_body(bytes(self.answer)),
            },
        }


class Captures:
    """The ring. Raises UsageError for a folder that others can read, StoreError for one that cannot be made."""

    def __init__(self, folder: Path, *, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> None:
        self.folder, self._max_files, self._max_bytes = folder, max_files, max_bytes
        self._lock = threading.Lock()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
            if state.st_mode & 0o077:
                raise UsageError(
                    f"--capture {folder} has mode {state.st_mode & 0o777:03o}, which lets others in; 700 was expected",
                    remedy=f"chmod 700 {folder}, or give a new folder.",
                )
            self._serial = max((number for number, _ in self._files()), default=0)
        except OSError as error:
            raise StoreError(f"--capture {folder} cannot be used: {error.strerror}", remedy="Give another.") from error

    async def keep(self, exchange: Exchange) -> bool:
        """Write one in a thread; whether it was written. A disk that cannot be written to costs the capture alone."""
        try:
            await asyncio.to_thread(self._write, exchange)
        except OSError:
            return False
        return True

    def _write(self, exchange: Exchange) -> None:
        data = json.dumps(exchange.record(), indent=1).encode()
        with self._lock:
            self._serial += 1
            self._make_room(len(data))
            path = self.folder / f"{self._serial:08d}.json"
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(data)
            except OSError:  # half of one is none
                path.unlink(missing_ok=True)
                raise

    def _make_room(self, size: int) -> None:
        files = sorted(self._files())
        sizes = [path.stat().st_size for _, path in files]
        total = sum(sizes) + size
        for number, (_, path) in enumerate(files):
            if len(files) - number < self._max_files and total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= sizes[number]

    def _files(self) -> Iterable[tuple[int, Path]]:
        for path in self.folder.iterdir():
            if name := _OURS.fullmatch(path.name):
                yield int(name[1]), path


def hide_headers(headers: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Headers with secret values hidden."""
    return [[name, HIDDEN if is_secret(name) else value] for name, value in headers]


def hide_query(query: str) -> str:
    """A query string with secret values hidden."""
    if not query:
        return ""
    return urlencode([(k, HIDDEN if is_secret(k) else v) for k, v in parse_qsl(query, keep_blank_values=True)])


def hide_body(body: bytes) -> Any:
    """A body as it is kept: JSON with secret fields hidden, as text where it is too long to be kept whole; anything
    else is text as it is."""
    if body.lstrip()[:1] in (b"{", b"["):
        with contextlib.suppress(ValueError, RecursionError):
            hidden = _hide(json.loads(body))
            return hidden if len(body) <= BODY_BYTES else json.dumps(hidden)[:BODY_BYTES]
    return body[:BODY_BYTES].decode("utf-8", "replace")


def _hide(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        items: dict[str, Any] = value
        return {key: _hide(one, name if is_secret(name) else key) for key, one in items.items()}
    if isinstance(value, list):
        several: list[Any] = value
        return [_hide(one, name) for one in several]
    return HIDDEN if isinstance(value, str) and value and is_secret(name) else value
