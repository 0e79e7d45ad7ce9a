"""The process watcher: the engine's process tree, what ended, what is stopped, what hangs in the kernel.

Members are the engine's root and its descendants, found again by psutil at every poll; one that was seen stays a
member when its parent dies and it is reparented. With a keeper above the engine, all that the keeper has inherited
belongs to the tree as well.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from soakrig.clock import Clock
from soakrig.errors import WatcherError
from soakrig.record.signal import Severity, Signal, SourceName, SourceState
from soakrig.soak.watch import proc
from soakrig.soak.watch.watcher import Sample, Seen

SHORT_LIFE = 2.0
"""Seconds: a member that lived no longer than that (a compiler, a probe) is only noted when it ends."""
_USS_LIMIT = 2 << 30  # bytes of RSS: above, reading page tables for the unshared part costs the engine time
_USS_EVERY = 10


@dataclass(slots=True)
class _Episode:
    """Something that lasts: since when, over how many samples, with which unchanging marks, and whether told."""

    marks: tuple[object, ...]
    since: float
    samples: int = 1
    told: bool = False


@dataclass(slots=True)
class _Member:
    process: psutil.Process
    name: str
    create_time: float
    since: float
    ppid: int
    cpu_seconds: float | None = None
    stopped_since: float | None = None
    episodes: dict[str, _Episode] = field(default_factory=dict[str, _Episode])


class ProcessWatcher:
    """Watches process ``pid`` and its tree (see ``soak.watch.watcher.Watcher``).

    ``create_time`` (seconds since boot) guards against a reused pid. ``exit_status`` returns the root's status where
    the launcher knows it. A thread counts as stuck, and a pending SIGKILL as not taken, after ``stuck_samples``
    samples that span ``stuck_seconds``: a disk read is in D state, too, for a moment.

    Samples: ``rss_mib`` (sum), ``uss_mib`` (at times, where cheap), ``cpu_percent`` (100 = one core), ``threads``,
    ``fds``, ``processes``. Signals: ``process_exit``, ``process_stopped``, ``d_state``, ``sigkill_pending``,
    ``zombie`` (faults), ``child_exit``, ``traced``, ``reparented`` (warnings), ``process_resumed`` (info).
    Close it before the engine is stopped on purpose: an exit is a fault, whatever its status.
    """

    source: SourceName = "process"

    def __init__(
        self,
        pid: int,
        clock: Clock,
        *,
        create_time: float | None = None,
        exit_status: Callable[[], int | None] | None = None,
        keeper_pid: int | None = None,
        root: Path = proc.ROOT,
        interval: float = 1.0,
        stuck_samples: int = 3,
        stuck_seconds: float = 5.0,
    ) -> None:
        self.interval = interval
        self._pid, self._clock, self._create_time, self._exit_status = pid, clock, create_time, exit_status
        self._keeper_pid, self._root = keeper_pid, root
        self._stuck_samples, self._stuck_seconds = stuck_samples, stuck_seconds
        self._members: dict[int, _Member] = {}
        self._keeper_time = proc.create_time(keeper_pid, root) if keeper_pid is not None else None
        self._root_gone = False
        self._polls = 0
        self._last_sample: float | None = None
        self._hidden: set[str] = set()
        self._state = SourceState("process", "live")
        self._signals: list[Signal] = []

    def open(self) -> SourceState:
        """Find the root. Raises WatcherError when it is not there and nobody knows how it ended."""
        alive, detail = proc.is_alive(self._pid, self._create_time, self._root)
        if not alive and self._exit_status is None:
            raise WatcherError(f"no engine process to watch: {detail}", remedy="give the pid of the running engine")
        if alive:
            with suppress(psutil.Error):
                self._admit(psutil.Process(self._pid))
        name = self._members[self._pid].name if self._pid in self._members else "?"
        self._state.detail = f"pid {self._pid} ({name}) and its tree"
        return SourceState("process", "live", self._state.detail)

    def poll(self) -> Seen:
        """One look at every member and every thread."""
        self._signals = []
        self._polls += 1
        self._find_members()
        if self._pid not in self._members and not self._root_gone:
            self._root_ended(None, None)
        for pid, member in list(self._members.items()):
            self._check(pid, member)
        sample = self._sample() if self._members else None
        return Seen(self._signals, sample, self._changed_state())

    def close(self) -> None:
        """Nothing is held open."""

    # Who belongs to the tree

    def _admit(self, process: psutil.Process) -> None:
        stat = proc.read_stat(process.pid, self._root)
        known = self._members.get(process.pid)
        if stat is None or (known is not None and known.create_time == stat.create_time):
            return
        if known is not None:
            self._ended(process.pid, known, None)  # its number went to a new process between two polls
        if process.pid == self._pid and self._create_time is None:
            self._create_time = stat.create_time
        now = self._clock.monotonic()
        self._members[process.pid] = _Member(process, stat.name, stat.create_time, now, stat.ppid)

    def _find_members(self) -> None:
        heads: list[tuple[int, float | None]] = []
        if self._keeper_pid is not None:
            heads.append((self._keeper_pid, self._keeper_time))
        for pid, member in self._members.items():
            if (pid == self._pid and not heads) or "reparented" in member.episodes:
                heads.append((pid, member.create_time))
        for pid, create_time in heads:
            # Whoever has got the number of a head that is gone is no concern of ours, nor are its children.
            if create_time is None or proc.create_time(pid, self._root) != create_time:
                continue
            with suppress(psutil.Error):
                for child in psutil.Process(pid).children(recursive=True):
                    self._admit(child)

    # What became of a member

    def _check(self, pid: int, member: _Member) -> None:
        stat = proc.read_stat(pid, self._root)
        if stat is None or stat.create_time != member.create_time or stat.state in "Xx":
            self._ended(pid, member, None)
            return
        if stat.state == "Z" and proc.thread_count(pid, self._root) <= 1:
            self._ended(pid, member, stat.exit_code or None)
            return
        member.name = stat.name  # a process names itself after it has started
        self._check_parent(pid, member, stat)
        self._check_state(pid, member, stat)
        self._check_threads(pid, member, stat)

    def _ended(self, pid: int, member: _Member, wait_status: int | None) -> None:
        del self._members[pid]
        lived = self._clock.monotonic() - member.since
        known = os.waitstatus_to_exitcode(wait_status) if wait_status is not None else None
        if pid != self._pid:
            how = f", {_how(known)}" if known is not None else ""
            severity: Severity = "warning" if lived > SHORT_LIFE else "info"
            text = f"pid {pid} ({member.name}), a process of the engine's tree, ended{how}"
            self._tell("child_exit", severity, text, pid, member, exit_status=known, watched_s=round(lived, 3))
            return
        self._root_ended(member, known)

    def _root_ended(self, member: _Member | None, known: int | None) -> None:
        self._root_gone = True
        status = self._root_status() if self._exit_status and known is None else known
        left = [{"pid": pid, "name": one.name} for pid, one in self._members.items()]
        named = f" ({member.name})" if member else ""
        text = f"the engine's process {self._pid}{named} ended, {_how(status)}"
        if left:
            text += "; still there: " + ", ".join(f"{row['pid']} ({row['name']})" for row in left)
        self._tell("process_exit", "fault", text, self._pid, member, exit_status=status, left=left)

    def _root_status(self) -> int | None:
        # The launcher learns it from its keeper, some milliseconds after the process is gone.
        assert self._exit_status is not None
        for _ in range(10):
            status = self._exit_status()
            if status is not None:
                return status
            self._clock.wait(threading.Event(), 0.05)
        return None

    def _check_parent(self, pid: int, member: _Member, stat: proc.Stat) -> None:
        if stat.ppid == member.ppid or pid == self._pid:
            return
        old, member.ppid = member.ppid, stat.ppid
        if "reparented" not in member.episodes:
            member.episodes["reparented"] = _Episode((), self._clock.monotonic(), told=True)
            text = f"pid {pid} ({member.name}) lost its parent {old} and runs on under pid {stat.ppid}"
            self._tell("reparented", "warning", text, pid, member, parent_was=old, parent=stat.ppid)

    def _check_state(self, pid: int, member: _Member, stat: proc.Stat) -> None:
        what = f"pid {pid} ({member.name})"
        now = self._clock.monotonic()
        if stat.state == "T" and member.stopped_since is None:
            member.stopped_since = now
            text = f"{what} is stopped by a signal (state T): it does no work and answers nothing"
            self._tell("process_stopped", "fault", text, pid, member)
        elif stat.state != "T" and member.stopped_since is not None:
            seconds, member.stopped_since = now - member.stopped_since, None
            text = f"{what} runs again after {seconds:.1f} s"
            self._tell("process_resumed", "info", text, pid, member, seconds=round(seconds, 3))
        if self._lasts(member, "traced", (), holds=stat.state == "t", samples=2, seconds=0.0):
            self._tell("traced", "warning", f"{what} is held by a tracer or debugger (state t)", pid, member)

    def _check_threads(self, pid: int, member: _Member, stat: proc.Stat) -> None:
        threads = proc.threads(pid, self._root)
        now = self._clock.monotonic()
        # A process with many threads is one for a moment whenever it ends.
        if self._lasts(member, "zombie", (), holds=stat.state == "Z"):
            states = {str(one.tid): one.state for one in threads if one.tid != pid}
            text = f"pid {pid} ({member.name}) is a zombie whose threads live on ({states}): its memory is still held"
            self._tell("zombie", "fault", text, pid, member, threads=states)
        stuck = {f"d:{one.tid}" for one in threads if one.state == "D"}
        for key in [key for key in member.episodes if key.startswith("d:") and key not in stuck]:
            del member.episodes[key]
        for one in threads:
            if one.state != "D":
                continue
            marks = (one.wchan, one.cpu_ticks, one.switches)
            if self._lasts(member, f"d:{one.tid}", marks, holds=True):
                seconds = now - member.episodes[f"d:{one.tid}"].since
                place = one.wchan or "a place that this user may not see"
                text = (
                    f"thread {one.tid} ({one.name}) of pid {pid} ({member.name}) hangs in the kernel (state D) in "
                    f"{place} for {seconds:.1f} s: no CPU time, no context switch"
                )
                detail = {"tid": one.tid, "thread": one.name, "wchan": one.wchan, "seconds": round(seconds, 3)}
                self._tell("d_state", "fault", text, pid, member, **detail)
        pending = [one for one in threads if one.kill_pending]
        if self._lasts(member, "sigkill", (), holds=bool(pending)):
            seconds = now - member.episodes["sigkill"].since
            states = {str(one.tid): one.state for one in pending}
            text = f"pid {pid} ({member.name}) was sent SIGKILL and has not taken it for {seconds:.1f} s ({states})"
            self._tell("sigkill_pending", "fault", text, pid, member, seconds=round(seconds, 3), threads=states)
        if threads and threads[0].kill_pending is None and self._root == proc.ROOT:
            self._hidden.add(f"status of pid {pid}")

    def _lasts(
        self, member: _Member, key: str, marks: tuple[object, ...], *, holds: bool,
        samples: int | None = None, seconds: float | None = None,
    ) -> bool:  # fmt: skip
        """Count one more sample of an episode; True once, when it has lasted long enough with the same marks."""
        now = self._clock.monotonic()
        known = member.episodes.get(key)
        if not holds:
            member.episodes.pop(key, None)
            return False
        if known is None or known.marks != marks:
            known = member.episodes[key] = _Episode(marks, now)
        else:
            known.samples += 1
        need = self._stuck_samples if samples is None else samples
        span = self._stuck_seconds if seconds is None else seconds
        if known.told or known.samples < need or now - known.since < span:
            return False
        known.told = True
        return True

    # Figures

    def _sample(self) -> Sample:
        now = self._clock.monotonic()
        sums = {"rss_mib": 0.0, "threads": 0.0, "fds": 0.0, "processes": 0.0}
        cpu = 0.0
        fds_seen = True
        for pid, member in self._members.items():
            try:
                with member.process.oneshot():
                    sums["rss_mib"] += member.process.memory_info().rss / 2**20
                    sums["threads"] += member.process.num_threads()
                    times = member.process.cpu_times()
            except psutil.Error:
                continue  # gone since the check; the next poll tells
            sums["processes"] += 1
            used = times.user + times.system
            if member.cpu_seconds is not None:
                cpu += max(0.0, used - member.cpu_seconds)
            member.cpu_seconds = used
            try:
                sums["fds"] += member.process.num_fds()
            except psutil.AccessDenied:
                fds_seen = False
                self._hidden.add(f"open files of pid {pid}")
            except psutil.Error:
                continue
        if not fds_seen:
            del sums["fds"]
        if self._last_sample is not None and now > self._last_sample:
            sums["cpu_percent"] = 100.0 * cpu / (now - self._last_sample)
        self._last_sample = now
        if self._polls % _USS_EVERY == 1 and sums["rss_mib"] * 2**20 < _USS_LIMIT:
            self._add_uss(sums)
        return sums

    def _add_uss(self, sums: Sample) -> None:
        total = 0.0
        for pid, member in self._members.items():
            try:
                total += member.process.memory_full_info().uss
            except psutil.AccessDenied:
                self._hidden.add(f"unshared memory of pid {pid}")
                return
            except psutil.Error:
                continue
        sums["uss_mib"] = total / 2**20

    def _changed_state(self) -> SourceState | None:
        if not self._hidden or self._state.state == "partial":
            return None
        hidden = ", ".join(sorted(self._hidden)[:4])
        self._state.state = "partial"
        self._state.detail += f"; not readable: {hidden}; run as the engine's user or as root to see them"
        return SourceState("process", "partial", self._state.detail)

    def _tell(self, kind: str, severity: Severity, text: str, pid: int, member: _Member | None, **detail: Any) -> None:
        self._signals.append(
            Signal(
                kind, "process", severity, text, time=self._clock.time(), mono=self._clock.monotonic(),
                error_s=self.interval, pid=pid, process=member.name if member else None, detail=detail,
            )
        )  # fmt: skip


def _how(status: int | None) -> str:
    if status is None:
        return "exit status unknown"
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
