"""`soak bisect` is killed again and again, at any statement and at any moment, and goes on: no launch lost, none
counted twice, the planted truth found, no process left. And a host that goes down under it."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bisect_engine import (
    SIGNATURE,
    STAGING,
    TURN,
    TURNS,
    WRITE,
    Bisect,
    Done,
    earlier,
    plant,
    small_campaign,
)
from soakrig.bisect.campaign import SESSION
from soakrig.bisect.journal import JOURNAL, Journal
from soakrig.bisect.journal_rows import RunRow
from soakrig.bisect.run_states import MAY_FOLLOW
from soakrig.errors import RecordError
from soakrig.record.events import TurnDone
from soakrig.record.store import RunReader

GUILTY = plant(action="exit", hazard=0.3, when={STAGING: "1"})


def settled(bisect: Bisect) -> dict[int, RunRow]:
    return {run.id: run for run in bisect.launches() if run.state == "settled"}


def kill_on(bisect: Bisect, words: list[str], rng: random.Random, kills: int) -> Done:
    """One campaign to its end; the tool is killed so many times on the way, before a statement or at a moment."""
    known: dict[int, RunRow] = {}
    for number in range(kills):
        die = (WRITE, rng.randint(1, 100)) if number % 2 else None
        process = bisect.resume(die=die) if bisect.begun else bisect.start(*words, die=die)
        try:
            process.wait(rng.uniform(0.3, 9.0) if die is None else 240.0)
        except subprocess.TimeoutExpired:
            assert die is None, "its statement never came"
        code = bisect.kill()
        assert code == -signal.SIGKILL, f"it ended by itself after {number} kills:\n{bisect.errors.read_text()}"
        if rng.random() < 0.3:
            bisect.nothing_left()  # else the next process meets what this one left
        now = settled(bisect)
        assert {one: now[one] for one in known} == known
        known = now
    process = bisect.resume() if bisect.begun else bisect.start(*words)
    process.wait(1800.0)
    bisect.nothing_left()
    done = bisect.done()
    now = settled(bisect)
    assert {one: now[one] for one in known} == known
    return done


def whole(journal: Journal, result: dict[str, Any], kills: int) -> None:
    """Nothing lost, nothing twice, in the journal and in what is told of it."""
    runs = journal.runs()
    assert [run.id for run in runs] == list(range(1, len(runs) + 1))
    assert [(one["id"], one["arm"], one["result"]) for one in result["launches"]] == [
        (run.id, run.arm, run.result) for run in runs
    ]
    sessions = sum(note.what == SESSION for note in journal.notes())
    assert sum(run.result == "interrupted" for run in runs) <= sessions - 1 <= kills
    for run in runs:
        states = [note.what for note in journal.notes(run) if note.is_state]
        assert states.count("settled") == 1
        assert states[-1] == run.state == "settled"
        assert all(b in MAY_FOLLOW[a] for a, b in pairwise(states)), states  # type: ignore[index]
        counted(journal, run)
    pooled = result["signature"]
    for arm in result["arms"]:
        mine = [run for run in runs if run.arm == arm["name"] and run.result in ("faulted", "clean")]
        if arm["role"] != "control":  # there a fault of another name is exposure without one
            mine = [run for run in mine if run.signature in (None, pooled)]
        assert arm["runs"] == len(mine)
        assert arm["exposure"] == sum(run.exposure for run in mine)
        assert arm["faults"] == sum(run.signature == pooled for run in mine)
    # One of before the first fault was named, cut off before its watchers did, is told as what was seen of it.
    assert all(run.reason for run in runs if run.signature not in (None, pooled))


def counted(journal: Journal, run: RunRow) -> None:
    """Each turn is in the journal once, and in the run folder; but for the last one before a kill."""
    turns = [turn.number for turn in journal.turns(run)]
    assert turns == list(range(1, len(turns) + 1))
    recovered = run.reason != "" and run.result == "faulted"
    kept = [event.turn for event in events(journal.folder, run) if isinstance(event, TurnDone)]
    if run.result in ("interrupted", "void"):
        assert set(kept) <= set(turns)
        assert len(kept) >= len(turns) - 1
        return
    assert kept == turns or (recovered and kept == turns[:-1])
    assert run.exposure == len(kept)
    assert run.result == ("clean" if run.signature is None else "faulted")
    if run.result == "clean":
        assert len(turns) == TURNS


def events(folder: Path, run: RunRow) -> list[Any]:
    try:
        return list(RunReader(folder / "runs" / run.folder).events()) if run.folder else []
    except RecordError:
        return []  # killed before the run's manifest was written


def check(bisect: Bisect, done: Done, kills: int) -> None:
    result = done.object
    assert (done.code, result["state"], result["ended"]) == (0, "finished", "every arm is settled"), done.err
    assert (result["cause"], result["conclusion_kind"]) == ([STAGING], "single")
    words = {arm["name"]: arm["verdict"] for arm in result["arms"] if arm["role"] == "one"}
    assert words.pop(f"{STAGING}=0") == "CLEARED"
    assert set(words.values()) <= {"FAULTS"}
    bisect.journal(lambda journal: whole(journal, result, kills))


def side_by_side(folder: Path, seeds: range, words: list[str], kills: int) -> None:
    """A campaign for each seed, at once: a launch is mostly waiting."""
    failed: list[BaseException] = []

    def campaign(seed: int) -> None:
        own = folder / str(seed)
        own.mkdir()
        try:
            with Bisect(own) as bisect:
                check(bisect, kill_on(bisect, words, random.Random(seed), kills), kills)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=campaign, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed:
        raise error


@pytest.mark.slow
def test_killed_anywhere_a_campaign_loses_nothing_and_finds_the_cause(tmp_path: Path) -> None:
    side_by_side(tmp_path, range(1, 3), [f"{STAGING}=1,0", "--at-least", "1", *GUILTY], 6)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(5))
def test_a_hundred_kills_in_ten_campaigns_over_two_variables(tmp_path: Path, turn: int) -> None:
    words = [f"{STAGING}=1,0", "VLLM_MOE_PREFILL_GROUPS=1,0", *GUILTY]
    side_by_side(tmp_path, range(2 * turn, 2 * turn + 2), words, 10)


def forge(folder: Path, boot_id: str) -> RunRow:
    """As if the host had come up again since: the unfinished run was launched on another boot."""
    db = sqlite3.connect(folder / JOURNAL)
    with db:
        assert db.execute("UPDATE runs SET boot_id = ? WHERE state != 'settled'", (boot_id,)).rowcount == 1
    db.close()
    with Journal.read(folder) as journal:
        return journal.runs()[-1]


def test_a_host_that_went_down_is_a_fault_of_its_own_and_the_control_comes_next(tmp_path: Path) -> None:
    with Bisect(tmp_path) as bisect:
        settings = {"SOAKRIG_PLANT": json.dumps({"action": "error_frame", "after": 4, "when": {STAGING: "1"}})}
        campaign = small_campaign({STAGING: ["1", "0"]}, bisect.kernel_log, settings=settings)
        earlier(bisect.runs / "campaign", campaign, *[("control", 5)] * 4)
        assert bisect.resume(die=(TURN, 4)).wait(120) == -signal.SIGKILL
        bisect.nothing_left()
        lost = forge(bisect.folder, "another-boot")
        assert (lost.arm, lost.state, lost.turns) == (f"{STAGING}=0", "probing", 3)

        assert bisect.resume(die=(TURN, 1)).wait(120) == -signal.SIGKILL
        bisect.nothing_left()
        now = bisect.launches()
        assert [run.id for run in now] == [1, 2, 3, 4, 5, 6]
        assert (now[4].result, now[4].signature, now[4].state) == ("host_lost", "host lost", "settled")
        assert "went down while the run was probing" in now[4].reason
        assert now[4].exposure == 4, "three turns and the one that was in flight"
        assert (now[5].arm, now[5].why) == ("control", "first launch after a reboot")

        result = bisect.status()
        assert result["launches"][4]["result"] == "host_lost"
        assert result["signatures"] == {SIGNATURE: 4, "host lost": 1}
        (arm,) = (one for one in result["arms"] if one["name"] == lost.arm)
        assert (arm["runs"], arm["exposure"], arm["verdict"]) == (0, 0, "VOID"), "not clean, not the fault"
        assert any("host lost" in why for why in arm["void_reasons"])
        page = bisect.ask("status", str(bisect.folder))
        assert "host lost" in page.out
        assert page.code == 2
