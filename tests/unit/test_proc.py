"""Reading /proc: on files for what cannot be made at will, on this very process for what can."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from soakrig.clock import FakeClock
from soakrig.errors import WatcherError
from soakrig.soak.watch import proc
from soakrig.soak.watch.process import ProcessWatcher

KILL = 1 << 8


def write(
    root: Path, pid: int, tid: int | None = None, *, state: str = "S", name: str = "python3", cpu: int = 7,
    start: int = 4200, switches: int = 100, pending: int = 0, wchan: str = "0", ppid: int = 1, exit_code: int = 0,
) -> None:  # fmt: skip
    """The files of one thread in proc(5)'s shape; the leader's are those of the process as well."""
    fields = [
        str(ppid),
        "1",
        "1",
        "0",
        "-1",
        "4194304",
        "0",
        "0",
        "0",
        "0",
        str(cpu),
        "0",
        "0",
        "0",
        "20",
        "0",
        "1",
        "0",
    ]
    rest = " ".join([*fields, str(start), *["0"] * 29, str(exit_code)])
    status = (
        f"Name:\t{name}\nState:\t{state}\nSigPnd:\t{pending:016x}\nShdPnd:\t{0:016x}\n"
        f"voluntary_ctxt_switches:\t{switches - 1}\nnonvoluntary_ctxt_switches:\t1\n"
    )
    thread = pid if tid is None else tid
    folders = [root / str(pid) / "task" / str(thread)] + ([root / str(pid)] if tid is None else [])
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(f"{thread} ({name}) {state} {rest}\n")
        (folder / "status").write_text(status)
        (folder / "wchan").write_text(wchan)


def kinds(watcher: ProcessWatcher, clock: FakeClock, polls: int) -> list[str]:
    """Kinds of the signals of some polls, a second apart."""
    found: list[str] = []
    for _ in range(polls):
        found += [signal.kind for signal in watcher.poll().signals]
        clock._now += 1.0
    return found


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def watcher(tmp_path: Path, clock: FakeClock) -> ProcessWatcher:
    """Watches this process, with states read from files under tmp_path."""
    write(tmp_path, os.getpid())
    one = ProcessWatcher(os.getpid(), clock, root=tmp_path)
    one.open()
    return one


@pytest.mark.parametrize("name", ["python3", "VLLM::Engine (x", "a) b (c", "tmux: server", ") S 1"])
def test_a_name_may_hold_anything(tmp_path: Path, name: str) -> None:
    write(tmp_path, 77, name=name, state="D", start=250, ppid=12, cpu=31, exit_code=9)
    stat = proc.read_stat(77, tmp_path)
    assert stat == proc.Stat(77, name, "D", 12, 31, 250 / os.sysconf("SC_CLK_TCK"), 9)


def test_this_process_is_read_as_psutil_reads_it() -> None:
    stat = proc.read_stat(os.getpid())
    assert stat is not None
    assert stat.name == psutil.Process().name()
    assert stat.ppid == os.getppid()
    assert abs(psutil.boot_time() + stat.create_time - psutil.Process().create_time()) < 1.5
    assert proc.is_alive(os.getpid(), stat.create_time)[0]
    leader = proc.threads(os.getpid())[0]
    assert leader.tid == os.getpid()
    assert leader.kill_pending is False
    assert leader.switches is not None


def test_what_is_not_there(tmp_path: Path) -> None:
    assert proc.read_stat(77, tmp_path) is None
    assert proc.create_time(77, tmp_path) is None
    assert proc.threads(77, tmp_path) == []
    assert proc.thread_count(77, tmp_path) == 0
    assert proc.is_alive(77, None, tmp_path) == (False, "pid 77 is gone")


@pytest.mark.parametrize(
    ("state", "alive", "word"),
    [("S", True, "sleeping"), ("R", True, "running"), ("D", True, "uninterruptible"), ("T", True, "stopped"),
     ("Z", False, "zombie"), ("X", False, "dead")],
)  # fmt: skip
def test_alive_by_state(tmp_path: Path, state: str, *, alive: bool, word: str) -> None:
    write(tmp_path, 77, state=state)
    found, detail = proc.is_alive(77, proc.create_time(77, tmp_path), tmp_path)
    assert found is alive
    assert word in detail


def test_a_pid_given_to_another_process_is_not_alive(tmp_path: Path) -> None:
    write(tmp_path, 77, start=100)
    before = proc.create_time(77, tmp_path)
    write(tmp_path, 77, start=101, name="bash")
    alive, detail = proc.is_alive(77, before, tmp_path)
    assert not alive
    assert "bash" in detail


def test_a_thread_that_hangs_is_told_once_with_its_place(
    tmp_path: Path, watcher: ProcessWatcher, clock: FakeClock
) -> None:
    pid = os.getpid()
    write(tmp_path, pid, 9001, state="D", name="uvm worker", wchan="uvm_va_space_down_read")
    assert kinds(watcher, clock, 5) == [], "five samples span four seconds"
    signals = watcher.poll().signals
    assert [(s.kind, s.severity, s.detail["tid"]) for s in signals] == [("d_state", "fault", 9001)]
    assert "uvm_va_space_down_read" in signals[0].raw
    assert signals[0].detail["seconds"] == 5.0
    assert kinds(watcher, clock, 5) == []


@pytest.mark.parametrize("moves", ["wchan", "cpu", "switches", "state"])
def test_a_thread_that_moves_does_not_hang(
    tmp_path: Path, watcher: ProcessWatcher, clock: FakeClock, moves: str
) -> None:
    found: list[str] = []
    for turn in range(12):
        now: dict[str, object] = {
            "wchan": {"wchan": f"folio_wait_{turn}"}, "cpu": {"cpu": turn}, "switches": {"switches": 50 + turn},
            "state": {"state": "D" if turn % 4 else "S"},
        }[moves]  # fmt: skip
        write(tmp_path, os.getpid(), 9001, **{"state": "D", "wchan": "io_schedule", **now})  # type: ignore[arg-type]
        found += kinds(watcher, clock, 1)
    assert found == []


def test_three_samples_are_needed_however_far_apart(tmp_path: Path, watcher: ProcessWatcher, clock: FakeClock) -> None:
    write(tmp_path, os.getpid(), 9001, state="D", wchan="rwsem_down_read_slowpath")
    counts: list[int] = []
    for _ in range(3):
        counts.append(len(watcher.poll().signals))
        clock._now += 60.0
    assert counts == [0, 0, 1]


@pytest.mark.parametrize("state", ["D", "R"])
def test_a_sigkill_that_is_not_taken(tmp_path: Path, watcher: ProcessWatcher, clock: FakeClock, state: str) -> None:
    """State R matters as much: a thread that spins in the driver never goes to sleep."""
    write(tmp_path, os.getpid(), state=state, pending=KILL, cpu=1)
    found: list[str] = []
    for turn in range(8):
        write(tmp_path, os.getpid(), state=state, pending=KILL, cpu=turn)
        found += kinds(watcher, clock, 1)
    assert found == ["sigkill_pending"]


def test_other_pending_signals_are_nothing(tmp_path: Path, watcher: ProcessWatcher, clock: FakeClock) -> None:
    write(tmp_path, os.getpid(), pending=1 << 14)
    assert kinds(watcher, clock, 8) == []


def test_a_dead_leader_with_living_threads_is_a_fault(
    tmp_path: Path, watcher: ProcessWatcher, clock: FakeClock
) -> None:
    write(tmp_path, os.getpid(), state="Z")
    write(tmp_path, os.getpid(), 9001, state="R", pending=KILL)
    assert kinds(watcher, clock, 8) == ["zombie", "sigkill_pending"]


def test_a_leader_that_dies_before_its_threads_is_nothing_for_a_moment(
    tmp_path: Path, watcher: ProcessWatcher, clock: FakeClock
) -> None:
    write(tmp_path, os.getpid(), state="Z")
    write(tmp_path, os.getpid(), 9001, state="R")
    assert kinds(watcher, clock, 4) == []


def test_a_zombie_is_an_exit_and_its_status_is_read(tmp_path: Path, watcher: ProcessWatcher) -> None:
    write(tmp_path, os.getpid(), state="Z", exit_code=9)
    (signal,) = watcher.poll().signals
    assert (signal.kind, signal.severity, signal.detail["exit_status"]) == ("process_exit", "fault", -9)
    assert watcher.poll().signals == []


def test_a_reused_pid_is_an_exit(tmp_path: Path, watcher: ProcessWatcher) -> None:
    write(tmp_path, os.getpid(), start=4201, name="bash")
    assert [signal.kind for signal in watcher.poll().signals] == ["process_exit"]


def test_stopped_and_resumed(tmp_path: Path, watcher: ProcessWatcher, clock: FakeClock) -> None:
    write(tmp_path, os.getpid(), state="T")
    (signal,) = watcher.poll().signals
    assert (signal.kind, signal.severity) == ("process_stopped", "fault")
    clock._now += 4.0
    assert watcher.poll().signals == []
    write(tmp_path, os.getpid(), state="S")
    (signal,) = watcher.poll().signals
    assert (signal.kind, signal.severity, signal.detail["seconds"]) == ("process_resumed", "info", 4.0)


def test_a_tracer_is_no_fault_and_needs_two_samples(tmp_path: Path, watcher: ProcessWatcher) -> None:
    write(tmp_path, os.getpid(), state="t")
    assert watcher.poll().signals == []
    (signal,) = watcher.poll().signals
    assert (signal.kind, signal.severity) == ("traced", "warning")


def test_nothing_to_watch_is_a_watcher_error(tmp_path: Path, clock: FakeClock) -> None:
    with pytest.raises(WatcherError, match="pid 77 is gone"):
        ProcessWatcher(77, clock, root=tmp_path).open()


def test_an_engine_that_died_before_the_watch_is_still_told(tmp_path: Path, clock: FakeClock) -> None:
    watcher = ProcessWatcher(77, clock, root=tmp_path, exit_status=lambda: 3)
    watcher.open()
    (signal,) = watcher.poll().signals
    assert (signal.kind, signal.detail["exit_status"]) == ("process_exit", 3)
    assert watcher.poll().signals == []
