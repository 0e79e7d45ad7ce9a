"""The launcher and its keeper, on real processes: nothing of an engine outlives the tool, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from soakrig.engine import keeper
from soakrig.engine.bundled import Order, launch_bundled, preview
from soakrig.engine.launcher import MARK, EngineProcess, launch
from soakrig.engine.ports import holder, refuse_if_taken
from soakrig.errors import EngineStartError, PreflightRefusedError, UsageError

SLEEPER = "import time; time.sleep(600)"

# Ignores SIGTERM, leaves one child in its own session (forked twice) that ignores SIGTERM too and has no environment,
# and one plain child; then says that it is ready.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
out = sys.argv[1]
def note(name):
    with open(os.path.join(out, name + ".new"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(os.path.join(out, name + ".new"), os.path.join(out, name))
if os.fork() == 0:
    note("child")
    time.sleep(600)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note("daemon")
        time.sleep(600)
    os._exit(0)
os.wait()
note("engine")
time.sleep(600)
"""

TOOL = """
import os, sys, time
from pathlib import Path
from soakrig.engine.launcher import launch
out = Path(sys.argv[1])
names = ("engine", "child", "daemon")
engine = launch([sys.executable, "-S", sys.argv[2], str(out)], env=dict(os.environ), log_path=out / "engine.log",
                ready=lambda e: all((out / name).exists() for name in names), timeout=20, grace=0.2)
(out / "keeper").write_text(str(engine.keeper_pid))
holder = os.fork()
if holder == 0:  # a forked child that keeps the tool's end of the control pipe open
    time.sleep(600)
(out / "holder").write_text(str(holder))
(out / "tool.new").write_text(str(os.getpid()))
os.rename(out / "tool.new", out / "tool")
time.sleep(600)
"""


def until(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Poll real processes until ``what`` holds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.01)
    return what()


def running(pid: int) -> bool:
    stat = keeper.read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def marked(value: str) -> list[int]:
    """Processes that carry a launch mark: an own walk, not the launcher's."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def started() -> Iterator[list[EngineProcess]]:
    """Engines to end whatever happens to the test."""
    engines: list[EngineProcess] = []
    yield engines
    for engine in engines:
        engine.stop(0)


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", code, *arguments]


def start(tmp_path: Path, started: list[EngineProcess], argv: list[str], **options: object) -> EngineProcess:
    options = {"env": dict(os.environ), "log_path": tmp_path / "engine.log", "timeout": 20.0, **options}
    engine = launch(argv, **options)  # type: ignore[arg-type]
    started.append(engine)
    return engine


def stubborn(tmp_path: Path, started: list[EngineProcess]) -> tuple[EngineProcess, dict[str, int]]:
    names = ("engine", "child", "daemon")
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    argv = [sys.executable, "-S", str(script), str(tmp_path)]
    engine = start(tmp_path, started, argv, ready=lambda _: all((tmp_path / name).exists() for name in names))
    return engine, {name: int((tmp_path / name).read_text()) for name in names}


def test_a_plain_engine_is_launched_seen_and_stopped(tmp_path: Path, started: list[EngineProcess]) -> None:
    engine = start(tmp_path, started, python("print('hello', flush=True); " + SLEEPER))
    assert engine.alive()
    assert engine.exit_status() is None
    assert psutil.Process(engine.pid).ppid() == engine.keeper_pid
    assert os.getsid(engine.pid) == engine.pid != os.getsid(0), "Ctrl-C on our terminal must not reach the engine"
    assert until(lambda: "hello" in (tmp_path / "engine.log").read_text())
    assert engine.stop(5.0) == []
    assert engine.exit_status() == -signal.SIGTERM
    assert not engine.alive()
    assert not running(engine.keeper_pid)
    assert engine.stop() == [], "stopping twice is harmless"


def test_the_engine_gets_the_environment_that_was_given_and_nothing_else(tmp_path: Path) -> None:
    code = "import os; print(sorted(os.environ), os.getcwd(), flush=True)"
    with launch(
        python(code + ";" + SLEEPER), env={"ONLY": "1"}, log_path=tmp_path / "engine.log", cwd=tmp_path, timeout=20,
        ready=lambda _: "]" in (tmp_path / "engine.log").read_text(),
    ) as engine:  # fmt: skip
        text = (tmp_path / "engine.log").read_text()
        assert f"'ONLY', '{MARK}'" in text
        assert "PATH" not in text
        assert str(tmp_path) in text
    assert not running(engine.pid)


def test_a_port_file_makes_the_base_url_and_a_stale_one_is_not_believed(
    tmp_path: Path, started: list[EngineProcess]
) -> None:
    port_file = tmp_path / "port"
    port_file.write_text("9")
    code = f"import time; time.sleep(0.3); open({str(port_file)!r}, 'w').write('4711'); time.sleep(600)"
    engine = start(tmp_path, started, python(code), port_file=port_file)
    assert engine.port == 4711
    assert engine.base_url == "http://127.0.0.1:4711"


def test_no_port_no_url(tmp_path: Path, started: list[EngineProcess]) -> None:
    engine = start(tmp_path, started, python(SLEEPER))
    with pytest.raises(UsageError, match="port"):
        _ = engine.base_url


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("pass", 0),
    ],
)
def test_exit_statuses(tmp_path: Path, started: list[EngineProcess], code: str, status: int) -> None:
    go = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    engine = start(tmp_path, started, python(wait + code))
    go.touch()
    assert until(lambda: engine.exit_status() is not None)
    assert engine.exit_status() == status
    assert until(lambda: not engine.alive())
    assert engine.stop() == []


def test_death_during_the_start_says_how_and_shows_the_log(tmp_path: Path) -> None:
    code = "import sys; print('no such model', file=sys.stderr); sys.exit(7)"
    with pytest.raises(EngineStartError, match=r"(?s)exit status 7.*no such model") as caught:
        launch(python(code), env={}, log_path=tmp_path / "l", port_file=tmp_path / "port", timeout=20)
    assert str(tmp_path / "l") in caught.value.remedy


def test_only_this_launchs_part_of_the_log_is_shown(tmp_path: Path) -> None:
    (tmp_path / "l").write_text("words of an earlier run\n")
    with pytest.raises(EngineStartError) as caught:
        launch(python("raise SystemExit(7)"), env={}, log_path=tmp_path / "l", port_file=tmp_path / "port", timeout=20)
    assert "earlier" not in str(caught.value)
    assert "it wrote nothing" in str(caught.value)


def test_a_start_that_takes_too_long_leaves_nothing(tmp_path: Path) -> None:
    pids: list[int] = []

    def ready(engine: EngineProcess) -> bool:
        pids.append(engine.pid)
        return False

    with pytest.raises(EngineStartError, match=r"not ready within 0\.2 s"):
        launch(python(SLEEPER), env={}, log_path=tmp_path / "l", ready=ready, timeout=0.2)
    assert not running(pids[0])


def test_a_start_may_be_given_up(tmp_path: Path) -> None:
    pids: list[int] = []

    def ready(engine: EngineProcess) -> bool:
        pids.append(engine.pid)
        return False

    with pytest.raises(EngineStartError, match="given up before it was ready: stopped by Ctrl-C") as caught:
        launch(
            python(SLEEPER), env={}, log_path=tmp_path / "l", ready=ready, timeout=600.0,
            give_up=lambda: "stopped by Ctrl-C" if len(pids) > 2 else "",
        )  # fmt: skip
    assert caught.value.exit_status is None
    assert len(pids) == 3
    assert not running(pids[0])


def test_an_engine_that_is_ready_is_not_given_up(tmp_path: Path, started: list[EngineProcess]) -> None:
    engine = start(tmp_path, started, python(SLEEPER), ready=lambda _: True, give_up=lambda: "too late")
    assert engine.alive()


def test_the_mark_may_be_chosen(tmp_path: Path, started: list[EngineProcess]) -> None:
    mark = f"{tmp_path}#7"
    engine = start(tmp_path, started, python(SLEEPER), mark=mark, env={MARK: "of the caller"})
    assert set(marked(mark)) == {engine.pid, engine.keeper_pid}
    assert engine.stop(0) == []
    assert marked(mark) == []
    other = start(tmp_path, started, python(SLEEPER))
    assert psutil.Process(other.pid).environ()[MARK] not in ("", mark), "else one is made up"


def test_an_order_says_from_whose_environment_and_under_which_mark(
    tmp_path: Path, started: list[EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FORGOTTEN", "1")
    mark, caller = f"{tmp_path}#3", {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "NO_SUCH_PREFIX": "1"}
    flags = ["--layers=1", "--experts=4", "--hidden=64", "--threads=1"]
    order = Order("embedded", {"VLLM_MOE_DMA_STAGING": "0"}, flags, caller=caller, mark=mark)
    argv, env = preview(order, tmp_path / "engine.port")
    engine = launch_bundled(order, tmp_path)
    started.append(engine)
    found = psutil.Process(engine.pid)
    assert found.cmdline() == argv
    there = {name: value for name, value in found.environ().items() if name != "LC_CTYPE"}  # PEP 538
    assert there == {**env, MARK: mark}
    assert env["VLLM_MOE_DMA_STAGING"] == "0"
    assert env["OMP_NUM_THREADS"] == "1"
    assert not {"VLLM_FORGOTTEN", "NO_SUCH_PREFIX"} & set(env)
    assert "VLLM_FORGOTTEN" in preview(Order("embedded", {}, []), tmp_path / "p")[1], "without a caller: this process"
    assert "PATH" not in preview(Order("embedded", {}, [], caller={}), tmp_path / "p")[1], "an empty one is one too"


def test_an_order_is_given_up_while_the_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="given up before it was ready: stopped by SIGTERM"):
        launch_bundled(Order("embedded", {}, [], mark=f"{tmp_path}#4"), tmp_path, give_up=lambda: "stopped by SIGTERM")
    assert marked(f"{tmp_path}#4") == []


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="no-such-program"):
        launch(["no-such-program"], env={"PATH": "/bin"}, log_path=tmp_path / "l")
    with pytest.raises(EngineStartError, match="nowhere"):
        launch(python(SLEEPER), env={}, log_path=tmp_path / "l", cwd=tmp_path / "nowhere")
    with pytest.raises(UsageError, match="empty"):
        launch([], env={}, log_path=tmp_path / "l")


def test_daemons_that_ignore_sigterm_are_ended(tmp_path: Path, started: list[EngineProcess]) -> None:
    engine, pids = stubborn(tmp_path, started)
    assert psutil.Process(pids["daemon"]).ppid() == engine.keeper_pid
    assert engine.stop(0.3) == []
    assert [name for name, pid in pids.items() if running(pid)] == []
    assert engine.exit_status() == -signal.SIGKILL


def test_children_that_outlive_the_engine_are_ended(tmp_path: Path, started: list[EngineProcess]) -> None:
    engine, pids = stubborn(tmp_path, started)
    os.kill(engine.pid, signal.SIGKILL)
    assert until(lambda: engine.exit_status() == -signal.SIGKILL)
    assert running(pids["daemon"]), "the launcher must not end what the watchers still have to see"
    assert engine.stop(0.2) == []
    assert [name for name, pid in pids.items() if running(pid)] == []


def test_a_stopped_engine_is_ended(tmp_path: Path, started: list[EngineProcess]) -> None:
    engine, pids = stubborn(tmp_path, started)
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    assert until(lambda: psutil.Process(engine.pid).status() == psutil.STATUS_STOPPED)
    assert engine.alive()
    assert engine.stop(0.2) == []
    assert [name for name, pid in pids.items() if running(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_tool_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    tool = subprocess.Popen([sys.executable, "-c", TOOL, str(tmp_path), str(script)])
    try:
        assert until(lambda: (tmp_path / "tool").exists(), 20.0)
        pids = {n: int((tmp_path / n).read_text()) for n in ("engine", "child", "daemon", "keeper")}
        assert all(running(pid) for pid in pids.values())
    finally:
        tool.send_signal(number)
        tool.wait(10)
    try:
        assert until(lambda: not any(running(pid) for pid in pids.values()), 8.0), pids
    finally:
        os.kill(int((tmp_path / "holder").read_text()), signal.SIGKILL)


def test_nothing_outlives_a_killed_keeper_once_the_tool_stops(tmp_path: Path, started: list[EngineProcess]) -> None:
    engine, pids = stubborn(tmp_path, started)
    mark = psutil.Process(engine.pid).environ()[MARK]
    os.kill(engine.keeper_pid, signal.SIGKILL)
    assert until(lambda: not running(engine.pid)), "the kernel kills the engine's root with its keeper"
    assert until(lambda: engine.exit_status() == -signal.SIGKILL), "its status is the tool's to collect then"
    assert engine.stop(0.2) == []
    assert [name for name, pid in pids.items() if running(pid)] == []
    assert marked(mark) == []
    pids["keeper"] = engine.keeper_pid
    assert [name for name, pid in pids.items() if keeper.read_stat(pid)] == [], "and no zombie is left with the tool"


def test_a_stopped_keeper_does_not_hold_up_the_end(tmp_path: Path, started: list[EngineProcess]) -> None:
    engine, pids = stubborn(tmp_path, started)
    os.kill(engine.keeper_pid, signal.SIGSTOP)
    assert until(lambda: psutil.Process(engine.keeper_pid).status() == psutil.STATUS_STOPPED)
    before = time.monotonic()
    assert engine.stop(0.2) == []
    assert time.monotonic() - before < 5.0
    assert [name for name, pid in pids.items() if running(pid)] == []


def test_two_engines_do_not_touch_each_other(tmp_path: Path, started: list[EngineProcess]) -> None:
    first = start(tmp_path, started, python(SLEEPER))
    second = start(tmp_path, started, python(SLEEPER), log_path=tmp_path / "second.log")
    os.kill(first.keeper_pid, signal.SIGKILL)
    assert first.stop(0.2) == []
    assert second.alive()
    assert second.stop(2.0) == []


def test_what_cannot_be_ended_is_returned() -> None:
    """A process in D state cannot be made at will: the list of members is the seam here."""
    stuck = keeper.Stat(2**22 + 1, "engine", "D", 1, 1, 1)
    waits: list[float] = []
    real, keeper.KILL_WAIT = keeper.KILL_WAIT, 0.05
    try:
        left = keeper.end_tree(lambda: [stuck], stuck.pid, 0.01, lambda s: waits.append(s))
    finally:
        keeper.KILL_WAIT = real
    assert left == [stuck]
    assert waits


def test_the_holder_of_a_port_is_named(tmp_path: Path, started: list[EngineProcess]) -> None:
    code = (
        "import os, socket, sys, time\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\n"
        "open(sys.argv[1] + '.new', 'w').write(str(s.getsockname()[1])); os.rename(sys.argv[1] + '.new', sys.argv[1])\n"
        "time.sleep(600)"
    )
    engine = start(tmp_path, started, python(code, str(tmp_path / "port")), port_file=tmp_path / "port")
    assert engine.port is not None
    found = holder(engine.port)
    assert found is not None
    assert found.pid == engine.pid
    with pytest.raises(PreflightRefusedError, match=f"pid {engine.pid} \\({found.name}\\)"):
        refuse_if_taken(engine.port)
    engine.stop(2.0)
    refuse_if_taken(engine.port)
    refuse_if_taken(0)
    assert holder(engine.port) is None
    with pytest.raises(UsageError, match="70000"):
        holder(70000)
