"""A kernel log in a file: what a syslog daemon, a console capture or a test writes, followed as it grows.

Followed are: rotation by rename and a new file, truncation in place, a file that comes later, a last line that is not
complete yet. A text file cannot prove who wrote a line, unless its lines are /dev/kmsg records or journal entries.
"""

from __future__ import annotations

import os
from pathlib import Path

from soakrig.clock import Clock
from soakrig.errors import UsageError, WatcherError
from soakrig.soak.watch.kernel_reader import BATCH, Batch
from soakrig.soak.watch.kernel_record import KernelRecord, parse_record

CHUNK = 1 << 16
LINE_MAX = 1 << 16
"""A longer line is no kernel-log line; it is handed on cut here and the rest of it dropped."""
RETIRED_S = 5.0
"""A renamed file is read for this long after its successor appeared: its writer may not have switched yet."""
_MARK = 64

TRUNCATED = "the file was truncated or rewritten: lines written just before that may have gone unread"


class _Tail:
    """One open file, read on from a position."""

    def __init__(self, path: Path, from_end: bool) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self.fd)
        self.identity = (status.st_dev, status.st_ino)
        self.position = _line_start(self.fd, status.st_size) if from_end else 0
        self._mark = self._read_mark()
        self._rest = b""
        self._skipping = False

    def restarted(self) -> bool:
        """True where what was read is not there any more; reading then starts over."""
        if os.fstat(self.fd).st_size >= self.position and self._read_mark() == self._mark:
            return False
        self.position, self._rest, self._skipping = 0, b"", False
        self._mark = b""
        return True

    def lines(self, most: int) -> tuple[list[bytes], bool]:
        found: list[bytes] = []
        while len(found) < most:
            data = os.pread(self.fd, CHUNK, self.position)
            if not data:
                return found, True
            self.position += len(data)
            self._mark = self._read_mark()
            *lines, rest = (self._rest + data).split(b"\n")
            if lines and self._skipping:
                lines, self._skipping = lines[1:], False
            found += lines
            self._rest = b"" if self._skipping else rest
            if len(self._rest) > LINE_MAX:
                found.append(self._rest[:LINE_MAX])
                self._rest, self._skipping = b"", True
        return found, False

    def last_line(self) -> bytes:
        """What stands after the last newline."""
        rest, self._rest = self._rest, b""
        return rest

    def close(self) -> None:
        os.close(self.fd)

    def _read_mark(self) -> bytes:
        start = max(self.position - _MARK, 0)
        return os.pread(self.fd, self.position - start, start)


class LogFileReader:
    """Follows the file at ``path``; raises ``UsageError`` at once where it can never appear."""

    name = "file"
    proves_origin = False
    live_times = False

    def __init__(self, path: Path, clock: Clock) -> None:
        if path.is_dir():
            raise UsageError(f"kernel log {path} is a folder", remedy="give the path of a file in it")
        if not path.exists() and not path.parent.is_dir():
            raise UsageError(
                f"kernel log {path}: neither the file nor its folder exists",
                remedy="give auto, kmsg, journal, dmesg, none, or the path of a file (it may appear later)",
            )
        self.path = path
        self.lost = 0
        self.doubt = ""
        self.waiting = ""
        self._clock = clock
        self._once = False
        self._tail: _Tail | None = None
        self._retired: list[tuple[_Tail, float]] = []

    def open(self, *, once: bool = False) -> None:
        self._once = once
        try:
            self._tail = _Tail(self.path, from_end=not once)
        except FileNotFoundError as error:
            if once:
                raise WatcherError(f"{self.path} does not exist", remedy="give a file that is there") from error
            self.waiting = f"{self.path} does not exist yet"
        except OSError as error:
            raise WatcherError(
                f"{self.path}: {error.strerror}", remedy="make the file readable for this user"
            ) from error

    def read(self) -> Batch:
        try:
            return self._read()
        except OSError as error:
            raise WatcherError(
                f"{self.path}: {error.strerror}", remedy="make the file readable for this user"
            ) from error

    def close(self) -> None:
        for tail in [*(t for t, _ in self._retired), *([self._tail] if self._tail else [])]:
            tail.close()
        self._tail, self._retired = None, []

    def _read(self) -> Batch:
        records: list[KernelRecord] = []
        if not self._once:
            self._switch()
        now = self._clock.monotonic()
        for tail, until in list(self._retired):
            lines, at_end = tail.lines(BATCH)
            records += _records(lines)
            if at_end and now >= until:
                records += _records([tail.last_line()])
                tail.close()
                self._retired.remove((tail, until))
        if self._tail is None:
            return Batch(records, at_end=True)
        if not self._once and self._tail.restarted():
            self.doubt = TRUNCATED
        lines, at_end = self._tail.lines(BATCH)
        if self._once and at_end:
            lines.append(self._tail.last_line())
        return Batch(records + _records(lines), at_end=at_end)

    def _switch(self) -> None:
        """Go over to a new file of the same path; the old one is read on for a while."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return
        if self._tail is not None and (status.st_dev, status.st_ino) == self._tail.identity:
            return
        try:
            fresh = _Tail(self.path, from_end=False)
        except FileNotFoundError:
            return
        if self._tail is not None:
            self._retired.append((self._tail, self._clock.monotonic() + RETIRED_S))
        self._tail, self.waiting = fresh, ""


def _records(lines: list[bytes]) -> list[KernelRecord]:
    return [parse_record(line.decode("utf-8", "replace")) for line in lines if line.strip()]


def _line_start(fd: int, size: int) -> int:
    """Where the last line begins if it has no newline yet, else the end of the file."""
    start = max(size - LINE_MAX, 0)
    data = os.pread(fd, size - start, start)
    if not data or data.endswith(b"\n"):
        return size
    return start + data.rfind(b"\n") + 1 if b"\n" in data else (0 if start == 0 else size)
