"""A kernel log in a file: what a syslog daemon, a console capture or a test writes, followed as it grows.

Followed are: rotation by rename and a new file, truncation in place, a file that comes later, a last line that is not
complete yet. A text file cannot prove who wrote a line, unless its lines are /dev/kmsg records or journal entries; and
nothing proves what would have been written while there was no file.
"""

from __future__ import annotations

import stat
import threading
import time
from pathlib import Path

from soakrig.clock import Clock
from soakrig.errors import UsageError, WatcherError
from soakrig.soak.watch.kernel_reader import BATCH, Batch
from soakrig.soak.watch.kernel_record import KernelRecord, parse_record
from soakrig.soak.watch.tail import TRUNCATED, Tail, kind_of

CHUNK = 1 << 16
LINE_MAX = 1 << 16
"""A longer line is no kernel-log line; it is handed on cut here and the rest of it dropped."""
RETIRED_S = 5.0
"""A renamed file is read for this long after its successor appeared: its writer may not have switched yet."""
GONE_S = 1.0
"""A rotation makes the new file within milliseconds; a path without a file for this long is a gap."""
_STEP_S = 0.02


class _Lines:
    """The lines of one open file; with ``from_end`` those that are not complete yet or come later."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self.file = Tail(path)
        self.rewritten = False
        if from_end:
            self.file.to_last_line(LINE_MAX)
        self._rest = b""
        self._skipping = False

    def read(self, most: int) -> tuple[list[bytes], bool]:
        """About ``most`` lines, and whether these were all."""
        found: list[bytes] = []
        while len(found) < most:
            data, rewritten = self.file.read(CHUNK)
            if rewritten:
                self.rewritten, self._rest, self._skipping = True, b"", False
            if not data:
                return found, True
            *lines, rest = (self._rest + data).split(b"\n")
            if lines and self._skipping:
                lines, self._skipping = lines[1:], False
            found += lines
            self._rest = b"" if self._skipping else rest
            if len(self._rest) > LINE_MAX:
                found.append(self._rest[:LINE_MAX])
                self._rest, self._skipping = b"", True
        return found, False

    def last(self) -> bytes:
        """What stands after the last newline."""
        rest, self._rest = self._rest, b""
        return rest


class LogFileReader:
    """Follows the regular file at ``path``; raises ``UsageError`` at once where there is or can be none.

    A path that is found without a file holds a ``read`` that has nothing to return for up to ``GONE_S``: longer than
    that is a gap, and the last read of a run must not leave it open.
    """

    name = "file"
    proves_origin = False
    live_times = False

    def __init__(self, path: Path, clock: Clock) -> None:
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if not path.parent.is_dir():
                raise UsageError(
                    f"kernel log {path}: neither the file nor its folder exists",
                    remedy="give auto, kmsg, journal, dmesg, none, or the path of a file (it may appear later)",
                ) from None
        except OSError:
            pass  # open() says why it may not be read
        else:
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(
                    f"kernel log {path} is {kind_of(status)}",
                    remedy="give the path of a log file or of a FIFO, or kmsg for the kernel's own device",
                )
        self.path = path
        self.lost = 0
        self.doubt = ""
        self.waiting = ""
        self._clock = clock
        self._once = False
        self._lines: _Lines | None = None
        self._retired: list[tuple[_Lines, float]] = []
        self._late = ""
        self._rewritten = False
        self._missing: tuple[float, str] | None = None  # since when: monotonic, and in words
        self._gaps: list[str] = []
        self._never = threading.Event()

    def open(self, *, once: bool = False) -> None:
        self._once = once
        try:
            self._lines = _Lines(self.path, from_end=not once)
        except FileNotFoundError as error:
            if once:
                raise WatcherError(f"{self.path} does not exist", remedy="give a file that is there") from error
            self.waiting = f"{self.path} does not exist yet"
        except OSError as error:
            raise self._unreadable(error) from error

    def read(self) -> Batch:
        try:
            batch = self._read()
            while not batch.records and self._missing is not None and not self._gone():
                self._clock.wait(self._never, _STEP_S)
                batch = self._read()
        except OSError as error:
            raise self._unreadable(error) from error
        self.doubt = "; ".join(self._doubts())
        return batch

    def close(self) -> None:
        for lines in [*(one for one, _ in self._retired), *([self._lines] if self._lines else [])]:
            lines.file.close()
        self._lines, self._retired = None, []

    def _read(self) -> Batch:
        records: list[KernelRecord] = []
        if not self._once:
            self._switch()
        now = self._clock.monotonic()
        for lines, until in list(self._retired):
            found, at_end = lines.read(BATCH)
            records += _records(found)
            self._rewritten |= lines.rewritten
            if at_end and now >= until:
                records += _records([lines.last()])
                lines.file.close()
                self._retired.remove((lines, until))
        if self._lines is None:
            return Batch(records, at_end=True)
        found, at_end = self._lines.read(BATCH)
        self._rewritten |= self._lines.rewritten
        if self._once and at_end:
            found.append(self._lines.last())
        return Batch(records + _records(found), at_end=at_end)

    def _switch(self) -> None:
        """Go over to a new file of the same path; the old one is read on for a while."""
        try:
            status = self.path.stat()
            if self._lines is not None and (status.st_dev, status.st_ino) == self._lines.file.identity:
                self._back()
                return
            fresh = _Lines(self.path, from_end=False)
        except FileNotFoundError:
            if self._lines is not None and self._missing is None:
                self._missing = (self._clock.monotonic(), self._now())
            return
        if self._lines is not None:
            self._retired.append((self._lines, self._clock.monotonic() + RETIRED_S))
            self._back()
        else:
            self._late = f"the file exists only since {self._now()}: there was nothing to watch before"
        self._lines, self.waiting = fresh, ""

    def _back(self) -> None:
        """The path has a file; where it had none for too long, that stays a gap."""
        if self._missing is not None and self._gone():
            self._gaps.append(f"{self._missing[1]} to {self._now()}")
        self._missing = None

    def _gone(self) -> bool:
        return self._missing is not None and self._clock.monotonic() - self._missing[0] >= GONE_S

    def _doubts(self) -> list[str]:
        doubts = [self._late] if self._late else []
        if self._rewritten:
            doubts.append(TRUNCATED)
        if self._gaps:
            when = f"from {self._gaps[0]}"
            if len(self._gaps) > 1:
                when = f"{len(self._gaps)} times, first {when}, last from {self._gaps[-1]}"
            doubts.append(f"the file was gone {when}: lines of that time may be missing")
        if self._missing is not None and self._gone():
            doubts.append(f"the file is gone since {self._missing[1]}; nothing took its place")
        return doubts

    def _now(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._clock.time()))

    def _unreadable(self, error: OSError) -> WatcherError:
        return WatcherError(f"{self.path}: {error.strerror}", remedy="make the file readable for this user")


def _records(lines: list[bytes]) -> list[KernelRecord]:
    return [parse_record(line.decode("utf-8", "replace")) for line in lines if line.strip()]
