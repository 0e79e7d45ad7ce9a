"""The process watcher on real processes: exits, stops, D state, orphans, figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from soakrig.clock import RealClock
from soakrig.record.signal import Signal
from soakrig.soak.watch import proc
from soakrig.soak.watch.process import ProcessWatcher

# Starts one child, prints both pids, and waits; the child waits too.
PARENT = """
import os, sys, time
pid = os.fork()
if pid == 0:
    time.sleep(600)
print(os.getpid(), pid, flush=True)
{then}
"""

# A vfork parent is in D state (kernel_clone) until its child ends or runs another program.
VFORK = """
import ctypes, os, platform, signal, time
number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
print(os.getpid(), 0, flush=True)
pid = ctypes.PyDLL(None).syscall(number, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0)
if pid == 0:
    time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


class Tree:
    """A started process and what it printed."""

    def __init__(self, code: str) -> None:
        argv = [sys.executable, "-S", "-c", code]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        self.pid, self.child = map(int, self.process.stdout.readline().split())

    def end(self) -> None:
        # A killed vfork parent leaves its child to us by session only.
        for one in psutil.process_iter():
            try:
                if os.getsid(one.pid) == self.pid:
                    one.kill()
            except (psutil.Error, ProcessLookupError):
                continue
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def tree() -> Iterator[Callable[[str], Tree]]:
    trees: list[Tree] = []

    def make(then: str = "time.sleep(600)", code: str = PARENT) -> Tree:
        trees.append(Tree(code.replace("{then}", then)))
        return trees[-1]

    yield make
    for one in trees:
        one.end()


def watch(tree: Tree, **options: object) -> ProcessWatcher:
    options = {"create_time": proc.create_time(tree.pid), "interval": 0.05, **options}
    watcher = ProcessWatcher(tree.pid, RealClock(), **options)  # type: ignore[arg-type]
    assert watcher.open().state == "live"
    watcher.poll()
    return watcher


def until(watcher: ProcessWatcher, kind: str, seconds: float = 10.0) -> list[Signal]:
    """Poll until a signal of ``kind`` comes; all signals up to it."""
    found: list[Signal] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found += watcher.poll().signals
        if any(one.kind == kind for one in found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {kind} within {seconds} s, only {found}")


def test_figures_are_those_of_the_whole_tree(tree: Callable[..., Tree]) -> None:
    one = tree("block = bytearray(b'x' * (40 << 20)); end = time.monotonic() + 600\nwhile True: pass")
    watcher = watch(one)
    sample = None
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        time.sleep(0.1)
        sample = watcher.poll().sample
        if sample and sample["rss_mib"] > 45 and sample["cpu_percent"] > 30:
            break
    assert sample is not None
    assert 45 < sample["rss_mib"] < 200
    assert 30 < sample["cpu_percent"] < 130
    assert sample["processes"] == 2
    assert sample["threads"] == 2
    assert sample["fds"] >= 6
    first = ProcessWatcher(one.pid, RealClock())
    first.open()
    sample = first.poll().sample
    assert sample is not None
    assert 40 < sample["uss_mib"] <= sample["rss_mib"] + 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, -15)])
def test_the_roots_exit_is_a_fault_and_names_who_is_left(
    tree: Callable[..., Tree], number: signal.Signals, status: int
) -> None:
    one = tree()
    watcher = watch(one, exit_status=one.process.poll)
    os.kill(one.pid, number)
    signals = until(watcher, "process_exit")
    (told,) = [s for s in signals if s.kind == "process_exit"]
    assert told.severity == "fault"
    assert told.pid == one.pid
    assert told.detail["exit_status"] == status
    assert [row["pid"] for row in told.detail["left"]] == [one.child]
    sample = watcher.poll().sample
    assert sample is not None
    assert sample["processes"] == 1, "an orphan is watched on"
    assert not proc.is_alive(one.pid, None)[0]


def test_an_orphan_is_told_and_its_own_end_too(tree: Callable[..., Tree]) -> None:
    one = tree()
    watcher = watch(one, exit_status=one.process.poll)
    os.kill(one.pid, signal.SIGKILL)
    (told,) = [s for s in until(watcher, "reparented") if s.kind == "reparented"]
    assert told.pid == one.child
    os.kill(one.child, signal.SIGKILL)
    (told,) = [s for s in until(watcher, "child_exit") if s.kind == "child_exit"]
    assert told.pid == one.child


def test_what_an_orphan_starts_belongs_to_the_tree_too(tree: Callable[..., Tree]) -> None:
    code = (
        "import os, signal, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    signal.signal(signal.SIGUSR1, lambda *_: os.fork())\n"
        "    while True: time.sleep(600)\n"
        "print(os.getpid(), pid, flush=True)\n"
        "time.sleep(600)"
    )
    one = tree(code=code)
    watcher = watch(one, exit_status=one.process.poll)
    os.kill(one.pid, signal.SIGKILL)
    until(watcher, "reparented")
    os.kill(one.child, signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while len(watcher._members) < 2 and time.monotonic() < deadline:
        watcher.poll()
    assert len(watcher._members) == 2


def test_a_zombie_root_is_dead_and_its_status_is_read_from_proc(tree: Callable[..., Tree]) -> None:
    """Attached by pid, nobody tells the status; here the test is the parent and does not reap."""
    if os.geteuid() != 0:
        pytest.skip("the exit code of a zombie is shown to root (and to who may trace it)")
    one = tree("sys.exit(5)")
    alive = True
    deadline = time.monotonic() + 10
    while alive and time.monotonic() < deadline:
        alive, detail = proc.is_alive(one.pid, None)
    assert not alive
    assert "zombie" in detail
    stat = proc.read_stat(one.pid)
    assert stat is not None
    assert os.waitstatus_to_exitcode(stat.exit_code) == 5


def test_a_childs_end_is_a_warning_with_its_name(tree: Callable[..., Tree]) -> None:
    one = tree()
    watcher = watch(one)
    os.kill(one.child, signal.SIGKILL)
    (told,) = until(watcher, "child_exit")
    assert told.pid == one.child
    assert told.process is not None
    assert told.process.startswith("python")
    assert told.severity == "info", "it was watched for less than two seconds"
    assert proc.is_alive(one.pid, None)[0]


@pytest.mark.parametrize("who", ["pid", "child"])
def test_a_stopped_process_is_a_fault_and_may_go_on(tree: Callable[..., Tree], who: str) -> None:
    one = tree()
    watcher = watch(one)
    os.kill(getattr(one, who), signal.SIGSTOP)
    (told,) = until(watcher, "process_stopped")
    assert (told.severity, told.pid) == ("fault", getattr(one, who))
    if who == "pid":
        alive, detail = proc.is_alive(one.pid, None)
        assert alive
        assert "stopped" in detail
    os.kill(getattr(one, who), signal.SIGCONT)
    (told,) = until(watcher, "process_resumed")
    assert told.severity == "info"


def test_d_state_is_found_with_its_place(tree: Callable[..., Tree]) -> None:
    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("the number of clone(2) is known here for x86-64 and aarch64 only")
    one = tree(code=VFORK)
    watcher = watch(one, stuck_seconds=0.1)
    (told,) = until(watcher, "d_state")
    assert told.severity == "fault"
    assert told.pid == one.pid
    if os.geteuid() == 0:
        assert told.detail["wchan"] == "kernel_clone"
    assert watcher.poll().signals == []


def test_a_busy_process_is_quiet(tree: Callable[..., Tree]) -> None:
    code = "import tempfile; file = tempfile.TemporaryFile(); fd = file.fileno()\n"
    one = tree(code + "while True: os.write(fd, b'x' * 65536); os.fsync(fd); os.lseek(fd, 0, 0)")
    watcher = watch(one, stuck_seconds=0.0)
    for _ in range(60):
        assert [s for s in watcher.poll().signals if s.severity == "fault"] == []
        time.sleep(0.01)


def test_a_keepers_inheritance_belongs_to_the_tree(tree: Callable[..., Tree]) -> None:
    """A daemon that left the engine between two polls hangs under the keeper: it is found there."""
    one = tree(
        "keeper = os.getpid()\n"
        "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        "engine = os.fork()\n"
        "if engine == 0:\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0: time.sleep(600)\n"
        "        os._exit(0)\n"
        "    time.sleep(600)\n"
        "time.sleep(600)"
    )
    deadline = time.monotonic() + 10
    kids: list[psutil.Process] = []
    while len(kids) < 2 and time.monotonic() < deadline:
        kids = [k for k in psutil.Process(one.pid).children() if k.pid != one.child and k.status() != "zombie"]
    engine, daemon = sorted((k.pid for k in kids), key=lambda pid: os.getsid(pid) != one.pid)
    try:
        watcher = ProcessWatcher(engine, RealClock(), keeper_pid=one.pid)
        watcher.open()
        watcher.poll()
        assert daemon in watcher._members
        assert one.pid not in watcher._members
    finally:
        os.kill(daemon, signal.SIGKILL)
