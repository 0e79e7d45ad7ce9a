"""The engine, its worker, its keeper and soak itself are killed and stopped: the right verdict, a readable run folder,
no process left, nothing counted twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.soaking import Soak, consistent, wait_for


@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_kill_9(tmp_path: Path, victim: str) -> None:
    with Soak(tmp_path) as soak:
        soak.wait_turn(3)
        os.kill(getattr(soak, victim), signal.SIGKILL)
        result = soak.finish()
        soak.nothing_left()
    assert (result["verdict"], result["exit_code"]) == ("fail", 1)
    assert result["engine"]["alive"] is False
    if victim == "engine":
        assert result["engine"]["exit_status"] == -signal.SIGKILL
    assert result["faults"]
    assert result["engine"]["died_after_turn"] >= 3
    consistent(result, soak.events())


@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_sigstop(tmp_path: Path, victim: str) -> None:
    with Soak(tmp_path, "--on-fault", "continue") as soak:
        soak.wait_turn(3)
        os.kill(getattr(soak, victim), signal.SIGSTOP)
        result = soak.finish()
        soak.nothing_left()
    assert (result["verdict"], result["exit_code"]) == ("fail", 1)
    assert result["engine"]["alive"] is False
    assert set(result["outcomes"]) <= {"ok", "hung", "post_mortem"}
    consistent(result, soak.events())


def test_kill_9_of_soak_leaves_no_process_and_a_readable_run(tmp_path: Path) -> None:
    with Soak(tmp_path) as soak:
        soak.wait_turn(4)
        soak.process.kill()
        soak.process.wait()
        soak.nothing_left()
        events = soak.events()
        report = subprocess.run(
            [sys.executable, "-m", "soakrig", "report", "--runs-dir", str(tmp_path / "runs")],
            capture_output=True,
            text=True,
        )
    assert report.returncode == 2, report.stderr
    assert "INCONCLUSIVE" in report.stdout
    assert "cut off" in report.stdout
    assert sum(event.kind == "turn" for event in events) >= 4
    assert not (soak.run / "result.json").exists()


def test_a_stopped_soak_finds_nobody_hung_and_says_that_it_did_not_watch(tmp_path: Path) -> None:
    with Soak(tmp_path, turns=8) as soak:
        soak.wait_turn(2)
        os.kill(soak.process.pid, signal.SIGSTOP)
        time.sleep(6.5)  # the point of the test: time in which the tool is not awake
        os.kill(soak.process.pid, signal.SIGCONT)
        result = soak.finish()
    assert result["verdict"] == "inconclusive"
    assert result["outcomes"] == {"ok": 8}
    assert result["tool"]["lag_max_s"] > 5
    assert any("stood still" in reason for reason in result["reasons"])


def test_one_ctrl_c_ends_after_the_turn_in_flight(tmp_path: Path) -> None:
    with Soak(tmp_path) as soak:
        soak.wait_turn(2)
        os.kill(soak.process.pid, signal.SIGINT)
        result = soak.finish()
        soak.nothing_left()
    assert (result["verdict"], result["ended"]) == ("inconclusive", "interrupted")
    assert set(result["outcomes"]) == {"ok"}


def test_two_ctrl_c_end_at_once(tmp_path: Path) -> None:
    with Soak(tmp_path) as soak:
        soak.wait_turn(2)
        os.kill(soak.worker, signal.SIGSTOP)  # so that a turn is in flight and stays there
        wait_for("a turn in flight", lambda: soak.events()[-1].kind in ("sent", "sample"))
        os.kill(soak.process.pid, signal.SIGINT)
        os.kill(soak.process.pid, signal.SIGTERM)
        result = soak.finish(30)
        soak.nothing_left()
    assert result["ended"] in ("interrupted", "fault")
    assert result["verdict"] in ("inconclusive", "fail"), "a stopped process is a fault where it was seen in time"
    consistent(result, soak.events())


def test_ctrl_c_while_the_engine_starts(tmp_path: Path) -> None:
    with Soak(tmp_path) as soak:
        log = wait_for("the engine's log", lambda: next((tmp_path / "runs").glob("*/engine.log"), None))
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(soak.process.pid)], capture_output=True, text=True, check=True
        )
        soak.pids = [int(pid) for pid in children.stdout.split()]
        assert soak.pids
        os.kill(soak.process.pid, signal.SIGINT)
        soak.process.wait(30)
        soak.nothing_left()
    assert soak.process.returncode == 130
    assert log.exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_at_a_random_moment(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    victim = rng.choice(["engine", "worker", "soak"])
    number = rng.choice([signal.SIGKILL, signal.SIGSTOP])
    with Soak(tmp_path, "--conversations", "2") as soak:
        soak.wait_turn(rng.randint(1, 6))
        time.sleep(rng.random())  # anywhere within a turn
        pid = soak.process.pid if victim == "soak" else getattr(soak, victim)
        os.kill(pid, number)
        if victim == "soak":
            if number == signal.SIGSTOP:
                time.sleep(1.0)
            soak.process.kill()
            soak.process.wait()
            soak.nothing_left()
            assert all(event.kind for event in soak.events())
            return
        result = soak.finish()
        soak.nothing_left()
    assert (result["verdict"], result["exit_code"]) == ("fail", 1)
    consistent(result, soak.events())
