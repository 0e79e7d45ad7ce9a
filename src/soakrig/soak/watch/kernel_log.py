"""The kernel-log watcher: picks a source, reads it, and turns its records into signals."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from soakrig.clock import Clock
from soakrig.errors import UsageError, WatcherError
from soakrig.record.signal import Signal, SourceName, SourceState
from soakrig.soak.watch.dmesg import DmesgReader
from soakrig.soak.watch.journal import JournalReader
from soakrig.soak.watch.kernel_clock import KernelClock, Moment
from soakrig.soak.watch.kernel_lines import classify
from soakrig.soak.watch.kernel_reader import Batch, KernelReader
from soakrig.soak.watch.kernel_record import KernelRecord
from soakrig.soak.watch.kmsg import KmsgReader
from soakrig.soak.watch.log_file import LogFileReader
from soakrig.soak.watch.watcher import Seen
from soakrig.soak.watch.xid_catalogue import advice

CHOICES = ("auto", "kmsg", "journal", "dmesg", "none")
KMSG_DEVICE = os.makedev(1, 11)
"""/dev/kmsg under whatever name (Documentation/admin-guide/devices.txt, character devices)."""
NO_ORIGIN = "its lines do not prove who wrote them: a program's text cannot be told from the kernel's"

OnRaw = Callable[[str], None]


class KernelLogWatcher:
    """Watches the kernel log through ``choice``: auto, kmsg, journal, dmesg, none, or a path.

    ``auto`` takes the first of kmsg, journal and dmesg that opens. A path may be a text log, a file or FIFO of
    /dev/kmsg records, and may appear later if its folder is there (the source is then partial). ``on_raw`` gets every
    record as read. With ``once`` the log is read from its oldest record and ``poll`` returns until ``finished``.

    Raises ``UsageError`` for a choice that is neither a known word nor a possible path; ``open`` raises
    ``WatcherError`` with every source's reason where none can be read.
    """

    source: SourceName = "kernel_log"
    interval: float = 0.1

    def __init__(self, choice: str, clock: Clock, on_raw: OnRaw | None = None, *, once: bool = False) -> None:
        self.choice = choice
        self.finished = False
        self._clock = clock
        self._on_raw = on_raw
        self._once = once
        self._candidates = _readers(choice, clock)
        self._reader: KernelReader | None = None
        self._kernel_clock = KernelClock(clock, prompt=True)
        self._refused: list[str] = []
        self._reported = SourceState("kernel_log", "absent")
        self._lost_before = 0
        self._last_moment: Moment | None = None
        self._last_bus: str | None = None

    @property
    def reader_name(self) -> str:
        """Which source is read: kmsg, journal, dmesg or file; empty before ``open``."""
        return self._reader.name if self._reader else ""

    def open(self) -> SourceState:
        if not self._candidates:
            raise WatcherError(
                "the kernel log was switched off (none)", remedy="leave --kernel-log at auto to watch it"
            )
        remedies: dict[str, None] = {}
        for reader in self._candidates:
            try:
                reader.open(once=self._once)
            except WatcherError as error:
                reader.close()
                self._refused.append(error.message)
                remedies[error.remedy] = None
                continue
            self._reader = reader
            self._kernel_clock = KernelClock(self._clock, prompt=reader.live_times)
            self._reported = self._state()
            return self._reported
        raise WatcherError("no kernel log can be read: " + "; ".join(self._refused), remedy=" ".join(remedies))

    def poll(self) -> Seen:
        reader = self._reader
        if reader is None:
            raise WatcherError("the kernel log is not open", remedy="call open() first")
        batch = reader.read()
        signals = self._signals(batch)
        if batch.at_end:
            self._kernel_clock.drained()
        self.finished = self._once and batch.at_end
        if reader.lost > self._lost_before:
            if not any(s.kind == "gap" for s in signals):
                signals.insert(0, self._gap(reader.lost - self._lost_before))
            self._lost_before = reader.lost
        state = self._state()
        changed = state != self._reported
        self._reported = state
        return Seen(signals, state=state if changed else None)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _signals(self, batch: Batch) -> list[Signal]:
        signals: list[Signal] = []
        for record in batch.records:
            if self._on_raw is not None:
                self._on_raw(record.raw)
            found = classify(record)
            if not found and not self._once:
                continue
            moment = self._moment(record)
            for signal in found:
                signal.time, signal.mono, signal.error_s = moment
                self._complete(signal, record)
                signals.append(signal)
        return signals

    def _complete(self, signal: Signal, record: KernelRecord) -> None:
        """What one line leaves to its neighbours: a dead GPU's address stands two lines up; and the advice."""
        if record.text.startswith("NVRM: The NVIDIA GPU "):
            self._last_bus = signal.pci
        elif signal.kind == "probe_fail" and signal.pci is None:
            signal.pci, self._last_bus = self._last_bus, None
        if record.kernel_us is not None:
            signal.detail["kernel_us"] = record.kernel_us
        if signal.severity == "fault" and (text := advice(signal)):
            signal.detail["advice"] = text

    def _moment(self, record: KernelRecord) -> Moment:
        """When a record was printed; a log that is read after the fact keeps its own order and distances."""
        if not self._once:
            # A file's lines may have another boot's or another host's time.
            return self._kernel_clock.live(None if self.reader_name == "file" else record.kernel_us)
        if self.reader_name != "file" and record.kernel_us is not None:
            return self._kernel_clock.old(record.kernel_us)
        if record.kernel_us is not None:
            moment = Moment(record.wall or 0.0, record.kernel_us / 1e6, 0.0)
        elif record.wall is not None:
            moment = Moment(record.wall, record.wall, 1.0)
        else:
            moment = self._last_moment or Moment(0.0, 0.0, 0.0)
        self._last_moment = moment
        return moment

    def _gap(self, missing: int) -> Signal:
        now = self._clock.monotonic()
        text = f"{missing} kernel record(s) lost"
        return Signal("gap", "kernel_log", "warning", text, self._clock.time(), now, detail={"missed": missing})

    def _state(self) -> SourceState:
        reader = self._reader
        if reader is None:
            return SourceState("kernel_log", "absent", "not open")
        name = {"kmsg": "/dev/kmsg", "journal": "journalctl -k"}.get(reader.name, reader.name)
        path = getattr(reader, "path", None)
        parts = [f"read from {path or name}"]
        if self._refused:
            parts.append("not from " + "; ".join(self._refused))
        if reader.waiting:
            return SourceState("kernel_log", "absent", f"{reader.waiting}; it is waited for", reader.lost)
        if not reader.proves_origin:
            parts.append(NO_ORIGIN)
        if reader.lost:
            parts.append(f"{reader.lost} record(s) lost")
        if reader.doubt:
            parts.append(reader.doubt)
        partial = bool(reader.lost or reader.doubt)
        return SourceState("kernel_log", "partial" if partial else "live", "; ".join(parts), reader.lost)


def _readers(choice: str, clock: Clock) -> list[KernelReader]:
    """The sources to try, in order."""
    kmsg, journal, dmesg = KmsgReader(), JournalReader(), DmesgReader()
    named: dict[str, list[KernelReader]] = {
        "auto": [kmsg, journal, dmesg],
        "kmsg": [kmsg],
        "journal": [journal],
        "dmesg": [dmesg],
        "none": [],
    }
    if choice in named:
        return named[choice]
    if not choice.strip():
        raise UsageError("the kernel log is given as nothing", remedy=f"give one of {', '.join(CHOICES)}, or a path")
    try:
        path = Path(choice).expanduser()
    except RuntimeError as error:
        raise UsageError(f"kernel log {choice}: {error}", remedy="write the path without ~") from error
    try:
        status = path.stat()
    except OSError:
        near = difflib.get_close_matches(choice.lower(), CHOICES, n=1) if "/" not in choice else []
        if near:
            raise UsageError(
                f"kernel log {choice!r} is no known source and no file; did you mean {near[0]!r}?",
                remedy=f"give one of {', '.join(CHOICES)}, or ./{choice} for a file that appears later",
            ) from None
        return [LogFileReader(path, clock)]
    if stat.S_ISFIFO(status.st_mode) or (stat.S_ISCHR(status.st_mode) and status.st_rdev == KMSG_DEVICE):
        return [KmsgReader(path)]
    return [LogFileReader(path, clock)]
