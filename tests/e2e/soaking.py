"""`soak run` on the embedded engine as a real process, with what a test needs to hit it at the right moment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from soakrig.record.events import Event, TurnDone
from soakrig.record.store import RunReader

SMALL = ["--tools", "4", "--max-tokens", "160"]


def wait_for(what: str, condition: Any, seconds: float = 60.0) -> Any:
    """Poll until ``condition`` is true; the one place in which these tests wait."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


class Soak:
    """One `soak run` process. A context manager that leaves nothing behind."""

    def __init__(self, folder: Path, *options: str, turns: int = 1000, stall: float = 3.0, small: bool = True) -> None:
        self.folder = folder
        self.kernel_log = folder / "kernel-source.log"
        self.kernel_log.touch()
        self.argv = [sys.executable, "-m", "soakrig", "run", "--runs-dir", str(folder / "runs"), "--json"]
        if "--kernel-log" not in options:
            self.argv += ["--kernel-log", str(self.kernel_log)]
        self.argv += ["--turns", str(turns), "--stall-timeout", str(stall), *(SMALL if small else []), *options]
        self.errors = folder / "soak-stderr.txt"
        self.pids: list[int] = []

    def __enter__(self) -> Soak:
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(self.argv, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "latest"

    def wait_turn(self, turn: int) -> None:
        """Until ``turn`` is over; also finds out the engine's processes."""
        wait_for("the run's manifest", lambda: (self.run / "manifest.json").exists() or self.process.poll() is not None)
        wait_for(f"turn {turn}", lambda: self.turns_done() >= turn or self.process.poll() is not None)
        assert self.turns_done() >= turn, self.errors.read_text()
        engine = RunReader(self.run).manifest.settings["engine"]
        self.engine, self.worker = engine["pid"], engine["worker_pid"]
        self.keeper = int(Path(f"/proc/{self.engine}/stat").read_text().rpartition(")")[2].split()[1])
        self.pids = [self.engine, self.worker, self.keeper]

    def turns_done(self) -> int:
        return (
            sum(isinstance(event, TurnDone) for event in self.events()) if (self.run / "events.jsonl").exists() else 0
        )

    def events(self) -> list[Event]:
        return list(RunReader(self.run).events())

    def finish(self, seconds: float = 90.0) -> dict[str, Any]:
        """Wait for the end; result.json's object, which has to agree with the folder's and with the exit code."""
        out, _ = self.process.communicate(timeout=seconds)
        assert out.strip(), self.errors.read_text()
        result = json.loads(out)
        assert result["exit_code"] == self.process.returncode
        assert json.loads((self.run / "result.json").read_text()) == result
        return result

    def nothing_left(self, seconds: float = 15.0) -> None:
        for pid in self.pids:
            wait_for(f"the end of process {pid}", lambda p=pid: gone(p), seconds)


def consistent(result: dict[str, Any], events: list[Event]) -> None:
    """Nothing counted twice: outcomes sum to the turns sent, each turn ends at most once, none ok after the death."""
    sent = [(e.conversation, e.turn) for e in events if e.kind == "sent"]
    done = [(e.conversation, e.turn) for e in events if e.kind == "turn"]
    assert len(set(sent)) == len(sent)
    assert len(set(done)) == len(done)
    assert set(done) <= set(sent)
    assert sum(result["outcomes"].values()) == len(sent)
    dead = next((n for n, e in enumerate(events) if e.kind == "engine" and not e.alive), len(events))
    assert not any(e.kind == "turn" and e.outcome == "ok" for e in events[dead:])
