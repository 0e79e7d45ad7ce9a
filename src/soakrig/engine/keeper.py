"""The keeper: a small process between the tool and an engine, so that no engine outlives the tool.

Run without site-packages (``python -I -S -c START ROOT STATUS_FD CONTROL_FD OWNER_PID GRACE SCRATCH -- ARGV...``);
standard library only, so that it starts in some tens of milliseconds whatever the environment holds. It makes itself
the reaper of everything that the engine leaves behind (prctl(2), PR_SET_CHILD_SUBREAPER), so double-forked children
stay in its tree. When the tree has ended, its shared memory (``engine/shm.py``) and the folder SCRATCH go too.

Status pipe, one JSON object a line: ``{"started": pid, "ticks": start}`` or ``{"failed": text}``, then
``{"exited": status}`` (negative: the signal) and, after a stop, ``{"left": [[pid, name, state], ...]}``.
Control pipe: ``stop SECONDS`` ends the tree (a second one may shorten the grace); end of file does so too, and so does
the owner's death by itself: a copy of the pipe's other end may live on in a forked child of the owner.

Functions on ``/proc`` are shared with the launcher, which imports this file as a module.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from soakrig.engine.shm import SharedMemory

START = (
    "import sys; sys.path.append(sys.argv[1]); from soakrig.engine import keeper; sys.exit(keeper.main(sys.argv[2:]))"
)
"""Program text of a keeper; its first argument is the folder that holds the package ``soakrig``."""
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

REST_GRACE = 2.0
"""Seconds that processes left over by the engine's root get between SIGTERM and SIGKILL."""
KILL_WAIT = 8.0
"""Seconds that SIGKILL gets: what is still there then sits in the kernel (D state)."""
LOOK_EVERY = 1.0
"""Seconds between two looks at the shared memory of the engine's processes: killed ones cannot be asked any more."""
_STEP = 0.02


class Stat(NamedTuple):
    """A process as ``/proc/PID/stat`` has it: proc(5), fields 1-4, 6 and 22 (``ticks``: start time since boot)."""

    pid: int
    name: str
    state: str
    ppid: int
    session: int
    ticks: int


def read_stat(pid: int) -> Stat | None:
    """The process, or None when there is none. The name may hold spaces and parentheses: it ends at the last one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  (pathlib would cost start-up time here)
            head, _, tail = file.read().rpartition(b")")
    except OSError:
        return None
    fields = tail.split()
    if len(fields) < 20:
        return None
    name = head.partition(b"(")[2].decode("utf-8", "replace")
    return Stat(pid, name, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def every_stat() -> list[Stat]:
    """All processes that this one may see."""
    found = (read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return [stat for stat in found if stat is not None]


def is_running(stat: Stat) -> bool:
    """False for a process that only waits to be reaped; a dead leader with living threads still runs."""
    if stat.state not in "ZX":
        return True
    try:
        return len(os.listdir(f"/proc/{stat.pid}/task")) > 1  # noqa: PTH208
    except OSError:
        return False


def descendants(pids: Iterable[int], stats: Iterable[Stat]) -> list[Stat]:
    """Children of ``pids``, their children and so on, out of ``stats``; ``pids`` themselves are not among them."""
    children: dict[int, list[Stat]] = {}
    for stat in stats:
        children.setdefault(stat.ppid, []).append(stat)
    queue, found, seen = list(pids), list[Stat](), set(pids)
    while queue:
        for stat in children.get(queue.pop(), ()):
            if stat.pid not in seen:
                seen.add(stat.pid)
                found.append(stat)
                queue.append(stat.pid)
    return found


def end_tree(
    members: Callable[[], list[Stat]], root: int, grace: float, wait: Callable[[float], float | None]
) -> list[Stat]:
    """End every process that ``members`` returns until there is none; returns what could not be ended.

    The root gets SIGTERM alone and ``grace`` seconds, so that it can stop its workers in its own order; what it leaves
    gets SIGTERM and at most ``REST_GRACE`` seconds; then SIGKILL until nothing is left or ``KILL_WAIT`` seconds are
    over. Python's resource tracker has ``REST_GRACE`` seconds more: it removes what the others left. SIGCONT follows
    each SIGTERM, so that a stopped process can obey. ``wait`` pauses, reaps, and may return a new and shorter grace.
    """

    def gone(deadline: float, left: Callable[[], list[Stat]]) -> bool:
        while left():
            if time.monotonic() >= deadline:
                return False
            hurry = wait(_STEP)
            if hurry is not None:
                deadline = min(deadline, time.monotonic() + hurry)
        return True

    def root_left() -> list[Stat]:
        return [stat for stat in members() if stat.pid == root]

    if grace > 0:
        _send(root_left(), signal.SIGTERM, signal.SIGCONT)
        gone(time.monotonic() + grace, root_left)
        _send(members(), signal.SIGTERM, signal.SIGCONT)
        gone(time.monotonic() + min(grace, REST_GRACE), members)
    now = time.monotonic()
    deadline = now + KILL_WAIT
    while left := members():
        if time.monotonic() < now + REST_GRACE:
            _send([stat for stat in left if not _is_resource_tracker(stat.pid)], signal.SIGKILL)
        else:
            _send(left, signal.SIGKILL)
        if time.monotonic() >= deadline:
            return left
        wait(_STEP)
    return []


def _is_resource_tracker(pid: int) -> bool:
    """Python's own cleaner (multiprocessing.resource_tracker): ends by itself once those that it works for are gone. It
    alone knows the semaphores, which nobody keeps mapped."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return b"multiprocessing.resource_tracker import" in file.read()
    except OSError:
        return False


def _send(stats: Iterable[Stat], *signals: signal.Signals) -> None:
    for stat in stats:
        for one in signals:
            try:
                os.kill(stat.pid, one)
            except (ProcessLookupError, PermissionError):
                break


def prctl(option: int, value: int | bytes) -> bool:
    """prctl(2) with one argument; False when the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    return libc.prctl(option, argument, 0, 0, 0) == 0


def remove_folder(path: str) -> None:
    """Remove a folder of ours with everything in it, as far as that can be done."""
    import shutil  # imports compressors: not before it is needed

    shutil.rmtree(path, ignore_errors=True)


def _wake_only(number: int, frame: object) -> None:
    """A handler has to exist for the wake-up descriptor to be written."""


class _Keeper:
    def __init__(self, status_fd: int, control_fd: int, owner: int, grace: float, scratch: str = "") -> None:
        self._status, self._control, self._grace, self._scratch = status_fd, control_fd, grace, scratch
        self._shm = SharedMemory()
        self._root = 0
        self._asked: float | None = None
        self._buffer = b""
        self._ended = False  # no more control: end of file, owner gone, or SIGTERM to ourselves
        self._poll = select.poll()
        self._poll.register(control_fd, select.POLLIN)
        self._wake, wake_write = os.pipe()
        for fd in (self._wake, wake_write):
            os.set_blocking(fd, False)
        self._poll.register(self._wake, select.POLLIN)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, _wake_only)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._owner_fd = -1
        try:
            self._owner_fd = os.pidfd_open(owner)
            self._poll.register(self._owner_fd, select.POLLIN)
        except OSError:  # gone already, or a kernel without pidfd: then the pipe's end of file has to do
            if not os.path.exists(f"/proc/{owner}"):  # noqa: PTH110
                self._end()

    def start(self, argv: list[str]) -> bool:
        keeper = os.getpid()

        def in_child() -> None:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(125)

        try:
            child = subprocess.Popen(argv, start_new_session=True, preexec_fn=in_child, stdin=subprocess.DEVNULL)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._say({"failed": f"{type(error).__name__}: {error}"})
            return False
        child.returncode = 0  # reaped below, not by Popen
        self._root = child.pid
        stat = read_stat(child.pid)
        self._say({"started": child.pid, "ticks": stat.ticks if stat else 0})
        return True

    def keep(self) -> None:
        """Wait until asked to stop, end the tree, say what is left."""
        self._reap()
        while self._asked is None and not self._ended:
            self._turn(LOOK_EVERY)
            self._look()
        self._look()
        grace = self._grace if self._asked is None else self._asked
        self._asked = None
        left = end_tree(self._members, self._root, grace, self._wait)
        self._reap()
        self._shm.free()
        if self._scratch and not left:
            remove_folder(self._scratch)
        self._say({"left": [[stat.pid, stat.name, stat.state] for stat in left]})

    def _look(self) -> None:
        if self._shm.news():
            self._shm.look(stat.pid for stat in self._members())

    def _members(self) -> list[Stat]:
        return [stat for stat in descendants([os.getpid()], every_stat()) if is_running(stat)]

    def _wait(self, seconds: float) -> float | None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._turn(left)
        asked, self._asked = self._asked, None
        return asked

    def _turn(self, seconds: float | None) -> None:
        for fd, _ in self._poll.poll(None if seconds is None else max(1, int(seconds * 1000))):
            if fd == self._wake:
                os.read(self._wake, 4096)
            elif fd == self._control:
                self._listen()
            else:
                self._poll.unregister(fd)
                self._end()
        self._reap()

    def _listen(self) -> None:
        data = os.read(self._control, 4096)
        if not data:
            self._poll.unregister(self._control)
            self._end()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            verb, _, seconds = line.partition(b" ")
            if verb == b"stop":
                self._asked = float(seconds)

    def _on_term(self, number: int, frame: object) -> None:
        self._end()

    def _end(self) -> None:
        self._ended = True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._root:
                self._say({"exited": os.waitstatus_to_exitcode(status)})

    def _say(self, message: dict[str, object]) -> None:
        try:
            os.write(self._status, json.dumps(message).encode() + b"\n")
        except OSError:  # the tool is gone; nobody is left to tell
            self._end()


def main(argv: list[str]) -> int:
    """Run as a keeper; the arguments are the launcher's business alone (see the module's text)."""
    status_fd, control_fd, owner, grace = int(argv[0]), int(argv[1]), int(argv[2]), float(argv[3])
    scratch = argv[4]
    for fd in (status_fd, control_fd):
        os.set_inheritable(fd, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, b"soakrig-keeper")
    keeper = _Keeper(status_fd, control_fd, owner, grace, scratch)
    if keeper.start(argv[6:]):
        keeper.keep()
    elif scratch:
        remove_folder(scratch)
    return 0
