"""A campaign's loop in little, for the journal's tests: goes on with what is there, and says what is on the disk.

It runs in processes of its own, which are killed. After every call that returned, a message (what, run, turn number)
goes through ``pipe``: what was acknowledged must never be lost.
"""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
from multiprocessing.connection import Connection
from pathlib import Path

from soakrig.bisect import journal_file
from soakrig.bisect.journal import Journal, Turn
from soakrig.bisect.journal_rows import RunRow
from soakrig.errors import RecordError, StoreError

CAMPAIGN = {"turns": 5, "variables": {"A": ["1", "0"]}}
CAP = 5
FAULT_AT = 3
"""Turn at which runs of odd number fault."""


def settle(journal: Journal, run: RunRow, pipe: Connection) -> None:
    """Tear down and settle a run that has its result."""
    if run.state != "teardown":
        journal.move(run, "teardown")
    journal.move(run, "settled")
    pipe.send(("settled", run.id, 0))


def carry_out(journal: Journal, run: RunRow, pipe: Connection) -> None:
    """A run from launch to end."""
    for state in ("launching", "ready", "probing"):
        journal.move(run, state)
    for number in range(1, CAP):
        if run.id % 2 and number == FAULT_AT:
            run = journal.move(run, "faulted", turn=Turn(number, "error_frame"), signature="Xid 31")
            break
        journal.turn(run, Turn(number, "ok"))
        pipe.send(("turn", run.id, number))
    else:
        run = journal.move(run, "clean", turn=Turn(CAP, "ok"))
    settle(journal, run, pipe)


def go_on(folder: Path, die_at: int, pipe: Connection) -> None:
    """Run after run until SIGKILL comes: before SQL statement ``die_at`` of this process, or from outside (0)."""
    if die_at:
        left = die_at

        def count(statement: str) -> None:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

        plain = sqlite3.connect

        def connect(*args: object, **options: object) -> sqlite3.Connection:
            db = plain(*args, **options)  # type: ignore[call-overload]
            db.set_trace_callback(count)
            return db

        journal_file.sqlite3.connect = connect  # type: ignore[assignment]
    try:
        journal = Journal.resume(folder, CAMPAIGN)
    except RecordError:  # the first one, or killed before its tables were there
        journal = Journal.create(folder, CAMPAIGN)
    for run in journal.to_tear_down():
        settle(journal, run, pipe)
    for run in journal.planned():
        carry_out(journal, run, pipe)
    while True:
        run = journal.plan("control", cap=CAP)
        pipe.send(("planned", run.id, 0))
        carry_out(journal, run, pipe)


def fill_the_disk(folder: Path, pipe: Connection) -> None:
    """Write until files may grow no more, then on with room again; sends what was raised and what stands."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        Journal.create(folder, CAMPAIGN)
    except StoreError as error:
        pipe.send(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    with Journal.create(folder, CAMPAIGN) as journal:
        run = journal.plan("control", cap=1000)
        for state in ("launching", "ready", "probing"):
            journal.move(run, state)
        size = (folder / f"{journal_file.JOURNAL}-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20_000, hard))
        done = 0
        try:
            for number in range(1, 1000):
                journal.turn(run, Turn(number, "ok", detail={"text": "x" * 500}))
                done = number
        except StoreError as error:
            pipe.send(str(error))
        pipe.send((done, len(journal.turns(run)), journal.runs()[0].state))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        journal.move(run, "clean", turn=Turn(done + 1, "ok"))
        pipe.send(journal.runs()[0].exposure)
