"""Models of the registry, really served: start, state, stop, deaths of every part, stale traces, switch under load."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import resource
import signal
import stat
import subprocess
import termios
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from e2e.serving import Box, Load, all_ended
from e2e.soaking import wait_for
from soakrig.engine import keeper
from soakrig.engine.serving import cgroup
from soakrig.engine.serving.folder import Hint, boot_id
from soakrig.engine.serving.processes import find_launch, port_of


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with Box(tmp_path) as made:
        yield made


def test_serve_status_list_logs_and_stop(box: Box) -> None:
    started = box.json("serve", box.one, "--detach")
    assert started["url"] == f"http://127.0.0.1:{box.port}"
    launch = box.launch(box.one)
    assert launch.supervisor is not None
    assert launch.keeper is not None
    assert launch.root is not None
    assert os.getsid(launch.supervisor.pid) == launch.supervisor.pid, "Ctrl-C at the terminal is not for it"
    assert started["pid"] == launch.root.pid
    now = box.json("status", box.one)["models"][0]
    assert (now["state"], now["port"], now["supervisor"]) == ("ready", box.port, launch.supervisor.pid)
    assert set(now["processes"]) == launch.pids
    assert now["held_bytes"] > 50 << 20
    listed = box.json("list")
    states = {row["model"]: row["state"] for row in listed["models"]}
    assert (states[box.one], states[box.two]) == ("ready", "stopped")
    assert listed["slots"][box.slot] == box.one
    for path in box.folder(box.one).path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 or path.name == "engine.port"
    assert stat.S_IMODE(box.folder(box.one).path.stat().st_mode) == 0o700

    twice = box.json("serve", box.one, "--detach", code=3)
    assert f"on this machine already, pid {launch.root.pid}" in twice["error"]
    other = box.json("preflight", box.two, code=3)
    refused = {one["name"]: one["text"] for one in other["findings"] if one["state"] == "refused"}
    assert set(refused) == {"slot", "port"}
    assert f"held by {box.one}" in refused["slot"]
    assert f"pid {launch.root.pid}" in refused["port"]

    stopped = box.json("stop", box.one)
    assert (stopped["was_running"], stopped["killed"], stopped["left"]) == (True, False, [])
    all_ended(launch)
    box.nothing_holds_the_port()
    assert box.cgroups(box.one) == []
    assert "ready on http://127.0.0.1" in box.run("logs", box.one).stdout
    assert "asked to stop (SIGTERM)" in box.run("logs", box.one, "--supervisor").stdout
    after = box.json("status", box.one, code=1)["models"][0]
    assert (after["state"], after["pid"]) == ("stopped", 0)
    assert "asked to stop" in after["why"]
    assert box.json("stop", box.one)["was_running"] is False


def test_a_cgroup_of_its_own(box: Box) -> None:
    mount, own = cgroup.mount(), cgroup.own()
    box.json("serve", box.one, "--detach")
    now = box.status(box.one)
    log = box.run("logs", box.one, "--supervisor").stdout
    if not now["cgroup"]:  # none that this user may divide: that is told, and sessions do instead
        assert "no cgroup of its own" in log
        return
    assert mount is not None
    assert own is not None
    (group,) = box.cgroups(box.one)
    assert set(group.pids()) == set(now["processes"])
    assert cgroup.own() == own, "the command itself stays where it was"
    box.json("stop", box.one)
    assert box.cgroups(box.one) == []


def test_killing_the_supervisor_ends_the_model(box: Box) -> None:
    box.json("serve", box.one, "--detach")
    launch = box.launch(box.one)
    assert launch.supervisor is not None
    os.kill(launch.supervisor.pid, signal.SIGKILL)
    box.gone(box.one)
    all_ended(launch)
    after = box.status(box.one)
    assert after["state"] == "stopped"
    assert "did not live to say how it ended" in after["why"]
    box.json("serve", box.one, "--detach")
    assert box.status(box.one)["state"] == "ready"
    assert len(box.cgroups(box.one)) <= 1, "the dead launch's cgroup is gone"


def test_killing_the_engine_ends_everything_and_is_told(box: Box) -> None:
    box.json("serve", box.one, "--detach")
    launch = box.launch(box.one)
    assert launch.root is not None
    os.kill(launch.root.pid, signal.SIGKILL)
    box.gone(box.one)
    all_ended(launch)
    assert "ended by itself, exit status -9" in box.status(box.one)["why"]
    box.nothing_holds_the_port()


def test_a_frozen_engine_is_not_ready_and_can_be_stopped(box: Box) -> None:
    box.json("serve", box.one, "--detach")
    launch = box.launch(box.one)
    frozen = [pid for pid in launch.engine_pids if launch.root is not None and pid != launch.root.pid]
    assert frozen
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    now = box.status(box.one, timeout=1.0)
    assert now["state"] == "unresponsive", "its server still answers /health with 200"
    stopped = box.json("stop", box.one, "--shutdown-timeout", "1")
    assert stopped["left"] == []
    all_ended(launch)


def test_stop_does_not_need_anybody_to_be_awake(box: Box) -> None:
    """The supervisor is dead, and the keeper that should have ended the engine is frozen with it."""
    box.json("serve", box.one, "--detach")
    launch = box.launch(box.one)
    assert launch.supervisor is not None
    for pid in launch.pids - {launch.supervisor.pid}:
        os.kill(pid, signal.SIGSTOP)
    os.kill(launch.supervisor.pid, signal.SIGKILL)
    stopped = box.json("stop", box.one, "--shutdown-timeout", "1")
    assert stopped["left"] == []
    all_ended(launch)
    box.nothing_holds_the_port()


def test_switch_under_load(box: Box) -> None:
    box.json("serve", box.one, "--detach")
    first = box.launch(box.one)
    load = Load(box.port)
    load.flows()
    started = box.json("switch", box.two)
    ends = load.finish()
    assert len(ends) == 4
    assert "done" not in ends, "a stream that was cut off must not look complete"
    assert started["url"] == f"http://127.0.0.1:{box.port}"
    all_ended(first)
    assert box.status(box.one)["state"] == "stopped"
    assert box.status(box.two)["state"] == "ready"
    second = box.launch(box.two)
    assert second.root is not None
    assert (Path(f"/proc/{second.root.pid}/cmdline").read_bytes().count(b"--weights-seed=2")) == 1


def test_switch_does_not_give_up_a_model_for_one_that_cannot_start(box: Box) -> None:
    box.json("serve", box.one, "--detach")
    refused = box.json("switch", box.two, "--context", "4097", code=3)
    assert "4,097 tokens asked, 4,096 validated" in refused["error"]
    assert box.status(box.one)["state"] == "ready"


def test_what_was_forced_is_recorded(box: Box) -> None:
    assert "4,097 tokens asked" in box.json("serve", box.one, "--detach", "--context", "4097", code=3)["error"]
    started = box.json("serve", box.one, "--detach", "--context", "4097", "--force", "context")
    assert started["forced"] == ["context"]
    rows = [row for row in box.folder(box.one).launches() if row["event"] == "start"]
    assert [(one["name"], one["needs"], one["has"]) for one in rows[-1]["forced"]] == [("context", 4097, 4096)]
    assert "--max-model-len=4097" in rows[-1]["argv"]
    assert box.status(box.one)["forced"] == ["context"]
    assert "forced past context" in box.run("logs", box.one, "--supervisor").stdout


def test_an_engine_that_answers_nonsense_is_not_ready(tmp_path: Path) -> None:
    extra = (
        "\n[models.{one}.canary]\nmax_tokens = 64\n[models.{one}.settings]\n"
        'SOAKRIG_PLANT = \'{{"action": "one_token", "seed": 1}}\'\n'
    )
    with Box(tmp_path, extra) as box:
        refused = box.json("serve", box.one, "--detach", code=1)
        assert "canary was not answered sensibly (nonsense" in refused["error"]
        assert "over and over" in refused["error"]
        box.gone(box.one, 5.0)


def test_a_detached_model_survives_its_terminal_and_one_in_front_does_not(box: Box) -> None:
    for words, survives in ((("--detach",), True), ((), False)):
        master, slave = pty.openpty()

        def own_terminal(fd: int = slave) -> None:
            os.setsid()
            fcntl.ioctl(fd, termios.TIOCSCTTY, 0)

        box.start("serve", box.one, *words, stdin=slave, preexec_fn=own_terminal)
        os.close(slave)
        wait_for("ready", lambda: any(row["event"] == "ready" for row in box.folder(box.one).launches()))
        launch = box.launch(box.one)
        os.close(master)  # the terminal is gone: SIGHUP
        if survives:
            box.started[-1].wait(30)
            assert box.status(box.one)["state"] == "ready"
            assert launch.pids == box.launch(box.one).pids
            box.json("stop", box.one)
            box.folder(box.one).remove("launches.jsonl")
        else:
            box.gone(box.one)
            assert box.started[-1].wait(30) == 0
            all_ended(launch)


def test_in_front_ctrl_c_stops_it_and_kill_9_does_too(box: Box) -> None:
    for how, code in ((signal.SIGINT, 0), (signal.SIGKILL, -9)):
        box.folder(box.one).remove("launches.jsonl")
        command = box.start("serve", box.one)
        box.ready_within(box.one)
        launch = box.launch(box.one)
        command.send_signal(how)
        assert command.wait(60) == code
        box.gone(box.one)
        all_ended(launch)


def test_in_front_kill_9_before_its_supervisor_looked_at_it_ends_it_too(box: Box) -> None:
    command = box.start("serve", box.one)
    wait_for("a supervisor", lambda: find_launch(box.one, box.root) is not None)
    supervisor = box.launch(box.one).stats[0]
    os.kill(supervisor.pid, signal.SIGSTOP)
    command.kill()
    command.wait()
    os.kill(supervisor.pid, signal.SIGCONT)
    box.gone(box.one)
    assert "whoever started it is gone" in box.folder(box.one).supervisor_log.read_text()


def test_stopped_while_its_canary_is_answered_it_is_not_called_ready(tmp_path: Path) -> None:
    with Box(tmp_path, "[models.{one}.canary]\nmax_tokens = 3900\n") as box:
        command = box.start("serve", box.one, "--detach")
        wait_for("a port", lambda: find_launch(box.one, box.root) is not None and port_of(box.launch(box.one))[1], 60.0)
        supervisor = box.launch(box.one).supervisor
        assert supervisor is not None
        os.kill(supervisor.pid, signal.SIGTERM)
        out, err = command.communicate(timeout=60)
        assert (command.returncode, out) == (1, b""), err
        assert b"given up before it was ready: asked to stop" in err
        box.gone(box.one)


def no_room() -> None:
    """For a child: a real disk that takes not one byte more (EFBIG; its pipes work on)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def test_with_a_full_disk_a_model_can_be_stopped_and_a_start_says_why_not(box: Box) -> None:
    box.json("serve", box.one, "--detach")
    launch = box.launch(box.one)
    done = box.start("stop", box.one, preexec_fn=no_room)
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out.decode()) == (0, f"{box.one}: stopped\n"), err
    assert b"cannot be written" in err
    all_ended(launch)
    assert not list(box.folder(box.one).path.glob(".*")), "no piece of a file is left"
    failed = box.start("serve", box.one, "--detach", preexec_fn=no_room)
    _, err = failed.communicate(timeout=60)
    assert failed.returncode == 2, err
    assert b"cannot be written: File too large" in err
    assert b"XDG_STATE_HOME" in err
    box.gone(box.one)


def test_leaked_shared_memory_is_freed_only_when_nobody_maps_it(box: Box) -> None:
    block = SharedMemory(create=True, size=1 << 20)
    file = Path("/dev/shm") / block.name
    folder = box.folder(box.one)
    folder.make()
    folder.write("shm.json", {block.name: file.stat().st_ino, "psm_stranger": 1})
    try:
        assert box.status(box.one)["leaked"] == {}, "this process maps it"
        assert box.json("stop", box.one)["freed"] == []
        assert file.exists()
        block.buf[:1] = b"x"
        block.close()
        assert list(box.status(box.one)["leaked"]) == [block.name]
        assert box.json("stop", box.one)["freed"] == [block.name]
        assert not file.exists()
        assert folder.read("shm.json") is None
    finally:
        if file.exists():
            block.unlink()
        else:
            resource_tracker.unregister(f"/{block.name}", "shared_memory")


def test_a_name_that_somebody_else_took_is_left_alone(box: Box) -> None:
    block = SharedMemory(create=True, size=4096)
    folder = box.folder(box.one)
    folder.make()
    folder.write("shm.json", {block.name: 1})  # another inode: not what the dead launch had
    block.close()
    try:
        assert box.json("stop", box.one)["freed"] == []
        assert (Path("/dev/shm") / block.name).exists()
    finally:
        block.unlink()


@pytest.fixture
def stranger() -> Iterator[keeper.Stat]:
    """A process of nobody's launch, in a session of its own and without any mark."""
    process = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={})
    try:
        found = keeper.read_stat(process.pid)
        assert found is not None
        yield found
    finally:
        process.kill()
        process.wait()


def test_stale_traces_prove_nothing(box: Box, stranger: keeper.Stat) -> None:
    folder = box.folder(box.one)
    folder.make()
    real = Hint(f"serve/{box.one}/x", boot_id(), stranger.pid, stranger.ticks, box.port)
    folder.write_hint(replace(real, boot_id="another boot"))
    assert box.status(box.one)["state"] == "stopped"
    # The session's number is given away again: its leader is another process than the one that was written down.
    folder.write_hint(replace(real, ticks=stranger.ticks - 1))
    assert box.status(box.one)["state"] == "stopped"
    (folder.path / "launch.json").write_text("{")
    (folder.path / "launches.jsonl").write_text(json.dumps({"event": "ready", "time": 1}) + '\n{"cut')
    assert box.status(box.one)["state"] == "stopped"


def test_a_process_that_lost_its_mark_is_found_and_ended(box: Box, stranger: keeper.Stat) -> None:
    """A title written over the environment hides the mark; the session still shows whose process it is."""
    folder = box.folder(box.one)
    folder.make()
    folder.write_hint(Hint(f"serve/{box.one}/x", boot_id(), stranger.pid, stranger.ticks, box.port))
    now = box.status(box.one)
    assert (now["state"], now["processes"]) == ("orphaned", [stranger.pid])
    held = {one["name"]: one["state"] for one in box.json("preflight", box.two, code=3)["findings"]}
    assert held["slot"] == "refused"
    assert box.json("stop", box.one)["was_running"] is True
    stat = keeper.read_stat(stranger.pid)
    assert stat is None or not keeper.is_running(stat)
