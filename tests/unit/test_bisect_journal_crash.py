"""The journal under SIGKILL, a cut write-ahead log and a full disk: nothing is lost that was told, nothing doubled."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from journal_writer import CAMPAIGN, CAP, FAULT_AT, fill_the_disk, go_on
from soakrig.bisect.journal import Journal, Turn
from soakrig.bisect.journal_file import JOURNAL
from soakrig.bisect.journal_rows import RunRow
from soakrig.bisect.run_states import MAY_FOLLOW
from soakrig.errors import RecordError

KILLS = 50
PATIENCE_S = 30.0
FORKS = multiprocessing.get_context("forkserver")  # a child is there at once, with none of pytest's threads
FORKS.set_forkserver_preload(["soakrig.bisect.journal"])


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[ForkServerProcess, Connection]]]:
    """Start a function of the writer in a process of its own; returns it and what it sends."""
    started: list[ForkServerProcess] = []

    def go(function: Callable[..., None], *args: Any) -> tuple[ForkServerProcess, Connection]:
        ours, theirs = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=function, args=(*args, theirs))
        process.start()
        theirs.close()
        started.append(process)
        return process, ours

    yield go
    for process in started:
        process.kill()
        process.join()
        process.close()


def received(pipe: Connection, most: int) -> list[Any]:
    """Up to ``most`` messages; fewer where the process ends before."""
    found: list[Any] = []
    try:
        while len(found) < most:
            assert pipe.poll(PATIENCE_S), "the writer stands still"
            found.append(pipe.recv())
    except EOFError:
        pass
    return found


@pytest.mark.parametrize("where", ["before a statement", "anywhere"])
def test_killed_again_and_again_it_loses_and_doubles_nothing(
    tmp_path: Path, where: str, start: Callable[..., tuple[ForkServerProcess, Connection]]
) -> None:
    rng = random.Random(7)
    folder = tmp_path / "campaign"
    told: list[tuple[str, int, int]] = []
    settled: dict[int, RunRow] = {}
    for _ in range(KILLS):
        inside = where == "before a statement"
        process, pipe = start(go_on, folder, rng.randint(1, 150) if inside else 0)
        told += received(pipe, 10_000 if inside else rng.randint(0, 12))
        process.kill()
        process.join(PATIENCE_S)
        assert process.exitcode == -signal.SIGKILL
        told += received(pipe, 10_000)  # what was on its way
        pipe.close()
        if not settled and not (folder / JOURNAL).exists():
            continue
        try:
            with Journal.read(folder) as journal:
                now = {run.id: run for run in journal.runs() if run.state == "settled"}
        except RecordError as error:
            assert "never begun" in str(error)  # noqa: PT017
            continue
        assert {number: now[number] for number in settled} == settled
        settled = now
    with Journal.resume(folder, CAMPAIGN) as journal:
        for run in journal.to_tear_down():
            if run.state != "teardown":
                journal.move(run, "teardown")
            journal.move(run, "settled")
        for run in journal.planned():
            journal.move(run, "void", reason="the campaign ends")
            journal.move(run, "settled")
        check(journal, told)


def check(journal: Journal, told: list[tuple[str, int, int]]) -> None:
    runs = {run.id: run for run in journal.runs()}
    assert len(runs) > 10
    assert {number for what, number, _ in told if what == "planned"} <= set(runs)
    for what, number, turn in told:
        if what == "turn":
            assert turn in [one.number for one in journal.turns(number)]
        if what == "settled":
            assert runs[number].state == "settled"
    assert [run.order for run in journal.arm_runs()] == [n for n in sorted(runs) if runs[n].result != "interrupted"]
    kinds = [run.result for run in runs.values()]
    assert 0 < kinds.count("interrupted") <= KILLS
    assert kinds.count("void") <= 1
    for run in runs.values():
        states = [note.what for note in journal.notes(run) if note.is_state]
        assert all(b in MAY_FOLLOW[a] for a, b in pairwise(states)), states  # type: ignore[index]
        assert states.count("settled") == 1
        turns = [turn.number for turn in journal.turns(run)]
        assert turns == list(range(1, len(turns) + 1))
        if run.result == "faulted":
            assert run.id % 2 == 1
            assert (run.exposure, len(turns)) == (FAULT_AT, FAULT_AT)
        elif run.result == "clean":
            assert run.id % 2 == 0
            assert (run.exposure, len(turns)) == (CAP, CAP)
        else:
            assert len(turns) < (FAULT_AT if run.id % 2 else CAP)


def snapshot(journal: Journal) -> tuple[Any, ...]:
    return (
        journal.runs(),
        tuple(journal.notes(run) for run in journal.runs()),
        tuple(map(journal.turns, journal.runs())),
    )


def test_a_log_cut_or_damaged_anywhere_leaves_whole_transactions(tmp_path: Path) -> None:
    rng = random.Random(7)
    folder, copy = tmp_path / "campaign", tmp_path / "copy"
    with Journal.create(folder, CAMPAIGN, boot_id="b") as journal:
        seen = [snapshot(journal)]
        for number in range(1, 9):
            run = journal.plan("control", cap=CAP)
            seen.append(snapshot(journal))
            for state in ("launching", "ready", "probing"):
                journal.move(run, state)
                seen.append(snapshot(journal))
            journal.turn(run, Turn(1, "ok"))
            seen.append(snapshot(journal))
            if number == 8:
                break
            journal.move(run, "clean", turn=Turn(2, "ok"))
            seen.append(snapshot(journal))
            for state in ("teardown", "settled"):
                journal.move(run, state)
                seen.append(snapshot(journal))
        whole, log = (folder / JOURNAL).read_bytes(), (folder / f"{JOURNAL}-wal").read_bytes()
    found: set[int] = set()
    for turn in range(60):
        copy.mkdir()
        (copy / JOURNAL).write_bytes(whole)
        at = rng.randrange(len(log))
        damaged = log[:at] if turn % 2 else log[:at] + bytes([log[at] ^ 0xFF]) + log[at + 1 :]
        (copy / f"{JOURNAL}-wal").write_bytes(damaged)
        try:
            with Journal.read(copy) as journal:
                now = snapshot(journal)
            assert now in seen
            found.add(seen.index(now))
            with Journal.resume(copy, boot_id="b") as journal:
                assert all(run.state != "probing" for run in journal.runs())
                assert len(journal.runs()) == len(now[0])
        except RecordError as error:
            assert "never begun" in str(error)  # noqa: PT017
        shutil.rmtree(copy)
    assert len(found) > 15


def test_a_full_disk_is_told_and_leaves_what_was_written(
    tmp_path: Path, start: Callable[..., tuple[ForkServerProcess, Connection]]
) -> None:
    process, pipe = start(fill_the_disk, tmp_path / "campaign")
    at_start, told, (done, stand, state), exposure = received(pipe, 5)
    pipe.close()
    process.join(PATIENCE_S)
    assert "cannot write" in at_start
    assert "cannot write" in told
    assert "Free space" in told
    assert 0 < done < 999
    assert (stand, state, exposure) == (done, "probing", done + 1)
    with Journal.resume(tmp_path / "campaign") as journal:
        assert [(run.state, run.turns) for run in journal.to_tear_down()] == [("clean", done + 1)]
