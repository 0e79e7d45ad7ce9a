"""Reading ``/proc``: states, where a thread waits, pending signals, and whether a process is there (proc(5)).

Every function takes the folder to read, so that states that no test can make at will (a process that SIGKILL does not
end) are tried on files. A process is named by its pid and by ``create_time``, seconds since boot at which it started:
the kernel gives a pid away again, the pair never.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SIGKILL_BIT = 1 << 8

STATE_NAMES = {
    "R": "running", "S": "sleeping", "D": "in an uninterruptible sleep", "Z": "zombie", "T": "stopped by a signal",
    "t": "stopped by a tracer", "X": "dead", "x": "dead", "I": "idle", "K": "woken to die", "P": "parked",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stat:
    """Fields of ``stat`` (proc(5) numbers): 1 pid, 2 comm, 3 state, 4 ppid, 14+15 cpu_ticks, 22 as create_time, 52.

    ``create_time`` is in seconds since boot, ``cpu_ticks`` in clock ticks. ``exit_code`` is wait status of a zombie;
    the kernel shows 0 instead to readers that may not trace the process.
    """

    pid: int
    name: str
    state: str
    ppid: int
    cpu_ticks: int
    create_time: float
    exit_code: int


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread. ``wchan`` (kernel function that it waits in), ``switches`` (context switches so far) and
    ``kill_pending`` are None where they were not read or may not be."""

    tid: int
    name: str
    state: str
    cpu_ticks: int
    wchan: str | None = None
    switches: int | None = None
    kill_pending: bool | None = None


def _parse(text: bytes) -> Stat | None:
    # The name may hold spaces and parentheses, even unbalanced ones: it ends at the last closing one.
    head, _, tail = text.rpartition(b")")
    number, _, name = head.partition(b" (")
    fields = tail.split()
    if len(fields) < 20:
        return None
    exit_code = int(fields[49]) if len(fields) > 49 else 0
    return Stat(
        int(number), name.decode("utf-8", "replace"), fields[0].decode(), int(fields[1]),
        int(fields[11]) + int(fields[12]), int(fields[19]) / _TICKS_PER_SECOND, exit_code,
    )  # fmt: skip


def read_stat(pid: int, root: Path = ROOT) -> Stat | None:
    """The process, or None when there is none (or it may not be seen: hidepid)."""
    return _stat_file(root / str(pid) / "stat")


def create_time(pid: int, root: Path = ROOT) -> float | None:
    """When ``pid`` started, in seconds since boot, or None when there is no such process."""
    stat = read_stat(pid, root)
    return stat.create_time if stat else None


def is_alive(pid: int, create_time: float | None, root: Path = ROOT) -> tuple[bool, str]:
    """Whether the process is there, and in what state, from one read: cheap enough for after every turn.

    A zombie, a dead process and another process under the same pid are False. A stopped one (SIGSTOP) is True, and the
    text says that it is stopped: it can do no work, yet it is not dead. ``create_time`` None skips the check for reuse.
    """
    stat = read_stat(pid, root)
    if stat is None:
        return False, f"pid {pid} is gone"
    if create_time is not None and stat.create_time != create_time:
        return False, f"pid {pid} is gone; the kernel gave its number to another process ({stat.name})"
    state = STATE_NAMES.get(stat.state, f"in state {stat.state}")
    if stat.state in "ZXx":
        return False, f"pid {pid} ({stat.name}) has ended and waits to be reaped ({state})"
    return True, f"pid {pid} ({stat.name}) is {state}"


def thread_count(pid: int, root: Path = ROOT) -> int:
    """Threads that the kernel still lists; a zombie leader's living threads are among them."""
    try:
        return len(os.listdir(root / str(pid) / "task"))  # noqa: PTH208  (no Path per thread of hundreds)
    except OSError:
        return 0


def threads(pid: int, root: Path = ROOT) -> list[Thread]:
    """Every thread of ``pid``; empty when it is gone.

    ``stat`` is read of each. The other two files only where they can matter, as an engine has hundreds of threads: of
    the leader, of threads in D state, and of all once the leader is dead, in D state or has SIGKILL pending.
    """
    folder = root / str(pid) / "task"
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []
    tids = sorted((int(name) for name in names if name.isdigit()), key=lambda tid: (tid != pid, tid))
    found: list[Thread] = []
    look = True
    for tid in tids:
        stat = _stat_file(folder / str(tid) / "stat")
        if stat is None:
            continue
        one = Thread(tid, stat.name, stat.state, stat.cpu_ticks)
        if look or stat.state == "D":
            one = _closer(one, folder / str(tid))
        if tid == pid:
            look = stat.state in "DZX" or bool(one.kill_pending)
        found.append(one)
    return found


def device_holders(prefix: str, root: Path = ROOT) -> list[int]:
    """Pids with a file open whose path begins with ``prefix``, among the processes that this user may look into."""
    found: list[int] = []
    for folder in root.glob("[0-9]*"):
        with suppress(OSError):
            if any(str(link.readlink()).startswith(prefix) for link in (folder / "fd").iterdir()):
                found.append(int(folder.name))
    return found


def _closer(thread: Thread, folder: Path) -> Thread:
    switches: int | None = None
    pending: bool | None = None
    status = _read(folder / "status")
    if status is not None:
        switches, pending = 0, False
        for line in status.splitlines():
            key, _, value = line.partition(b":")
            if key in (b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches"):
                switches += int(value)
            elif key in (b"SigPnd", b"ShdPnd"):
                pending = pending or bool(int(value, 16) & _SIGKILL_BIT)
    wchan = _read(folder / "wchan")
    # "0" stands both for "runs" and for "you may not know".
    place = wchan.decode("utf-8", "replace").strip() if wchan else ""
    return Thread(
        thread.tid, thread.name, thread.state, thread.cpu_ticks,
        place if place not in ("", "0") else None, switches, pending,
    )  # fmt: skip


def _stat_file(path: Path) -> Stat | None:
    text = _read(path)
    return _parse(text) if text else None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
