"""The campaign's loop around a reboot, and on a host that only a reboot would free, on a real journal."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bisect_stub import StubExecutor, campaign, create, guilty, loop, resume, settled
from soakrig.bisect.campaign import ENDED
from soakrig.bisect.campaign_result import campaign_result
from soakrig.bisect.journal import Journal
from soakrig.bisect.stop import Stop
from soakrig.errors import StoreError

ABC = campaign("A", "B", "C")


def after_a_reboot(tmp_path: Path, boot_id: str, planned: str) -> tuple[StubExecutor, Journal]:
    """A campaign that had its baseline on boot one, a launch of all-off last, and one planned when it ended."""
    executor, stop = StubExecutor(guilty("A")), Stop()
    executor.during = lambda launch, stop: stop.ask("x") if launch.arm == "all-off" else None
    with create(tmp_path, ABC, executor) as journal:
        loop(journal, ABC, executor, stop=stop).run()
        assert executor.arms[-1] == "all-off"
        journal.plan(planned, cap=ABC.cap)
    executor.launched.clear()
    executor.during = lambda launch, stop: stop.ask("x") if launch.number else None
    return executor, resume(tmp_path, executor, boot_id)


def test_after_a_reboot_the_control_comes_first(tmp_path: Path) -> None:
    executor, journal = after_a_reboot(tmp_path, "boot-two", "A=0")
    with journal:
        before = len(journal.runs())
        loop(journal, ABC, executor).run()
        assert executor.arms == ["control"]
        dropped, run = journal.runs()[before - 1 :]
        assert (dropped.result, dropped.state, dropped.boot_id) == ("void", "settled", "")
        assert dropped.reason == "planned before a reboot, after which the control comes first"
        assert (run.why, run.boot_id) == ("first launch after a reboot", "boot-two")


def test_a_control_that_was_planned_before_the_reboot_is_the_one_that_comes_first(tmp_path: Path) -> None:
    executor, journal = after_a_reboot(tmp_path, "boot-two", "control")
    with journal:
        number = journal.planned()[0].id
        loop(journal, ABC, executor).run()
        assert [(launch.arm, launch.number) for launch, _ in executor.launched] == [("control", number)]


def test_without_a_reboot_the_planned_arm_goes_on(tmp_path: Path) -> None:
    executor, journal = after_a_reboot(tmp_path, "boot-one", "A=0")
    with journal:
        loop(journal, ABC, executor).run()
        assert executor.arms == ["A=0"]


STUCK = "process 7 (python3) in state D"


def test_a_wedged_host_ends_it_and_the_run_waits_for_a_resume(tmp_path: Path) -> None:
    executor, told = StubExecutor(guilty("A"), left={2: [STUCK]}), list[str]()
    with create(tmp_path, ABC, executor) as journal:
        end = loop(journal, ABC, executor, changed=told.append, reboot=lambda: pytest.fail("not allowed")).run()
        assert end.kind == "wedged"
        assert end.why == f"run 2 of control left {STUCK}: the host is wedged. Only a reboot ends it"
        assert len(executor.launched) == 2
        run = journal.runs()[1]
        assert run.state == "teardown"
        assert [note.detail for note in journal.notes(2) if note.what == "wedged"] == [{"left": [STUCK]}]
        assert (campaign_result(journal, ABC).state, campaign_result(journal, ABC).exit_code) == ("paused", 2)
    executor.stuck = [STUCK]
    with resume(tmp_path, executor) as journal:
        end = loop(journal, ABC, executor).run()
        assert (end.kind, len(executor.launched)) == ("wedged", 2), "nothing is launched on such a host"
        assert end.why.endswith(f"left {STUCK}, and it is there still")
        assert journal.runs()[1].state == "teardown"
    executor.stuck = []
    with resume(tmp_path, executor) as journal:
        assert loop(journal, ABC, executor).run().kind == "decided"
        assert executor.cleared == [(executor.launched[1][0].mark, "")] * 2
        assert settled(journal)
        assert campaign_result(journal, ABC).conclusion_kind == "single"


def test_a_wedged_host_is_why_it_ended_also_where_a_stop_was_asked_for(tmp_path: Path) -> None:
    executor = StubExecutor(guilty("A"), left={2: [STUCK]})
    executor.during = lambda launch, stop: stop.ask("Ctrl-C") if launch.number == 2 else None
    with create(tmp_path, ABC, executor) as journal:
        assert loop(journal, ABC, executor).run().kind == "wedged"


def test_an_allowed_reboot_is_the_last_word_of_its_boot_and_counted(tmp_path: Path) -> None:
    spec = campaign("A", "B", "C", allow_reboot=1)
    executor, reboots = StubExecutor(guilty("A"), left={2: [STUCK], 5: [STUCK]}), list[int]()
    with create(tmp_path, spec, executor) as journal:
        end = loop(journal, spec, executor, reboot=lambda: reboots.append(len(journal.runs()))).run()
        assert (end.kind, reboots) == ("rebooting", [2])
        assert end.why.endswith("Reboot 1 of 1 is ordered")
        last = journal.notes()[-1]
        assert (last.what, last.detail["number"], last.detail["allowed"]) == ("reboot", 1, 1)
        state = campaign_result(journal, spec)
        assert (state.state, state.ended) == ("paused", last.detail["why"])
    with resume(tmp_path, executor, "boot-two") as journal:
        assert (journal.runs()[1].state, journal.runs()[1].result) == ("settled", "faulted"), "its result stands"
        end = loop(journal, spec, executor, reboot=lambda: pytest.fail("one was allowed")).run()
        assert (end.kind, len(executor.launched)) == ("wedged", 5)
        assert executor.arms[2] == "control"
        assert journal.notes()[-1].what == ENDED


@pytest.mark.parametrize(
    "error",
    [OSError("no systemctl"), subprocess.CalledProcessError(1, ["systemctl"]), StoreError("nothing takes it up")],
    ids=lambda error: type(error).__name__,
)
def test_a_reboot_that_cannot_be_ordered_is_told(tmp_path: Path, error: Exception) -> None:
    spec = campaign("A", "B", allow_reboot=3)
    executor = StubExecutor(guilty("A"), left={1: [STUCK]})

    def fails() -> None:
        raise error

    with create(tmp_path, spec, executor) as journal:
        end = loop(journal, spec, executor, reboot=fails).run()
        assert end.kind == "wedged"
        assert f"The reboot could not be ordered: {error}" in end.why
        assert journal.notes()[-1].what == ENDED
    executor.left = {}
    with resume(tmp_path, executor, "boot-two") as journal:  # it went down in earnest, by nobody's order
        assert journal.runs()[0].result == "host_lost"
        assert loop(journal, spec, executor).run().kind == "decided"
