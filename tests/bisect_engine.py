"""`soak bisect` on the embedded engine as real processes, with what a test needs to hit one at the right moment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from e2e.soaking import gone, wait_for
from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.journal import JOURNAL, Journal, Turn
from soakrig.bisect.journal_rows import RunRow
from soakrig.errors import RecordError

Found = TypeVar("Found")
STAGING = "VLLM_MOE_DMA_STAGING"
TURNS = 12
FLAGS = ["--layers=2", "--experts=8", "--hidden=64", "--threads=1"]
SMALL = [*(f"--arg={flag}" for flag in FLAGS), "--set", "CPU_OFFLOAD_GB=1", "--tools", "1", "--max-tokens", "96"]
SIGNATURE = "turn error_frame"
"""Of the planted ``error_frame``: the engine lives, so nothing but the turn tells it."""
KEEPER_S = 25.0
"""A keeper whose tool has died ends the engine within this."""
WRITE = "BEGIN|INSERT|UPDATE|COMMIT"
TURN = "INSERT INTO turns"

DIES = """
import os, re, signal, sqlite3, sys
what, left = re.compile(sys.argv.pop(1)), int(sys.argv.pop(1))
plain = sqlite3.connect
def count(statement):
    global left
    left -= what.match(statement) is not None
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
def connect(*args, **options):
    db = plain(*args, **options)
    db.set_trace_callback(count)
    return db
sqlite3.connect = connect
from soakrig.cli.main import soak
soak()
"""
"""The command, killed by SIGKILL before its n-th SQL statement of a kind: arguments KIND N ARGV..."""


def plant(**fields: object) -> list[str]:
    """Words of the command that plant a fault."""
    return ["--set", "SOAKRIG_PLANT=" + json.dumps(fields)]


def engine_site(folder: Path, code: str) -> str:
    """The PYTHONPATH with which ``code`` runs in an engine's own process, not its worker's, before anything else."""
    site = folder / "site"
    site.mkdir()
    ours = "".join(f"    {line}\n" for line in code.strip().splitlines())
    (site / "sitecustomize.py").write_text(
        f"import os, sys, time\nif 'soakrig.engine.embedded' in sys.orig_argv:\n{ours}"
    )
    return str(site)


@dataclass(frozen=True)
class Done:
    """What a command left: its exit status, standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        """The one JSON object of ``--json``; nothing else may be there."""
        assert self.out.count("\n") == 1, self.out
        assert self.out.endswith("\n"), self.err
        found = json.loads(self.out)
        assert isinstance(found, dict)
        assert found["exit_code"] == self.code, self.err
        return found


class Bisect:
    """One campaign in a test's folder, and the processes that run it. A context manager that leaves nothing behind."""

    def __init__(self, folder: Path, runs: Path | None = None) -> None:
        self.kernel_log = folder / "kernel-source.log"
        self.kernel_log.touch()
        self.runs = runs or folder / "runs"
        self.errors, self.output = folder / "stderr.txt", folder / "stdout.txt"
        self.environment: dict[str, str] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Bisect:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.kill()
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def folder(self) -> Path:
        """The campaign's."""
        (found,) = (path.parent for path in self.runs.glob(f"*/{JOURNAL}"))
        return found

    def start(self, *words: str, die: tuple[str, int] | None = None, turns: int = TURNS) -> subprocess.Popen[bytes]:
        """Begin the campaign."""
        argv = [*SMALL, "--turns", str(turns), "--kernel-log", str(self.kernel_log), "--runs-dir", str(self.runs)]
        return self.run("--json", *argv, *words, die=die)

    def resume(self, *words: str, die: tuple[str, int] | None = None) -> subprocess.Popen[bytes]:
        """Go on with it."""
        return self.run("resume", str(self.folder), "--json", *words, die=die)

    def run(self, *words: str, die: tuple[str, int] | None = None) -> subprocess.Popen[bytes]:
        """Start `soak bisect` with those words; ``die``: before which of its SQL statements it is killed."""
        how = ["-m", "soakrig"] if die is None else ["-c", DIES, die[0], str(die[1])]
        with self.output.open("wb") as out, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *how, "bisect", *words], stdout=out, stderr=errors, stdin=subprocess.DEVNULL,
                start_new_session=True, env=self.environment,
            )  # fmt: skip
        return self.process

    def done(self, seconds: float = 240.0) -> Done:
        """Wait for the end of the process that runs the campaign."""
        assert self.process is not None
        self.process.wait(seconds)
        return Done(self.process.returncode, self.output.read_text(), self.errors.read_text())

    def kill(self) -> int:
        """SIGKILL to the tool; its exit status."""
        assert self.process is not None
        self.process.kill()
        return self.process.wait()

    def ask(self, *words: str) -> Done:
        """Another `soak bisect` beside the one that runs, to its end."""
        argv = [sys.executable, "-m", "soakrig", "bisect", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=self.environment)
        return Done(done.returncode, done.stdout, done.stderr)

    def status(self) -> dict[str, Any]:
        """The object of `soak bisect status --json`."""
        return self.ask("status", str(self.folder), "--json").object

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    @property
    def begun(self) -> bool:
        """Whether there is a campaign to go on with."""
        try:
            self.journal(lambda journal: None)
        except (ValueError, RecordError):
            return False
        return True

    def journal(self, look: Callable[[Journal], Found]) -> Found:
        """What ``look`` finds in the journal as it is now."""
        with Journal.read(self.folder) as journal:
            return look(journal)

    def launches(self) -> tuple[RunRow, ...]:
        """The runs of the journal; none before there is one."""
        return self.journal(lambda journal: journal.runs()) if self.begun else ()

    def wait(self, what: str, condition: Callable[[], Any], seconds: float = 90.0) -> Any:
        """Until ``condition`` holds; an error at once when the tool has ended before."""
        process = self.process
        assert process is not None
        found = wait_for(what, lambda: condition() or process.poll() is not None, seconds)
        assert found is not True or condition(), f"ended before: {what}\n{self.errors.read_text()}"
        return found

    def wait_turns(self, number: int, *, run: int = 1) -> None:
        """Until so many turns of a run are in the journal."""
        what = f"turn {number} of run {run}"
        self.wait(what, lambda: any(one.turns >= number for one in self.launches() if one.id == run))

    def engine(self, run: int = 1) -> int:
        """The process of a run's engine."""
        return next(note.detail["pid"] for note in self.journal(lambda j: j.notes(run)) if note.what == "engine")

    def marked(self) -> list[int]:
        """Processes of any launch of these campaigns, keepers and workers among them: an own walk over ``/proc``."""
        mark = f"SOAKRIG_LAUNCH={self.runs.resolve()}/".encode()
        found: list[int] = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if any(word.startswith(mark) for word in words) and not gone(int(path.parent.name)):
                    found.append(int(path.parent.name))
        return found

    def nothing_left(self, pids: Sequence[int] = (), seconds: float = KEEPER_S) -> None:
        """No process of any launch is there any more, nor any of ``pids``."""
        wait_for("the end of every launch", lambda: not self.marked() and all(map(gone, pids)), seconds)


def earlier(folder: Path, campaign: Campaign, *launches: tuple[str, int | None]) -> Path:
    """The folder of a campaign as an earlier night left it: the arm and the turn of the fault (None: clean) of each
    launch. The fault is ``SIGNATURE``."""
    with Journal.create(folder, campaign.check().to_json()) as journal:
        for arm, fault in launches:
            run = journal.plan(arm, cap=campaign.cap)
            for state in ("launching", "ready", "probing"):
                journal.move(run, state)
            last = fault or int(campaign.cap)
            for number in range(1, last):
                journal.turn(run, Turn(number, "ok"))
            if fault is None:
                journal.move(run, "clean", turn=Turn(last, "ok"))
            else:
                journal.move(run, "faulted", turn=Turn(last, "error_frame"), signature=SIGNATURE)
            journal.move(run, "teardown")
            journal.move(run, "settled")
    return folder


def small_campaign(
    variables: Mapping[str, list[str | None]], kernel_log: Path, *, settings: Mapping[str, str] | None = None,
    **fields: Any,
) -> Campaign:  # fmt: skip
    """What ``Bisect.start`` would make of the same words."""
    values = {name: [{"unset": True} if one is None else one for one in each] for name, each in variables.items()}
    spec = {
        "turns": TURNS, "load": {"tools": 1, "max_tokens": 96}, "flags": FLAGS, "variables": values,
        "settings": {"CPU_OFFLOAD_GB": "1", **(settings or {})}, "kernel_log": str(kernel_log),
    }  # fmt: skip
    return Campaign.from_json(spec | fields)
