"""The journal: every state in its order, one result to a run, and what each restart makes of what was left."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from soakrig.bisect.evidence import Evidence
from soakrig.bisect.journal import HOST_LOST, REBOOT, Journal, Turn
from soakrig.bisect.journal_file import JOURNAL
from soakrig.bisect.journal_rows import RunRow
from soakrig.bisect.locks import lock_gpu
from soakrig.bisect.run_states import MAY_FOLLOW, RESULTS, RunState
from soakrig.errors import PreflightRefusedError, RecordError, StoreError, UsageError

CAMPAIGN = {"turns": 60, "variables": {"A": ["1", "0"], "B": ["1", {"unset": True}]}}
BOOT, LATER = "boot-one", "boot-two"
TO_PROBING: tuple[RunState, ...] = ("launching", "ready", "probing")


def probing(journal: Journal, arm: str = "control", turns: int = 0, stratum: str = "") -> RunRow:
    run = journal.plan(arm, cap=60, stratum=stratum)
    for state in TO_PROBING:
        run = journal.move(run, state)
    for number in range(1, turns + 1):
        journal.turn(run, Turn(number, "ok"))
    return run


def settle(journal: Journal, run: RunRow) -> RunRow:
    journal.move(run, "teardown")
    return journal.move(run, "settled")


def follows_the_table(journal: Journal, run: RunRow) -> bool:
    states: list[RunState] = [note.what for note in journal.notes(run) if note.is_state]  # type: ignore[misc]
    return states[0] == "planned" and all(b in MAY_FOLLOW[a] for a, b in pairwise(states))


def test_a_run_from_plan_to_evidence(tmp_path: Path) -> None:
    with Journal.create(tmp_path, CAMPAIGN, boot_id=BOOT, now=lambda: 7.0) as journal:
        run = probing(journal, "A=0", turns=2)
        journal.note("engine", run, pid=4242)
        run = journal.move(run, "faulted", turn=Turn(3, "error_frame"), signature="Xid 31", folder="run-1")
        settle(journal, run)
        second = probing(journal, turns=59)
        settle(journal, journal.move(second, "clean", turn=Turn(60, "ok", detail={"tokens": 9})))
        assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    with Journal.resume(tmp_path, CAMPAIGN, boot_id=LATER) as journal:
        assert journal.recovered == ()
        assert journal.campaign == CAMPAIGN
        fault, clean = journal.arm_runs()
        assert (fault.arm, fault.exposure, fault.cap, fault.order, fault.signature) == ("A=0", 3, 60, 1, "Xid 31")
        assert (clean.arm, clean.exposure, clean.signature, clean.void) == ("control", 60, None, "")
        assert Evidence(journal.arm_runs()).pooled_signature == "Xid 31"
        first = journal.runs()[0]
        assert (first.folder, first.boot_id, first.planned_at) == ("run-1", BOOT, 7)
        assert [(note.what, note.detail) for note in journal.notes(1) if not note.is_state] == [
            ("engine", {"pid": 4242})
        ]
        assert journal.turns(2)[-1] == Turn(60, "ok", detail={"tokens": 9})
        assert all(follows_the_table(journal, run) for run in journal.runs())


@pytest.mark.parametrize("state", list(MAY_FOLLOW))
def test_nothing_but_the_table_is_allowed(tmp_path: Path, state: RunState) -> None:
    path: dict[RunState, tuple[RunState, ...]] = {
        "planned": (), "launching": ("launching",), "ready": ("launching", "ready"), "probing": TO_PROBING,
        "teardown": (*TO_PROBING, "clean", "teardown"), "settled": (*TO_PROBING, "clean", "teardown", "settled"),
    }  # fmt: skip
    with Journal.create(tmp_path, CAMPAIGN, boot_id=BOOT) as journal:
        run = journal.plan("control", cap=60)
        for step in path.get(state, (*TO_PROBING, state)):
            run = go(journal, run, step)
        assert run.state == state
        before = journal.runs(), journal.notes(run)
        for to in MAY_FOLLOW:
            if to not in MAY_FOLLOW[state]:
                with pytest.raises(RecordError, match=f"is {state} and was to become {to}"):
                    go(journal, run, to)
        assert (journal.runs(), journal.notes(run)) == before


def go(journal: Journal, run: RunRow, to: RunState) -> RunRow:
    return journal.move(
        run, to, signature="Xid 31" if to == "faulted" else None, reason="why" if to == "void" else "",
        exposure=1 if to in RESULTS else None,
    )  # fmt: skip


def test_a_turn_is_counted_once_and_a_result_needs_work(tmp_path: Path) -> None:
    with Journal.create(tmp_path, CAMPAIGN, boot_id=BOOT) as journal:
        run = journal.plan("control", cap=2)
        with pytest.raises(RecordError, match="run 1 of arm control is planned"):
            journal.plan("A=0", cap=2)
        with pytest.raises(RecordError, match="expected probing"):
            journal.turn(run, Turn(1, "ok"))
        for state in TO_PROBING:
            journal.move(run, state)
        for match, exposure in (("exposure 0,", None), ("exposure 3,", 3.0), ("exposure nan,", float("nan"))):
            with pytest.raises(RecordError, match=match):
                journal.move(run, "clean", exposure=exposure)
        with pytest.raises(RecordError, match="signature None"):
            journal.move(run, "faulted", exposure=1)
        with pytest.raises(RecordError, match="reason ''"):
            journal.move(run, "void")
        journal.turn(run, Turn(1, "ok"))
        journal.turn(run, Turn(1, "ok", conversation=1))
        with pytest.raises(RecordError, match="recorded already"):
            journal.move(run, "clean", turn=Turn(1, "ok"))
        with pytest.raises(RecordError, match="exposure 3,"):
            journal.move(run, "clean", turn=Turn(2, "ok"))  # refused as a whole: the turn is not written either
        assert (journal.runs()[0].state, journal.runs()[0].exposure, journal.runs()[0].turns) == ("probing", 2, 2)
        with pytest.raises(RecordError, match="no run 9"):
            journal.move(9, "launching")
        assert journal.arm_runs() == ()  # not settled: not evidence yet


@pytest.mark.parametrize(
    ("reached", "boot", "ordered", "state", "result", "exposure", "void"),
    [
        ("planned", LATER, False, "planned", None, 0, None),
        ("launching", BOOT, False, "interrupted", "interrupted", 0, None),
        ("launching", LATER, False, "settled", "host_lost", 0, "host_lost before the first turn"),
        ("probing", BOOT, False, "interrupted", "interrupted", 2, None),
        ("probing", LATER, False, "settled", "host_lost", 3, ""),
        ("probing", LATER, True, "settled", "void", 2, "rebooted by order"),
        ("clean", BOOT, False, "clean", "clean", 2, None),
        ("clean", LATER, False, "settled", "host_lost", 2, ""),
        ("clean", LATER, True, "settled", "clean", 2, ""),
        ("teardown", BOOT, False, "teardown", "clean", 2, None),
        ("teardown", LATER, False, "settled", "host_lost", 2, ""),
        ("teardown", LATER, True, "settled", "clean", 2, ""),
        ("faulted", LATER, False, "settled", "faulted", 2, ""),
        ("void", LATER, False, "settled", "void", 2, "why"),
        ("interrupted", LATER, False, "settled", "host_lost", 2, ""),
        ("interrupted", LATER, True, "settled", "interrupted", 2, None),
    ],
)
def test_what_a_restart_makes_of_an_unfinished_run(
    tmp_path: Path,
    reached: RunState,
    boot: str,
    ordered: bool,
    state: str,
    result: str,
    exposure: float,
    void: str | None,
) -> None:
    with Journal.create(tmp_path, CAMPAIGN, boot_id=BOOT) as journal:
        run = journal.plan("A=0", cap=60)
        steps = {"planned": (), "launching": ("launching",), "probing": TO_PROBING}
        for step in steps.get(reached, TO_PROBING):
            run = journal.move(run, step)
        if reached not in steps or reached == "probing":
            journal.turn(run, Turn(1, "ok"))
            journal.turn(run, Turn(2, "ok"))
        if reached not in steps:
            kind = "clean" if reached == "teardown" else reached
            signature, reason = "Xid 31" if kind == "faulted" else None, "why" if kind == "void" else ""
            run = journal.move(run, kind, signature=signature, reason=reason)
        if reached == "teardown":
            journal.move(run, "teardown")
        if ordered:
            journal.note(REBOOT)
    with Journal.resume(tmp_path, CAMPAIGN, boot_id=boot) as journal:
        (run,) = journal.runs()
        assert (run.state, run.result, run.exposure) == (state, result, exposure)
        assert [one.id for one in journal.recovered] == ([] if run.state == reached else [1])
        assert follows_the_table(journal, run)
        assert journal.planned() == ((run,) if state == "planned" else ())
        assert journal.to_tear_down() == (() if state in ("planned", "settled") else (run,))
        if void is None:
            assert journal.arm_runs() == ()
        else:
            (seen,) = journal.arm_runs()
            assert seen.void.startswith(void) if void else not seen.void
            lost = result == "host_lost" and exposure > 0
            assert seen.signature == (HOST_LOST if lost else "Xid 31" if result == "faulted" else None)
    with Journal.resume(tmp_path, CAMPAIGN, boot_id=boot) as journal:
        assert journal.recovered == ()  # once is enough


def test_a_reboot_that_was_ordered_long_ago_excuses_no_crash(tmp_path: Path) -> None:
    with Journal.create(tmp_path, CAMPAIGN, boot_id=BOOT) as journal:
        journal.note(REBOOT, why="wedged")  # and it did not come about
        probing(journal, turns=1)
    with Journal.resume(tmp_path, boot_id=LATER) as journal:
        assert journal.runs()[0].result == "host_lost"


def test_a_fault_that_the_run_folder_shows_makes_an_interrupted_run_faulted_and_never_clean(tmp_path: Path) -> None:
    with Journal.create(tmp_path, CAMPAIGN, boot_id=BOOT) as journal:
        probing(journal, turns=4)
    with Journal.resume(tmp_path, boot_id=BOOT) as journal:
        (run,) = journal.to_tear_down()
        with pytest.raises(RecordError, match="was to become clean"):
            journal.move(run, "clean")
        settle(journal, journal.move(run, "faulted", exposure=5, signature="Xid 31"))
        (seen,) = journal.arm_runs()
        assert (seen.exposure, seen.signature, seen.void) == (5, "Xid 31", "")


def test_another_hosts_runs_are_left_until_its_boot_is_known(tmp_path: Path) -> None:
    with Journal.create(tmp_path, CAMPAIGN, boot_id=BOOT) as journal:
        run = journal.plan("A=0", cap=60, stratum="host-b/GPU-1")
        for state in TO_PROBING:
            journal.move(run, state, boot_id="boot-of-b" if state == "launching" else None)
        settle(journal, journal.move(probing(journal, turns=1), "clean"))  # beside it, on this host
    with Journal.resume(tmp_path, boot_id=LATER) as journal:
        assert journal.recovered == ()
        assert [note.boot_id for note in journal.notes(1)] == [BOOT, *["boot-of-b"] * 3]
        assert journal.recover("host-b/GPU-1", "boot-of-b")[0].result == "interrupted"
        assert journal.recover("host-b/GPU-1", "boot-three")[0].result == "host_lost"


def test_refuses_what_is_not_its_campaign(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with pytest.raises(RecordError, match="holds no campaign"):
        Journal.resume(folder, boot_id=BOOT)
    assert not folder.exists()
    Journal.create(folder, CAMPAIGN, boot_id=BOOT).close()
    assert (folder / JOURNAL).stat().st_mode & 0o077 == 0
    with pytest.raises(UsageError, match="holds a campaign already"):
        Journal.create(folder, CAMPAIGN, boot_id=BOOT)
    with pytest.raises(UsageError, match="another campaign: turns, variables differ"):
        Journal.resume(folder, {"turns": 30, "variables": {"A": ["0", "1"]}}, boot_id=BOOT)
    db = sqlite3.connect(folder / JOURNAL)
    db.execute("PRAGMA user_version = 2")
    db.close()
    for opener in (Journal.resume, Journal.read):
        with pytest.raises(RecordError, match="format 2, up to 1"):
            opener(folder)
    db = sqlite3.connect(folder / JOURNAL)
    db.execute("PRAGMA application_id = 5")
    db.close()
    with pytest.raises(RecordError, match="something else"):
        Journal.resume(folder, boot_id=BOOT)
    with pytest.raises(RecordError, match="something else"):
        Journal.create(folder, CAMPAIGN, boot_id=BOOT)
    (folder / JOURNAL).write_bytes(b"no database " * 400)
    with pytest.raises(RecordError, match="not a database"):
        Journal.resume(folder, boot_id=BOOT)


def test_a_file_that_a_kill_left_empty_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).touch()
    with pytest.raises(RecordError, match="never begun"):
        Journal.resume(tmp_path, boot_id=BOOT)
    with Journal.create(tmp_path, CAMPAIGN, boot_id=BOOT) as journal:
        assert journal.runs() == ()


def test_one_writer_and_readers_beside_it(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom soakrig.bisect.journal import Journal\n"
        "try:\n    Journal.resume(Path(sys.argv[1]))\nexcept Exception as e:\n    print(type(e).__name__, e)\n"
        "print(Journal.read(Path(sys.argv[1])).runs()[0].state)"
    )
    with Journal.create(tmp_path, CAMPAIGN, boot_id=BOOT) as journal:
        probing(journal)
        out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        assert out.stdout.startswith("PreflightRefusedError")
        assert "another process" in out.stdout
        assert out.stdout.splitlines()[-1] == "probing"
        with Journal.read(tmp_path) as reader, pytest.raises(StoreError, match="to be read"):
            reader.note("x")
        with pytest.raises(PreflightRefusedError, match="another process"):
            Journal.create(tmp_path, CAMPAIGN, boot_id=BOOT)
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "PreflightRefusedError" not in out.stdout


def test_one_campaign_to_a_card(tmp_path: Path) -> None:
    held = lock_gpu("GPU-1/x", tmp_path)
    with pytest.raises(PreflightRefusedError, match="GPU GPU-1/x is in use"):
        lock_gpu("GPU-1/x", tmp_path)
    lock_gpu("GPU-2", tmp_path).release()
    held.release()
    lock_gpu("GPU-1/x", tmp_path).release()
    with pytest.raises(PreflightRefusedError, match="cannot be locked"):
        lock_gpu("GPU-1", tmp_path / "soakrig-gpu-GPU-2.lock")
