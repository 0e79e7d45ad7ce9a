"""Ending what a dead tool had launched, on real processes: found by the mark, waited for, killed, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from soakrig.engine import keeper
from soakrig.engine.launcher import MARK
from soakrig.engine.leftovers import end_leftovers, marked

WAITS = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); sys.stdin.read()"
# Starts a child in a session of its own without any environment, says its pid, and waits.
WITH_CHILD = """
import subprocess, sys
code = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-c", code], env={}, start_new_session=True)
print(child.pid, flush=True)
sys.stdin.read()
"""
# Launches an engine under a keeper as a campaign does, and waits to be killed.
TOOL = """
import os, sys, time
from pathlib import Path
from soakrig.engine.launcher import launch
engine = launch([sys.executable, "-S", "-c", "import time; time.sleep(600)"], env=dict(os.environ),
                log_path=Path(sys.argv[1]) / "engine.log", mark=sys.argv[2], grace=0.2)
print(engine.pid, engine.keeper_pid, flush=True)
time.sleep(600)
"""
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program with a mark; it has said something by the time this returns: ``said``."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin(mark: str | None, code: str = WAITS, *words: str) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if name != MARK}
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code, *words], env=env if mark is None else {**env, MARK: mark},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        begun.append(process)
        assert process.stdout is not None
        process.said = process.stdout.readline().split()  # type: ignore[attr-defined]
        return process

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def pids(mark: str) -> set[int]:
    return {stat.pid for stat in marked(mark)}


def runs(pid: int) -> bool:
    stat = keeper.read_stat(pid)
    return stat is not None and keeper.is_running(stat)


def test_only_what_has_the_very_mark_is_found(start: Start, tmp_path: Path) -> None:
    mark = f"{tmp_path}#1"
    mine, more, none = start(mark), start(f"{mark}2"), start(None)
    argument = start(None, WAITS, f"{MARK}={mark}")
    assert pids(mark) == {mine.pid}
    assert end_leftovers(mark, patience_s=0.0) == []
    assert mine.wait(5) == -signal.SIGKILL, "it ignores SIGTERM, and is not asked"
    assert [one.poll() for one in (more, none, argument)] == [None] * 3
    assert pids(f"{mark}2") == {more.pid}


def test_what_it_started_goes_too_though_it_has_no_mark_of_its_own(start: Start, tmp_path: Path) -> None:
    mark = f"{tmp_path}#1"
    process = start(mark, WITH_CHILD)
    child = int(process.said[0])  # type: ignore[attr-defined]
    assert pids(mark) == {process.pid, child}
    assert len(marked(mark)) == 2, "each once"
    assert end_leftovers(mark, patience_s=0.0) == []
    assert not runs(child)
    assert not runs(process.pid)


def test_a_child_that_has_the_mark_as_well_is_there_once(start: Start, tmp_path: Path) -> None:
    mark = f"{tmp_path}#1"
    process = start(mark, WITH_CHILD.replace("env={}, ", ""))
    assert sorted(stat.pid for stat in marked(mark)) == sorted([process.pid, int(process.said[0])])  # type: ignore[attr-defined]
    assert end_leftovers(mark, patience_s=0.0) == []


def test_what_only_waits_to_be_reaped_is_not_waited_for(start: Start, tmp_path: Path) -> None:
    mark = f"{tmp_path}#1"
    process = start(mark)
    process.kill()
    assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    began = time.monotonic()
    assert pids(mark) == set()
    assert end_leftovers(mark, patience_s=60.0) == []
    assert time.monotonic() - began < 5.0


def test_nothing_there_takes_no_time(tmp_path: Path) -> None:
    began = time.monotonic()
    assert end_leftovers(f"{tmp_path}#1", patience_s=60.0) == []
    assert time.monotonic() - began < 5.0


def test_what_ends_by_itself_within_the_patience_is_not_killed(start: Start, tmp_path: Path) -> None:
    mark = f"{tmp_path}#1"
    process = start(mark, "import time; print(1, flush=True); time.sleep(0.4); raise SystemExit(7)")
    assert end_leftovers(mark, patience_s=30.0) == []
    assert process.wait(5) == 7


def test_the_keeper_of_a_killed_tool_ends_the_engine_and_this_waits_for_it(start: Start, tmp_path: Path) -> None:
    mark = f"{tmp_path}#1"
    root = Path(keeper.__file__).parents[2]
    tool = start(None, f"import sys; sys.path.insert(0, {str(root)!r})\n{TOOL}", str(tmp_path), mark)
    engine, its_keeper = (int(word) for word in tool.said)  # type: ignore[attr-defined]
    assert {engine, its_keeper} <= pids(mark)
    tool.kill()
    began = time.monotonic()
    assert end_leftovers(mark) == []
    assert not runs(engine)
    assert not runs(its_keeper)
    assert time.monotonic() - began < 15.0


def test_what_cannot_be_ended_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test can make a process that waits inside the kernel for ever: the walk over /proc shows one here."""
    stuck = keeper.Stat(0x3FFFFF, "python3", "D", 1, 1, 1)
    monkeypatch.setattr("soakrig.engine.leftovers.marked", lambda mark: [stuck])
    monkeypatch.setattr("soakrig.engine.keeper.KILL_WAIT", 0.1)
    assert end_leftovers(f"{tmp_path}#1", patience_s=0.0) == [(0x3FFFFF, "python3", "D")]
