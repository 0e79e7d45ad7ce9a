"""Starts an engine under a keeper and ends it with everything it started.

The chain is tool -> keeper -> engine. The keeper (``engine/keeper.py``) ends the engine's whole tree when it is asked
to or when the tool is gone, however the tool ended. Should the keeper be killed, the kernel kills the engine's root
(prctl(2), PR_SET_PDEATHSIG), and the rest is reparented to the tool, which is a subreaper too and ends it in ``stop``.
A mark in the engine's environment (``SOAKRIG_LAUNCH``) and its session number tell its processes from others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from soakrig.engine import keeper
from soakrig.engine.shm import SharedMemory
from soakrig.errors import EngineStartError, UsageError

MARK = "SOAKRIG_LAUNCH"
"""Name of the environment variable that marks every process of one launch."""
DEFAULT_GRACE = 10.0
_POLL = 0.02
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_TAIL_LINES, _TAIL_BYTES = 20, 16384


class Leftover(NamedTuple):
    """A process that SIGKILL did not end: ``state`` is usually D (it waits inside the kernel)."""

    pid: int
    name: str
    state: str


class EngineProcess:
    """A launched engine. A context manager: leaving it stops the engine.

    ``create_time`` is seconds since boot at which the process started (proc(5), field 22 of stat): with ``pid`` it
    names this one process for ever. ``keeper_pid`` is the parent of all that the engine leaves behind. ``port`` is
    None where neither a port nor a port file was given.
    """

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        status: int,
        control: int,
        mark: str,
        log_path: Path,
        scratch: str = "",
    ) -> None:
        self.pid = 0
        self.create_time = 0.0
        self.keeper_pid = child.pid
        self.log_path = log_path
        self.port: int | None = None
        self._child, self._control, self._mark = child, control, mark
        self._lock, self._reap_lock = threading.RLock(), threading.Lock()
        self._seen: set[tuple[int, int]] = set()  # (pid, start ticks) of every process found to be of this launch
        self._spoke, self._done = threading.Event(), threading.Event()
        self._failed: str | None = None
        self._exit: int | None = None
        self._kept_left: list[Leftover] | None = None
        self._left: list[Leftover] | None = None
        self._shm, self._scratch = SharedMemory(), scratch
        self._reader = threading.Thread(target=self._listen, args=(status,), name="engine-keeper", daemon=True)
        self._reader.start()

    @property
    def base_url(self) -> str:
        """``http://127.0.0.1:PORT``; raises UsageError where the port is not known."""
        if self.port is None:
            raise UsageError("the engine was launched without a port or a port file, so it has no URL")
        return f"http://127.0.0.1:{self.port}"

    def exit_status(self) -> int | None:
        """The root's exit status, negative for a signal; None while it runs, or where nobody could learn it."""
        if self._exit is None and self._done.is_set() and self.pid:
            # The keeper is gone, so the engine became our child: its status is ours to collect.
            with self._reap_lock, contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._exit = os.waitstatus_to_exitcode(status)
        return self._exit

    def alive(self) -> bool:
        """Whether the engine's root is there; a stopped one (SIGSTOP) is."""
        stat = keeper.read_stat(self.pid)
        return stat is not None and stat.state not in "ZX" and _since_boot(stat.ticks) == self.create_time

    def stop(self, grace: float = DEFAULT_GRACE) -> list[Leftover]:
        """End the engine and all it started; returns what could not be ended (empty as a rule). May be called again.

        SIGTERM to the root, ``grace`` seconds, SIGTERM to what it left, SIGKILL; ``grace`` 0 kills at once. Blocks for
        up to about ``grace`` + 12 s, the latter only where something sits in the kernel.
        """
        with self._lock:
            if self._left is not None:
                return self._left
            kept = self._ask_keeper(grace)
            with contextlib.suppress(OSError):
                os.close(self._control)
            if self._child.poll() is None and not kept:
                self._child.kill()  # it does not answer: stopped, or stuck
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(2.0)
            self._done.wait(2.0)
            if not kept:
                self._shm.look(stat.pid for stat in self._members())
            left = keeper.end_tree(self._members, self.pid, 0.0 if kept else grace, self._pause)
            self._reap()
            self._shm.free()
            if self._scratch and not left:
                keeper.remove_folder(self._scratch)
            self._left = [Leftover(stat.pid, stat.name, stat.state) for stat in left]
            return self._left

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _ask_keeper(self, grace: float) -> bool:
        """Have the keeper end the tree; True when it reported that it did (or never had one)."""
        stat = keeper.read_stat(self.keeper_pid)
        if stat is None or stat.state in "TtZX":
            return False
        try:
            os.write(self._control, f"stop {max(0.0, grace):.3f}\n".encode())
        except OSError:
            return False
        limit = grace + keeper.REST_GRACE + keeper.KILL_WAIT + 3.0
        return self._done.wait(limit) and (self._kept_left is not None or self._failed is not None)

    def _members(self) -> list[keeper.Stat]:
        """What still runs of this launch, whoever its parent is now."""
        stats = keeper.every_stat()
        mine = [stat for stat in stats if stat.pid not in (os.getpid(), self.keeper_pid) and self._is_mine(stat)]
        pids = {stat.pid for stat in mine}
        mine += [stat for stat in keeper.descendants(pids, stats) if stat.pid not in pids]
        self._seen.update((stat.pid, stat.ticks) for stat in mine)
        return [stat for stat in mine if keeper.is_running(stat)]

    def _is_mine(self, stat: keeper.Stat) -> bool:
        if self.pid and stat.session == self.pid and _since_boot(stat.ticks) >= self.create_time:
            return True
        try:
            with open(f"/proc/{stat.pid}/environ", "rb") as file:  # noqa: PTH123
                return f"{MARK}={self._mark}".encode() in file.read().split(b"\0")
        except OSError:
            return False

    def _pause(self, seconds: float) -> float | None:
        self._reap()
        time.sleep(seconds)
        return None

    def _reap(self) -> None:
        """Collect orphans of a killed keeper, our children now. Only those of this launch: others have owners."""
        self.exit_status()
        for pid, ticks in self._seen:
            stat = keeper.read_stat(pid)
            if stat is not None and stat.state == "Z" and stat.ticks == ticks and stat.ppid == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _listen(self, status: int) -> None:
        with os.fdopen(status, "rb") as pipe:
            for line in pipe:
                self._hear(json.loads(line))
        self._done.set()
        self._spoke.set()

    def _hear(self, message: dict[str, Any]) -> None:
        if "started" in message:
            self.pid, self.create_time = message["started"], _since_boot(message["ticks"])
            self._spoke.set()
        elif "failed" in message:
            self._failed = message["failed"]
            self._spoke.set()
        elif "exited" in message:
            self._exit = message["exited"]
        elif "left" in message:
            self._kept_left = [Leftover(*row) for row in message["left"]]

    def wait_started(self) -> str | None:
        """Wait for the keeper's first word; returns why the engine could not be started, or None."""
        if not self._spoke.wait(20.0):
            return "the keeper did not answer within 20 s"
        if self.pid:
            return None
        return self._failed or "the keeper ended at once"


def launch(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log_path: Path,
    cwd: Path | None = None,
    ready: Callable[[EngineProcess], bool] | None = None,
    port: int | None = None,
    port_file: Path | None = None,
    timeout: float = 300.0,
    grace: float = DEFAULT_GRACE,
    scratch: bool = False,
    mark: str = "",
    give_up: Callable[[], str] = lambda: "",
) -> EngineProcess:
    """Start ``argv`` with exactly ``env`` (plus the mark) and wait until it is ready.

    Ready means: the port file holds a port number (where one is given; an old file is removed first), and ``ready``
    returns True (where it is given; asked every 20 ms, an exception ends the wait). Standard output and error are
    appended to ``log_path``; standard input is empty. ``grace`` is what the engine gets should this process vanish.
    With ``scratch`` it gets a temporary folder of its own (``TMPDIR``), removed with all that it left there. ``mark``:
    the value of ``MARK``, made up where empty. ``give_up``: asked while it starts; a text ends the wait.

    Raises EngineStartError, with the exit status and the log's last lines, when the program cannot be run, ends, or is
    not ready within ``timeout`` seconds; then nothing of it is left. Makes this process a subreaper (prctl(2)).
    """
    if not argv:
        raise UsageError("no command to launch: argv is empty")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    if port_file is not None:
        port_file.unlink(missing_ok=True)
    keeper.prctl(keeper.PR_SET_CHILD_SUBREAPER, 1)
    with log_path.open("ab") as log:
        log_start = log.seek(0, os.SEEK_END)
        folder = tempfile.mkdtemp(prefix="soakrig-") if scratch else ""
        engine = _start_keeper([*argv], {**env, "TMPDIR": folder} if folder else {**env}, log, cwd, grace, folder, mark)
    engine.port = port
    try:
        _wait_ready(engine, argv, ready, port_file, timeout, log_start, give_up)
    except BaseException:
        engine.stop(min(grace, 5.0))
        raise
    return engine


def _start_keeper(
    argv: list[str], env: dict[str, str], log: IO[bytes], cwd: Path | None, grace: float, scratch: str, mark: str
) -> EngineProcess:
    mark = mark or uuid.uuid4().hex
    env[MARK] = mark
    status_read, status_write = os.pipe()
    control_read, control_write = os.pipe()
    package_root = str(Path(keeper.__file__).parents[2])
    arguments = [str(one) for one in (package_root, status_write, control_read, os.getpid(), grace, scratch)]
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", keeper.START, *arguments, "--", *argv],
            env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=(status_write, control_read), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        for fd in (status_read, control_write):
            os.close(fd)
        if scratch:
            keeper.remove_folder(scratch)
        raise EngineStartError(f"the engine's keeper could not be started in {cwd or Path.cwd()}: {error}") from error
    finally:
        for fd in (status_write, control_read):
            os.close(fd)
    return EngineProcess(child, status_read, control_write, mark, Path(log.name), scratch)


def _wait_ready(
    engine: EngineProcess,
    argv: Sequence[str],
    ready: Callable[[EngineProcess], bool] | None,
    port_file: Path | None,
    timeout: float,
    log_start: int,
    give_up: Callable[[], str],
) -> None:
    def fail(what: str, remedy: str, status: int | None = None) -> EngineStartError:
        tail = log_tail(engine.log_path, log_start)
        shown = f"; its last words:\n{tail}" if tail else "; it wrote nothing"
        return EngineStartError(
            f"{what}{shown}", remedy=f"{remedy}; the whole log is {engine.log_path}", exit_status=status
        )

    deadline = time.monotonic() + timeout
    reason = engine.wait_started()
    if reason:
        raise EngineStartError(f"{argv[0]!r} could not be started: {reason}", remedy="check the command and its PATH")
    while True:
        # Read before the checks: an engine that became ready and then died is dead.
        up = _port_known(engine, port_file) and (ready is None or ready(engine))
        if not engine.alive():
            end = time.monotonic() + 1.0
            while engine.exit_status() is None and time.monotonic() < end:
                time.sleep(_POLL)
            status = engine.exit_status()
            raise fail(f"the engine ended before it was ready, {_how(status)}", "see why in the log", status)
        if up:
            return
        if why := give_up():
            raise EngineStartError(f"the engine was given up before it was ready: {why}")
        if time.monotonic() >= deadline:
            raise fail(f"the engine was not ready within {timeout:g} s", "allow more time, or see what it waits for")
        time.sleep(_POLL)


def _port_known(engine: EngineProcess, port_file: Path | None) -> bool:
    if port_file is None:
        return True
    try:
        text = port_file.read_text().strip()
    except FileNotFoundError:
        return False
    if text.isdigit() and 0 < int(text) < 65536:
        engine.port = int(text)
        return True
    return False


def _how(status: int | None) -> str:
    if status is None:
        return "exit status unknown"
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


def _since_boot(ticks: int) -> float:
    return ticks / _TICKS_PER_SECOND


def log_tail(path: Path, start: int = 0) -> str:
    """The last lines (at most 20 and 16 KiB) of a log after byte ``start``; empty when there are none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
