"""The campaign's loop over several hosts: a lane to each, controls of its own, one lost, and nothing that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bisect_stub import StubExecutor, by_arm, campaign, clean, create, faulted, loop, resume
from soakrig.bisect.allocation import Step
from soakrig.bisect.arm_launch import ArmLaunch
from soakrig.bisect.campaign import CampaignLoop, End
from soakrig.bisect.campaign_result import campaign_result
from soakrig.bisect.evidence import Evidence
from soakrig.bisect.executors import Stratum
from soakrig.bisect.journal import Journal
from soakrig.bisect.launch_result import LaunchResult, void
from soakrig.bisect.stop import Stop

ONE, TWO = Stratum("one gpu 0", "0", "boot-one-a"), Stratum("two gpu 3", "3", "boot-two-a")
SPEC = campaign("A", "B")


def cause_is_a(launch: ArmLaunch, stratum: Stratum) -> LaunchResult:
    """Always alike, so that the order of two threads does not matter."""
    on = launch.campaign.arm(launch.arm).values["A"] == "1"
    return faulted(3 + launch.number % 3) if on else clean()


def arms_of(executor: StubExecutor, stratum: Stratum) -> list[str]:
    return [launch.arm for launch, where in executor.launched if where.name == stratum.name]


def finish(made: CampaignLoop) -> End:
    """A loop to its end, or to what it raises, with a deadline for what hangs."""
    ends: list[End] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            ends.append(made.run())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30.0)
    assert not thread.is_alive(), "it hangs"
    assert not [one.name for one in threading.enumerate() if one.name.startswith("lane ")]
    if failures:
        raise failures[0]
    return ends[0]


def run(journal: Journal, executor: StubExecutor) -> End:
    return finish(loop(journal, SPEC, executor))


def test_two_hosts_share_the_work_and_each_has_its_own_controls(tmp_path: Path) -> None:
    executor, busy, most = StubExecutor(cause_is_a, strata=[ONE, TWO]), dict[str, int](), list[int]()

    def during(launch: ArmLaunch, stop: Stop) -> None:
        name = next(where.name for one, where in executor.launched if one is launch)
        busy[name] = busy.get(name, 0) + 1
        most.append(busy[name])
        busy[name] -= 1

    executor.during = during
    with create(tmp_path, SPEC, executor) as journal:
        end = run(journal, executor)
        assert end.kind == "decided"
        assert max(most) == 1, "one launch at a time on a card"
        for where in (ONE, TWO):
            own = arms_of(executor, where)
            if set(own) != {"control"}:
                assert own[:3] == ["control"] * 3, own
        assert {launch.card for launch, where in executor.launched if where is TWO} == {"3"}
        for row in journal.runs():
            assert row.boot_id == (ONE if row.stratum == ONE.name else TWO).boot_id
            assert row.state == "settled"
        found = campaign_result(journal, SPEC)
        assert (found.conclusion_kind, found.cause) == ("single", ["A"])
        assert {one.stratum for one in found.launches} == {ONE.name, TWO.name}


@pytest.mark.parametrize("strata", [[TWO], [TWO, Stratum("three cpu", None, "b")]])
def test_a_host_is_held_against_no_other_host_s_controls(tmp_path: Path, strata: Sequence[Stratum]) -> None:
    """Also where it is the only one that is left: what the other had seen is no baseline for it."""
    executor = StubExecutor(cause_is_a, strata=[ONE])
    executor.during = lambda launch, stop: stop.ask("x") if launch.arm != "control" else None
    with create(tmp_path, SPEC, executor) as journal:
        run(journal, executor)
        assert executor.arms == ["control"] * 3 + ["all-off"]
    executor.strata, executor.during = strata, lambda launch, stop: None
    executor.launched.clear()
    with resume(tmp_path, executor) as journal:
        assert run(journal, executor).kind == "decided"
        for where in strata:
            own = arms_of(executor, where)
            assert own[:3] == ["control"] * len(own[:3]), own
        assert campaign_result(journal, SPEC).conclusion_kind == "single"


def test_a_lost_host_gets_no_more_launches_and_the_other_finds_the_answer(tmp_path: Path) -> None:
    executor = StubExecutor(cause_is_a, strata=[ONE, TWO])

    def outcome(launch: ArmLaunch, stratum: Stratum) -> LaunchResult:
        if stratum is TWO:
            executor.strata = [ONE]
            return void("host lost: two gpu 3: its node is no more in the cluster")
        return cause_is_a(launch, stratum)

    executor.outcome = outcome
    with create(tmp_path, SPEC, executor) as journal:
        assert run(journal, executor).kind == "decided"
        assert arms_of(executor, TWO) == ["control"]
        assert campaign_result(journal, SPEC).conclusion_kind == "single"
        assert all(row.state == "settled" for row in journal.runs())


def test_with_every_host_lost_it_stops_and_may_be_resumed(tmp_path: Path) -> None:
    executor = StubExecutor(cause_is_a, strata=[ONE, TWO])

    def outcome(launch: ArmLaunch, stratum: Stratum) -> LaunchResult:
        executor.strata = []
        return void("host lost")

    executor.outcome = outcome
    with create(tmp_path, SPEC, executor) as journal:
        assert run(journal, executor) == ("stopped", "no host is left")
        assert campaign_result(journal, SPEC).state == "paused"


def test_after_a_reboot_of_one_host_only_its_lane_begins_with_the_control(tmp_path: Path) -> None:
    executor, baseline = StubExecutor(cause_is_a, strata=[ONE, TWO]), {ONE.name: 0, TWO.name: 0}

    def during(launch: ArmLaunch, stop: Stop) -> None:
        name = next(where.name for one, where in executor.launched if one is launch)
        baseline[name] += 1
        if all(done >= 4 for done in baseline.values()):
            stop.ask("x")

    executor.during = during
    with create(tmp_path, SPEC, executor) as journal:
        run(journal, executor)
    executor.launched.clear()
    executor.during = lambda launch, stop: stop.ask("x")
    executor.strata = [ONE, Stratum(TWO.name, TWO.card, "boot-two-b")]
    with resume(tmp_path, executor, "boot of the driver's own host, which does not matter") as journal:
        run(journal, executor)
        whys = {row.stratum: row.why for row in journal.runs()[-len(executor.launched) :]}
        assert whys.get(TWO.name, "first launch after a reboot") == "first launch after a reboot"
        assert whys.get(ONE.name, "") != "first launch after a reboot"


def blocked(made: CampaignLoop) -> bool:
    """Whether a lane waits for what another one's launch brings."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        if made._free._waiters:  # type: ignore[attr-defined]
            return True
        time.sleep(0.001)
    return False


def waiting_for_two(
    tmp_path: Path, ending: LaunchResult | Exception
) -> tuple[StubExecutor, Journal, CampaignLoop, list[bool]]:
    """All faults, so that host one soon has nothing to do; host two's launches end once the other lane waits."""
    executor, waited = StubExecutor(by_arm({}), strata=[ONE, TWO]), list[bool]()
    journal = create(tmp_path, SPEC, executor)
    made = loop(journal, SPEC, executor)

    def outcome(launch: ArmLaunch, stratum: Stratum) -> LaunchResult:
        if stratum is ONE:
            return faulted()
        waited.append(blocked(made))
        if isinstance(ending, Exception):
            raise ending
        return ending

    executor.outcome = outcome
    return executor, journal, made, waited


def test_a_lane_without_work_waits_for_the_other_and_both_end(tmp_path: Path) -> None:
    executor, journal, made, waited = waiting_for_two(tmp_path, faulted())
    with journal:
        assert finish(made).kind == "decided"
        assert waited[0], "host one waited"
        assert set(arms_of(executor, TWO)) == {"control"}
        assert campaign_result(journal, SPEC).conclusion_kind == "not_in_list"


def test_a_lane_that_waits_is_woken_by_what_another_one_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is scripted: after a launch each, host one has nothing to do until host two's is settled."""
    executor, begun, woken = StubExecutor(cause_is_a, strata=[ONE, TWO]), threading.Event(), threading.Event()
    control = SPEC.arms[0].arm

    def next_step(evidence: Evidence, *_: object, stratum: str, **__: object) -> Step:
        done = [sum(run.stratum == where.name for run in evidence.runs) for where in (ONE, TWO)]
        mine = done[stratum == TWO.name]
        more = mine < (2 if stratum == TWO.name or done[1] else 1)
        return Step("run", "made up", control) if more else Step("stop", "made up")

    monkeypatch.setattr("soakrig.bisect.campaign.next_step", next_step)
    with create(tmp_path, SPEC, executor) as journal:
        made, seen = loop(journal, SPEC, executor), list[bool]()

        def outcome(launch: ArmLaunch, stratum: Stratum) -> LaunchResult:
            if stratum is TWO:
                begun.set()
                seen.append(blocked(made) if not seen else woken.wait(10.0))
            elif len(arms_of(executor, ONE)) == 1:
                assert begun.wait(10.0)
            else:
                woken.set()
            return faulted()

        executor.outcome = outcome
        assert finish(made).kind == "decided"
        assert seen == [True, True], "it waited, and then ran beside host two's second launch"


def test_a_lane_that_breaks_ends_the_one_that_waits_for_it(tmp_path: Path) -> None:
    _, journal, made, waited = waiting_for_two(tmp_path, ValueError("made up"))
    with journal:
        with pytest.raises(ValueError, match="made up"):
            finish(made)
        assert waited == [True]


def test_a_lane_that_breaks_lets_the_other_finish_its_launch_and_no_more(tmp_path: Path) -> None:
    executor = StubExecutor(cause_is_a, strata=[ONE, TWO])
    broken = threading.Event()
    with create(tmp_path, SPEC, executor) as journal:
        made = loop(journal, SPEC, executor)

        def outcome(launch: ArmLaunch, stratum: Stratum) -> LaunchResult:
            if stratum is TWO:
                raise ValueError("made up")
            deadline = time.monotonic() + 10.0
            while made._failure is None and time.monotonic() < deadline:
                broken.wait(0.001)
            return cause_is_a(launch, stratum)

        executor.outcome = outcome
        with pytest.raises(ValueError, match="made up"):
            finish(made)
        assert len(arms_of(executor, ONE)) <= 1
        assert [row.state for row in journal.runs() if row.stratum == ONE.name] in ([], ["settled"])


def test_a_wedged_host_of_a_cluster_is_never_rebooted_and_ends_it_for_all(tmp_path: Path) -> None:
    spec = campaign("A", "B", allow_reboot=3)
    executor = StubExecutor(cause_is_a, strata=[ONE], left={1: ["process 7 (x) in state D"]})
    with create(tmp_path, spec, executor) as journal:
        end = loop(journal, spec, executor, reboot=lambda: pytest.fail("another host is not ours to reboot")).run()
        assert end.kind == "wedged"
