"""The campaign's loop on a real journal and a fake clock: what it launches, when it ends, what it leaves behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bisect_stub import (
    StubExecutor,
    WaitingClock,
    by_arm,
    campaign,
    clean,
    create,
    faulted,
    guilty,
    interrupted,
    loop,
    names,
    resume,
    settled,
    voids,
)
from soakrig.bisect.campaign import BUDGET, ENDED, SESSION, keep_environment
from soakrig.bisect.campaign_result import campaign_result
from soakrig.bisect.journal import Journal
from soakrig.bisect.launch_result import LaunchResult, void
from soakrig.bisect.stop import Stop
from soakrig.errors import StoreError
from soakrig.soak.watch.proc import create_time

ABC = campaign("A", "B", "C")


@pytest.mark.parametrize(
    ("cause", "kind"), [(("A",), "single"), ((), "not_in_list"), (("A", "B"), "both_needed")], ids=lambda x: str(x)
)
def test_it_finds_what_is_guilty_and_ends_by_itself(tmp_path: Path, cause: tuple[str, ...], kind: str) -> None:
    executor, told = StubExecutor(guilty(*cause)), list[str]()
    with create(tmp_path, ABC, executor) as journal:
        end = loop(journal, ABC, executor, changed=told.append).run()
        assert end.kind == "decided"
        assert settled(journal)
        assert [run.arm for run in journal.runs()] == executor.arms
        assert executor.arms[:3] == ["control"] * 3, "the baseline comes first"
        found = campaign_result(journal, ABC)
        assert (found.conclusion_kind, tuple(found.cause), found.state) == (kind, cause, "finished")
        assert (found.exit_code, found.ended) == (0, end.why)
        first, *_, last = journal.notes()
        assert (first.what, last.what) == (SESSION, ENDED)
        assert first.detail == {"pid": os.getpid(), "since": create_time(os.getpid())}
        assert last.detail == {"kind": "decided", "why": end.why}
        states = len(journal.runs()) * 7  # of them: launching, ready, probing, a turn, the result, settled or more
        assert len(told) > states * 0.8
        launch, _ = executor.launched[3]
        notes = journal.notes(4)
        assert [note.what for note in notes if note.is_state][:2] == ["planned", "launching"]
        assert notes[1].detail["settings"] == dict(ABC.arm(launch.arm).settings)
        assert notes[1].detail["machine"] == {"made_up": "this host"}
        assert journal.runs()[3].folder == launch.run_id


def test_no_launch_begins_after_the_budget_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    spec = campaign("A", "B", "C", budget=1000.0)
    executor = StubExecutor(by_arm({}))  # every launch takes 240 s and 3 turns of 10 s
    with create(tmp_path, spec, executor) as journal:
        end = loop(journal, spec, executor).run()
        assert (end.kind, len(executor.launched)) == ("budget", 4), end
        assert "0.278 h" in end.why
        assert campaign_result(journal, spec).state == "finished"
    with resume(tmp_path, executor) as journal:
        journal.plan("control", cap=spec.cap)  # an earlier process was killed between plan and launch
        assert loop(journal, spec, executor).run().kind == "budget"
        assert len(executor.launched) == 4
        journal.note(BUDGET, seconds=99.0)
        journal.note(BUDGET, seconds=1100.0)  # the newest one counts
        assert loop(journal, spec, executor).run().kind == "budget"
        assert len(executor.launched) == 5
        assert settled(journal)


def test_asked_to_stop_before_it_begins(tmp_path: Path) -> None:
    executor, stop = StubExecutor(by_arm({})), Stop()
    stop.ask("SIGTERM")
    with create(tmp_path, ABC, executor) as journal:
        journal.plan("control", cap=ABC.cap)
        assert loop(journal, ABC, executor, stop=stop).run() == ("stopped", "stopped by SIGTERM")
        assert executor.launched == []
        assert journal.runs()[0].state == "planned", "a resume carries it out"
        assert campaign_result(journal, ABC).state == "paused"


def test_asked_to_stop_in_a_launch_and_gone_on_with(tmp_path: Path) -> None:
    executor, stop = StubExecutor(guilty("A")), Stop()
    drawn = executor.outcome
    executor.outcome = lambda launch, stratum: interrupted() if launch.number == 5 else drawn(launch, stratum)
    executor.during = lambda launch, stop: stop.ask("Ctrl-C") if launch.number == 5 else None
    with create(tmp_path, ABC, executor) as journal:
        assert loop(journal, ABC, executor, stop=stop).run() == ("stopped", "stopped by Ctrl-C")
        assert len(executor.launched) == 5
        assert (journal.runs()[4].result, journal.runs()[4].state) == ("interrupted", "settled")
        assert len(journal.arm_runs()) == 4
        assert campaign_result(journal, ABC).exit_code == 2
    with resume(tmp_path, executor) as journal:
        assert loop(journal, ABC, executor).run().kind == "decided"
        assert executor.arms[5] == executor.arms[4], "the same again: it did not count"
        assert settled(journal)
        assert campaign_result(journal, ABC).conclusion_kind == "single"


def test_interrupted_launches_give_no_arm_up_and_cost_no_pause(tmp_path: Path) -> None:
    executor, clock = StubExecutor(guilty("A")), WaitingClock()
    drawn = executor.outcome
    executor.outcome = lambda launch, stratum: interrupted() if launch.number <= 4 else drawn(launch, stratum)
    with create(tmp_path, ABC, executor) as journal:
        assert loop(journal, ABC, executor, clock=clock).run().kind == "decided"
        assert executor.arms[:7] == ["control"] * 7
        assert set(clock.waited) == {0.0}
        assert campaign_result(journal, ABC).conclusion_kind == "single"


def test_a_control_that_is_void_again_and_again_ends_it(tmp_path: Path) -> None:
    executor, clock = StubExecutor(voids("control")), WaitingClock()
    with create(tmp_path, ABC, executor) as journal:
        end = loop(journal, ABC, executor, clock=clock).run()
        assert end == ("decided", "the control was void 3 times in a row: the engine did not start: made up")
        assert clock.waited == [1.0, 2.0, 4.0]
        found = campaign_result(journal, ABC)
        assert (found.exit_code, found.conclusion_kind) == (2, "no_baseline")
        assert found.arms[0].void == 3


def test_an_arm_that_is_void_again_and_again_is_given_up_and_the_pauses_grow(tmp_path: Path) -> None:
    executor, clock = StubExecutor(voids("all-off", "A=0", "B=0", "C=0")), WaitingClock()
    with create(tmp_path, ABC, executor) as journal:
        assert loop(journal, ABC, executor, clock=clock).run().kind == "decided"
        assert sorted(names(executor, {"all-off", "A=0", "B=0", "C=0"})) == sorted(["all-off", "A=0", "B=0", "C=0"] * 3)
        in_a_row = 0
        for run, waited in zip(journal.runs(), clock.waited, strict=True):
            in_a_row = in_a_row + 1 if run.result == "void" else 0
            assert waited == (min(2.0 ** (in_a_row - 1), 60.0) if in_a_row else 0.0)
        words = {arm.name: arm.verdict for arm in campaign_result(journal, ABC).arms}
        assert words["A=0"] == words["all-off"] == "VOID"


def test_the_pause_grows_to_a_minute_and_no_more(tmp_path: Path) -> None:
    executor = StubExecutor(lambda launch, _: faulted() if launch.number <= 3 else void("made up"))
    clock = WaitingClock()
    with create(tmp_path, ABC, executor) as journal:
        loop(journal, ABC, executor, clock=clock).run()
        assert clock.waited[:10] == [0.0, 0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
        assert set(clock.waited[9:]) == {60.0}


def test_one_void_arm_does_not_keep_the_others_from_an_answer(tmp_path: Path) -> None:
    executor = StubExecutor(by_arm({"B=0": void("treatment not in effect: made up")}, guilty("A")))
    with create(tmp_path, ABC, executor) as journal:
        loop(journal, ABC, executor).run()
        assert executor.arms.count("B=0") == 3
        found = campaign_result(journal, ABC)
        assert (found.conclusion_kind, found.cause) == ("single", ["A"])
        assert "1 of 3 variables are undecided" in found.conclusion


def test_a_cooldown_between_launches(tmp_path: Path) -> None:
    spec = campaign("A", limits={"cooldown": 30.0})
    executor, clock = StubExecutor(by_arm({"A=0": void("made up")})), WaitingClock()
    with create(tmp_path, spec, executor) as journal:
        loop(journal, spec, executor, clock=clock).run()
        assert set(clock.waited) == {30.0}, "a shorter pause is in it"


def test_a_fault_of_another_signature_speaks_for_no_arm(tmp_path: Path) -> None:
    other = {"A=0": faulted(4, "Xid 79"), "B=0": faulted(4, "engine death, signal 9")}
    executor = StubExecutor(by_arm(other, guilty("A")))
    with create(tmp_path, ABC, executor) as journal:
        assert loop(journal, ABC, executor).run().kind == "decided"
        assert executor.arms.count("A=0") == executor.arms.count("B=0") == 3
        arms = {arm.name: arm for arm in campaign_result(journal, ABC).arms}
        assert (arms["A=0"].runs, arms["A=0"].faults, arms["A=0"].void, arms["A=0"].verdict) == (0, 0, 3, "VOID")
        assert arms["A=0"].void_reasons == {"another fault: Xid 79": 3}


def test_what_a_killed_process_had_planned_is_carried_out_under_its_number(tmp_path: Path) -> None:
    executor = StubExecutor(guilty("A"))
    with create(tmp_path, ABC, executor) as journal:
        journal.plan("B=0", cap=ABC.cap, why="by an earlier process")
    with resume(tmp_path, executor) as journal:
        assert loop(journal, ABC, executor).run().kind == "decided"
        assert (executor.arms[0], executor.launched[0][0].number) == ("B=0", 1)
        assert settled(journal)


def test_what_breaks_in_an_executor_ends_it(tmp_path: Path) -> None:
    executor = StubExecutor(by_arm({}))

    def breaks(launch: object, stop: Stop) -> None:
        raise ValueError("made up")

    executor.during = breaks
    with create(tmp_path, ABC, executor) as journal:
        with pytest.raises(ValueError, match="made up"):
            loop(journal, ABC, executor).run()
        assert len(executor.launched) == 1
        assert campaign_result(journal, ABC).state == "running", "until this process has ended"
    executor.during = lambda launch, stop: None
    with resume(tmp_path, executor) as journal:
        assert journal.runs()[0].result == "interrupted"
        loop(journal, ABC, executor).run()
        assert settled(journal)


def test_a_journal_that_cannot_be_written_surfaces_and_a_resume_loses_nothing(tmp_path: Path) -> None:
    executor = StubExecutor(guilty("A"))

    def fill(journal: Journal) -> Callable[[object, Stop], None]:
        def during(launch: object, stop: Stop) -> None:
            if len(executor.launched) == 4:
                (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
                journal._db.execute(f"PRAGMA max_page_count = {pages}")

        return during

    with create(tmp_path, ABC, executor) as journal:
        executor.during = fill(journal)
        with pytest.raises(StoreError, match="full"):
            loop(journal, ABC, executor).run()
        began = len(executor.launched)
        assert began >= 4
    executor.during = lambda launch, stop: None
    with resume(tmp_path, executor) as journal:
        assert loop(journal, ABC, executor).run().kind == "decided"
        assert settled(journal)
        assert campaign_result(journal, ABC).conclusion_kind == "single"


def test_a_disk_without_room_for_a_launch_ends_it_before_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = StubExecutor(by_arm({}))
    executor.during = lambda launch, stop: monkeypatch.setattr("soakrig.bisect.campaign.ROOM", 1 << 62)
    with create(tmp_path, ABC, executor) as journal:
        with pytest.raises(StoreError, match=r"KiB are free where .*, 4503599627370496 KiB were expected"):
            loop(journal, ABC, executor).run()
        assert (len(executor.launched), settled(journal)) == (1, True)


def test_a_resume_tries_again_what_was_given_up(tmp_path: Path) -> None:
    executor = StubExecutor(by_arm({"B=0": void("port taken")}, guilty("A")))
    with create(tmp_path, ABC, executor) as journal:
        loop(journal, ABC, executor).run()
        assert executor.arms.count("B=0") == 3
    executor.outcome = guilty("A", seed=5)
    with resume(tmp_path, executor) as journal:
        assert loop(journal, ABC, executor).run().kind == "decided"
        arms = {arm.name: arm for arm in campaign_result(journal, ABC).arms}
        assert (arms["B=0"].verdict, arms["B=0"].void) == ("FAULTS", 3)


def test_every_session_launches_from_the_environment_of_the_first(tmp_path: Path) -> None:
    executor = StubExecutor(by_arm({}))
    executor.during = lambda launch, stop: stop.ask("x")
    with create(tmp_path, ABC, executor) as journal:
        keep_environment(journal, {"PATH": "/first", "VLLM_FORGOTTEN": "1", "HOME": "/h"})
        loop(journal, ABC, executor, stop=Stop()).run()
    with resume(tmp_path, executor) as journal:
        loop(journal, ABC, executor, stop=Stop()).run()
    assert [launch.environment for launch, _ in executor.launched] == [{"PATH": "/first", "HOME": "/h"}] * 2


def test_threads_are_named_for_their_hosts_and_none_is_left() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane")]


def test_results_are_kept_as_they_were_told(tmp_path: Path) -> None:
    script = {1: faulted(2), 2: clean(), 3: LaunchResult("void", 7.0, reason="why"), 4: interrupted()}
    executor = StubExecutor(lambda launch, stratum: script[launch.number])
    executor.during = lambda launch, stop: stop.ask("x") if launch.number == 4 else None
    with create(tmp_path, ABC, executor) as journal:
        loop(journal, ABC, executor).run()
        assert [(run.result, run.exposure, run.signature is None, run.reason) for run in journal.runs()] == [
            ("faulted", 2, False, ""), ("clean", 20, True, ""), ("void", 0, True, "why"),
            ("interrupted", 0, True, "stopped by Ctrl-C"),
        ]  # fmt: skip
