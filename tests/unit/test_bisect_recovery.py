"""What an earlier process left: its engines are ended, its runs settled, each state by the evidence that is there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from bisect_stub import StubExecutor, campaign, clean
from builders import T0, alive, dead, done, ended, kernel_live, manifest, sent, turns, xid
from soakrig.bisect.executors import Stratum
from soakrig.bisect.journal import HOST_LOST, REBOOT, Journal, Turn
from soakrig.bisect.journal_rows import RunRow
from soakrig.bisect.recovery import launch_mark, settle_leftovers
from soakrig.bisect.run_states import MAY_FOLLOW, RunState
from soakrig.record.events import Event
from soakrig.record.store import RunStore

SPEC = campaign("A", "B")
FOLDER = "0001-control"
BOOT, LATER = "boot-one", "boot-two"
STATES: dict[RunState, tuple[RunState, ...]] = {
    "planned": (),
    "launching": ("launching",),
    "ready": ("launching", "ready"),
    "probing": ("launching", "ready", "probing"),
    "faulted": ("launching", "ready", "probing", "faulted"),
    "clean": ("launching", "ready", "probing", "clean"),
    "void": ("launching", "void"),
    "host_lost": ("launching", "ready", "probing", "host_lost"),
    "interrupted": ("launching", "ready", "probing", "interrupted"),
    "teardown": ("launching", "ready", "probing", "clean", "teardown"),
    "settled": ("launching", "ready", "probing", "clean", "teardown", "settled"),
}
LEFT = ["process 7 (python3) in state D"]


def bring(journal: Journal, state: RunState, stratum: str = "", boot_id: str | None = None) -> RunRow:
    """A run in ``state``, with two turns where it got so far."""
    run = journal.plan("control", cap=20, stratum=stratum)
    for step in STATES[state]:
        run = journal.move(
            run, step, boot_id=boot_id if step == "launching" else None, reason="why" if step == "void" else "",
            signature="Xid 31" if step == "faulted" else None, folder=FOLDER if step == "launching" else None,
        )  # fmt: skip
        if step == "probing":
            for number in (1, 2):
                journal.turn(run, Turn(number, "ok"))
    assert run.state == state
    return run


def executor(*strata: Stratum, stuck: Sequence[str] = ()) -> StubExecutor:
    return StubExecutor(lambda launch, where: clean(), strata=strata or [Stratum()], stuck=list(stuck))


def stored(journal: Journal, *events: Event) -> None:
    """The run folder of a soak that was cut off after ``events``."""
    store = RunStore.create(journal.folder / "runs", manifest(run_id=FOLDER, turns=20))
    for event in events:
        store.append(event)
    store.close()


@pytest.mark.parametrize(
    ("state", "result"),
    [
        ("launching", "interrupted"), ("ready", "interrupted"), ("probing", "interrupted"), ("faulted", "faulted"),
        ("clean", "clean"), ("void", "void"), ("host_lost", "host_lost"), ("interrupted", "interrupted"),
        ("teardown", "clean"),
    ],
)  # fmt: skip
def test_each_state_of_this_boot_is_torn_down_and_settled(tmp_path: Path, state: RunState, result: str) -> None:
    with Journal.create(tmp_path, SPEC.to_json(), boot_id=BOOT) as journal:
        bring(journal, state)
    hands = executor()
    with Journal.resume(tmp_path, boot_id=BOOT) as journal:
        span = journal.spans()
        assert settle_leftovers(journal, SPEC, hands) == ""
        (run,) = journal.runs()
        assert (run.state, run.result) == ("settled", result)
        assert hands.cleared == [(launch_mark(journal, run), "")], "what it launched is ended, whatever its state"
        seen = [note for note in journal.notes(run) if note.is_state]
        assert all(b.what in MAY_FOLLOW[a.what] for a, b in pairwise(seen))  # type: ignore[index]
        assert run.signature == {"faulted": "Xid 31", "host_lost": HOST_LOST}.get(result)
        assert journal.spans() == span, "the time of the resume is not its own"
        before = journal.notes(run)
        assert settle_leftovers(journal, SPEC, hands) == ""
        assert (journal.notes(run), len(hands.cleared)) == (before, 1), "once is enough"


@pytest.mark.parametrize("state", ["planned", "settled"])
def test_what_was_not_begun_or_is_over_is_left_alone(tmp_path: Path, state: RunState) -> None:
    with Journal.create(tmp_path, SPEC.to_json(), boot_id=BOOT) as journal:
        run = bring(journal, state)
        hands = executor()
        assert settle_leftovers(journal, SPEC, hands) == ""
        assert (hands.cleared, journal.runs()) == ([], (run,))


@pytest.mark.parametrize("state", ["probing", "clean", "teardown", "host_lost"])
def test_what_cannot_be_ended_keeps_its_run_open(tmp_path: Path, state: RunState) -> None:
    with Journal.create(tmp_path, SPEC.to_json(), boot_id=BOOT) as journal:
        bring(journal, state)
    with Journal.resume(tmp_path, boot_id=BOOT) as journal:
        left = settle_leftovers(journal, SPEC, executor(stuck=LEFT))
        assert left == f"run 1 of control left {LEFT[0]}, and it is there still"
        (run,) = journal.runs()
        assert run.state == ("host_lost" if state == "host_lost" else "teardown")
        assert journal.notes(run)[-1].detail == {"left": LEFT}
    with Journal.resume(tmp_path, boot_id=BOOT) as journal:
        assert settle_leftovers(journal, SPEC, executor()) == ""
        assert journal.runs()[0].state == "settled"


FAULT = [kernel_live(), *turns(1, 4), sent(5, T0 + 20), xid(31, T0 + 20.2)]


@pytest.mark.parametrize(
    ("events", "exposure", "signature"),
    [
        ([*FAULT, done(5, T0 + 21, "truncated")], 5, "Xid 31"),
        ([*FAULT], 4, "Xid 31"),  # the turn in flight had not ended: four were sent and over
        ([kernel_live(), *turns(1, 2), sent(3, T0 + 9), dead(T0 + 9, 3, status=-9)], 2, "engine death, signal 9"),
        ([kernel_live(), *turns(1, 2), sent(3, T0 + 9), done(3, T0 + 10, "error_frame")], 3, "turn error_frame"),
        ([kernel_live(), *turns(1, 30), sent(31, T0 + 90), done(31, T0 + 91, "hung")], 20, "turn hung"),
    ],
)
def test_its_run_folder_may_show_the_fault(
    tmp_path: Path, events: list[Event], exposure: float, signature: str
) -> None:
    with Journal.create(tmp_path, SPEC.to_json(), boot_id=BOOT) as journal:
        bring(journal, "probing")
        stored(journal, *events)
    with Journal.resume(tmp_path, boot_id=BOOT) as journal:
        assert settle_leftovers(journal, SPEC, executor()) == ""
        (run,) = journal.runs()
        assert (run.result, run.exposure, run.signature) == ("faulted", exposure, signature)
        assert run.reason == "the tool ended in the midst of it"
        (seen,) = journal.arm_runs()
        assert (seen.exposure, seen.signature, seen.void) == (exposure, signature, "")


@pytest.mark.parametrize(
    "events",
    [
        [],
        [kernel_live(), *turns(1, 4)],
        [kernel_live(), *turns(1, 20), alive(), ended()],  # whole and clean, and not written down: it never counts
        [kernel_live(), sent(1, T0), xid(31, T0 + 0.1)],  # a fault before a turn was over
        [kernel_live(), *turns(1, 2), sent(3, T0 + 9), done(3, T0 + 10, "answerless")],  # tolerated
    ],
    ids=["nothing", "some", "whole", "early", "tolerated"],
)
def test_it_never_becomes_clean(tmp_path: Path, events: list[Event]) -> None:
    with Journal.create(tmp_path, SPEC.to_json(), boot_id=BOOT) as journal:
        bring(journal, "probing")
        stored(journal, *events)
    with Journal.resume(tmp_path, boot_id=BOOT) as journal:
        assert settle_leftovers(journal, SPEC, executor()) == ""
        assert journal.runs()[0].result == "interrupted"
        assert journal.arm_runs() == ()


@pytest.mark.parametrize(
    ("events", "signature"),
    [
        ([kernel_live(), *turns(1, 2), sent(3, T0 + 9), done(3, T0 + 10, "error_frame")], None),
        ([kernel_live(), *turns(1, 2), sent(3, T0 + 9), dead(T0 + 9, 3, status=-9)], "engine death, signal 9"),
        (FAULT, "Xid 31"),
    ],
    ids=["not yet named", "the known one", "of the device"],
)
def test_beside_a_known_fault_one_that_was_not_yet_named_is_left_out(
    tmp_path: Path, events: list[Event], signature: str | None
) -> None:
    with Journal.create(tmp_path, SPEC.to_json(), boot_id=BOOT) as journal:
        run = journal.plan("control", cap=20)
        for step in STATES["probing"]:
            journal.move(run, step)
        journal.move(run, "faulted", turn=Turn(1, "error_frame"), signature="engine death, signal 9")
        journal.move(run, "teardown")
        journal.move(run, "settled")
        bring(journal, "probing")
        stored(journal, *events)
    with Journal.resume(tmp_path, boot_id=BOOT) as journal:
        assert settle_leftovers(journal, SPEC, executor()) == ""
        assert journal.runs()[1].signature == signature
        assert journal.runs()[1].result == ("faulted" if signature else "interrupted")


def test_a_run_folder_that_is_none_or_broken_shows_nothing(tmp_path: Path) -> None:
    for number, broken in enumerate((False, True)):
        folder = tmp_path / str(number)
        with Journal.create(folder, SPEC.to_json(), boot_id=BOOT) as journal:
            bring(journal, "probing")
            if broken:
                stored(journal, *FAULT)
                events = folder / "runs" / FOLDER / "events.jsonl"
                events.write_bytes(b"no event\n" + events.read_bytes())
        with Journal.resume(folder, boot_id=BOOT) as journal:
            assert settle_leftovers(journal, SPEC, executor()) == ""
            assert (journal.runs()[0].state, journal.runs()[0].result) == ("settled", "interrupted")


def test_the_folder_of_a_result_that_is_known_changes_nothing(tmp_path: Path) -> None:
    with Journal.create(tmp_path, SPEC.to_json(), boot_id=BOOT) as journal:
        bring(journal, "clean")
        stored(journal, *FAULT)
        settle_leftovers(journal, SPEC, executor())
        assert journal.runs()[0].result == "clean"


def test_a_host_of_a_cluster_is_judged_by_its_own_boot(tmp_path: Path) -> None:
    one, two = Stratum("one gpu 0", "0", "boot-1"), Stratum("two gpu 0", "0", "boot-2b")
    with Journal.create(tmp_path, SPEC.to_json(), boot_id=BOOT) as journal:
        bring(journal, "probing", one.name, "boot-1")
        bring(journal, "probing", two.name, "boot-2a")
        stored(journal, *FAULT)
    hands = executor(one, two)
    with Journal.resume(tmp_path, boot_id=LATER) as journal:
        assert settle_leftovers(journal, SPEC, hands) == ""
        first, second = journal.runs()
        assert (first.result, first.state) == ("interrupted", "settled"), "its folder is on another host"
        assert (second.result, second.signature, second.state) == ("host_lost", HOST_LOST, "settled")
        assert hands.cleared == [(launch_mark(journal, first), one.name)]


@pytest.mark.parametrize("state", [state for state in STATES if state != "settled"])
def test_a_host_that_is_no_more_in_the_cluster_cannot_be_asked(tmp_path: Path, state: RunState) -> None:
    with Journal.create(tmp_path, SPEC.to_json(), boot_id=BOOT) as journal:
        bring(journal, state, "gone gpu 0", "boot-1")
    hands = executor(Stratum("here gpu 0", "0", "boot-2"))
    with Journal.resume(tmp_path, boot_id=BOOT) as journal:
        span = journal.spans()
        assert settle_leftovers(journal, SPEC, hands) == ""
        (run,) = journal.runs()
        assert (run.state, hands.cleared) == ("settled", [])
        known = {"faulted": "faulted", "clean": "clean", "host_lost": "host_lost", "teardown": "clean"}
        assert run.result == known.get(state, "interrupted" if state == "interrupted" else "void")
        if state in ("planned", "launching", "ready", "probing"):
            assert run.reason == "gone gpu 0 is no more among the hosts"
        assert journal.spans() == span


def test_the_mark_is_of_this_campaign_and_run_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c").mkdir()
    monkeypatch.chdir(tmp_path)
    with Journal.create(Path("c"), SPEC.to_json(), boot_id=BOOT) as journal:
        run = bring(journal, "settled")
        assert launch_mark(journal, run) == f"{tmp_path.resolve()}/c#1"
        assert launch_mark(journal, bring(journal, "settled")).endswith("/c#2")


def test_after_an_ordered_reboot_nothing_is_looked_for(tmp_path: Path) -> None:
    with Journal.create(tmp_path, SPEC.to_json(), boot_id=BOOT) as journal:
        bring(journal, "teardown")
        journal.note(REBOOT, why="wedged")
    hands = executor()
    with Journal.resume(tmp_path, boot_id=LATER) as journal:
        assert settle_leftovers(journal, SPEC, hands) == ""
        assert (journal.runs()[0].result, hands.cleared) == ("clean", [])
