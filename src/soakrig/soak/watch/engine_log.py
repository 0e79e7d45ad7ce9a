"""The engine-log watcher: follows the log of an engine and reports the lines that engines die with (death_lines.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from soakrig.clock import Clock
from soakrig.errors import WatcherError
from soakrig.record.signal import Signal, SourceName, SourceState
from soakrig.soak.watch.death_lines import Reader, read_message
from soakrig.soak.watch.tail import TRUNCATED, Tail
from soakrig.soak.watch.watcher import Sample, Seen

_STATS = re.compile(
    r"(?:Engine (?P<engine>\d+): )?Avg prompt throughput: (?P<log_prompt_tokens_per_s>[\d.]+) tokens/s, "
    r"Avg generation throughput: (?P<log_output_tokens_per_s>[\d.]+) tokens/s, "
    r"Running: (?P<log_running>\d+) reqs, .*?(?:Waiting|Pending): (?P<log_waiting>\d+) reqs"
)
_MAX_LINE, _CHUNK, _PER_POLL = 64 << 10, 1 << 20, 16 << 20


class _Follower:
    """Reads what is appended to a file, like ``tail -F``: follows a rename and a truncation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rewritten = False
        self._file: Tail | None = None

    def start(self, *, at_end: bool) -> bool:
        """Open the file; False when it is not there yet. OSError or WatcherError when it cannot be read."""
        try:
            self._file = Tail(self.path)
        except FileNotFoundError:
            return False
        if at_end:
            self._file.to_end()
        return True

    def chunks(self) -> Iterator[bytes]:
        """What is new, in pieces; an empty piece stands for another file's beginning, where an unfinished line ends."""
        budget = _PER_POLL
        while budget > 0:
            if self._file is None and not self.start(at_end=False):
                return
            assert self._file is not None
            data, rewritten = self._file.read(_CHUNK)
            if rewritten:
                self.rewritten = True
                yield b""
            if data:
                budget -= len(data)
                yield data
            elif self._moved():
                self.close()
                yield b""
            else:
                return

    def _moved(self) -> bool:
        assert self._file is not None
        try:
            now = self.path.stat()
        except OSError:
            return False  # renamed and not yet made again: more may still come to the old file
        return (now.st_dev, now.st_ino) != self._file.identity

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class EngineLogWatcher:
    """Follows the log at ``path``; ``from_start`` takes in what is there already (an engine that this
    run launched); without it an old death would be taken for a new one.

    Signals: ``death_line`` (fault) and ``log_line`` (warning, info), with the row's name in ``detail["name"]``; a name
    is told at once and then at most every ``repeat_seconds``, with the number of lines left out in between. Samples:
    vLLM's own statistics line, ``log_running``, ``log_waiting``, ``log_prompt_tokens_per_s``,
    ``log_output_tokens_per_s`` (sums over its engines). Close it before the engine is stopped on purpose.
    """

    source: SourceName = "engine_log"

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        from_start: bool = False,
        interval: float = 0.5,
        repeat_seconds: float = 30.0,
    ) -> None:
        self.interval = interval
        self._clock, self._from_start, self._repeat = clock, from_start, repeat_seconds
        self._follower = _Follower(path)
        self._reader = Reader()
        self._rest = b""
        self._known = False  # the unfinished line was told already, or is longer than we read: skip its end
        self._told: dict[str, tuple[float, int]] = {}  # name -> (when told, lines left out since)
        self._stats: dict[str, dict[str, float]] = {}
        self._waiting = self._rewritten = False

    def open(self) -> SourceState:
        """Open the file. Raises WatcherError when it cannot be read, or neither it nor its folder is there."""
        path = self._follower.path
        try:
            there = self._follower.start(at_end=not self._from_start)
        except OSError as error:
            remedy = "give a log file that this user may read"
            raise WatcherError(f"the engine log {path} cannot be read: {error.strerror}", remedy=remedy) from error
        if there:
            return SourceState("engine_log", "live", f"follows {path}")
        if not path.parent.is_dir():
            raise WatcherError(f"the engine log {path} is not there, nor is its folder", remedy="check the path")
        self._waiting = True
        return SourceState("engine_log", "partial", f"waits for {path}, which is not there yet")

    def poll(self) -> Seen:
        """Read what was appended (at most 16 MiB a poll; the rest at the next)."""
        signals: list[Signal] = []
        stats_seen = False
        state: SourceState | None = None
        for data in self._follower.chunks():
            if self._waiting:
                self._waiting = False
                state = SourceState("engine_log", "live", f"follows {self._follower.path}, from its first byte")
            for raw in self._split(data):
                stats_seen |= self._line(raw, signals)
        if self._follower.rewritten and not self._rewritten:
            self._rewritten = True
            state = SourceState("engine_log", "partial", f"follows {self._follower.path}; {TRUNCATED}")
        # A process may die in the middle of a line: an unfinished one is judged as well, and once.
        if self._rest and not self._known:
            before = len(signals)
            self._line(self._rest, signals)
            self._known = len(signals) > before
        sample: Sample | None = None
        if stats_seen:
            names = next(iter(self._stats.values()))
            sample = {name: sum(one[name] for one in self._stats.values()) for name in names}
        return Seen(signals, sample, state)

    def close(self) -> None:
        """Close the file."""
        self._follower.close()

    def _split(self, data: bytes) -> Iterator[bytes]:
        *lines, rest = (self._rest + data).split(b"\n") if data else (self._rest, b"")
        for line in lines:
            if not self._known:
                yield line
            self._known = False
        if len(rest) > _MAX_LINE:
            if not self._known:
                yield rest
            rest, self._known = b"", True
        self._rest = rest

    def _line(self, raw: bytes, signals: list[Signal]) -> bool:
        message = read_message(raw[:_MAX_LINE].decode("utf-8", "replace"))
        if message.level == "INFO" and (stats := _STATS.match(message.text)):
            groups = stats.groupdict()
            engine = groups.pop("engine") or "0"
            self._stats[engine] = {name: float(value) for name, value in groups.items()}
            return True
        found = self._reader.judge(message)
        if found is None:
            return False
        line, severity = found
        now = self._clock.monotonic()
        when, left_out = self._told.get(line.name + severity, (None, 0))
        if when is not None and now - when < self._repeat:
            self._told[line.name + severity] = (when, left_out + 1)
            return False
        self._told[line.name + severity] = (now, 0)
        kind = "death_line" if severity == "fault" else "log_line"
        detail = {"name": line.name, "where": line.where, "left_out": left_out}
        signals.append(
            Signal(
                kind, "engine_log", severity, message.text[:2000], time=self._clock.time(), mono=now,
                error_s=self.interval, pid=message.pid, process=message.process,
                signature=f"engine log: {line.name}", detail=detail,
            )
        )  # fmt: skip
        return False
