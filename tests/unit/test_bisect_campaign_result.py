"""The object of ``soak bisect --json``, from a journal: every key of the contract, its state, and no secret in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bisect_stub import StubExecutor, by_arm, campaign, clean, create, faulted, guilty, interrupted, loop, resume, voids
from soakrig.bisect.campaign import ENDED, SESSION
from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.campaign_result import campaign_result
from soakrig.bisect.journal import REBOOT, Journal, Turn
from soakrig.bisect.launch_result import LaunchResult, void
from soakrig.errors import RecordError
from soakrig.record.campaign import CampaignResult
from soakrig.soak.watch.proc import create_time

ABC = campaign("A", "B", "C")


def played(tmp_path: Path, executor: StubExecutor, spec: Campaign = ABC) -> dict[str, Any]:
    """The result of a whole campaign, as the JSON that is printed."""
    with create(tmp_path / "bisect-one", spec, executor) as journal:
        loop(journal, spec, executor).run()
        return json.loads(json.dumps(campaign_result(journal, spec).to_json()))


def test_every_key_of_the_contract(tmp_path: Path) -> None:
    executor = StubExecutor(guilty("A"), proofs={"A": "settings", "B": "settings", "C": "environment"})
    found = played(tmp_path, executor)
    assert CampaignResult.from_json(found).to_json() == found
    assert {"campaign", "arms", "conclusion", "not_said", "hours"} <= set(found), "DESIGN, other results"
    keys = {
        "name", "variable", "value", "role", "runs", "exposure", "faults", "void", "verdict", "ratio", "p",
        "posterior",
    }  # fmt: skip
    assert all(keys <= set(arm) for arm in found["arms"])
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert [arm["role"] for arm in found["arms"]] == ["control", "all_off", *["one"] * 3, *["add_back"] * 3]
    assert (arms["A=0"]["variable"], arms["A=0"]["value"], arms["A=0"]["changes"]) == ("A", "0", {"A": "0"})
    assert arms["all-off"]["changes"] == {"A": "0", "B": "0", "C": "0"}
    assert arms["back:A"]["changes"] == {"B": "0", "C": "0"}
    for name in ("control", "all-off", "back:A"):
        assert (arms[name]["variable"], arms[name]["value"]) == (None, None)
    assert arms["control"]["verdict"] == "CONTROL"
    assert (arms["A=0"]["verdict"], arms["A=0"]["faults"]) == ("CLEARED", 0)
    assert arms["A=0"]["claim"].startswith("CLEARED to at least ")
    assert set(arms["A=0"]["ratio"]) == {"low", "estimate", "high"}
    assert arms["A=0"]["posterior"] > 0.99
    assert 0 < arms["A=0"]["p"] < 0.01
    assert arms["B=0"]["verdict"] == "FAULTS"
    assert arms["B=0"]["rate"]["estimate"] == pytest.approx(arms["B=0"]["faults"] / arms["B=0"]["exposure"])
    assert sum(arm["seconds"] for arm in found["arms"]) == pytest.approx(3600 * found["hours"], abs=1)
    assert found["hours"] == pytest.approx(
        sum(240 + 10 * one["exposure"] for one in found["launches"]) / 3600, abs=1e-3
    )
    assert (found["campaign"], found["folder"]) == ("bisect-one", str(tmp_path / "bisect-one"))
    assert (found["schema"], found["exit_code"], found["state"], found["cause"]) == (1, 0, "finished", ["A"])
    assert (found["unit"], found["cap"], found["confidence"], found["at_least"]) == ("turns", 20, 0.99, 2)
    assert found["budget_hours"] == 8
    assert found["outlook"] == []
    assert found["proofs"] == {"A": "settings", "B": "settings", "C": "environment"}
    assert "Not that anything in the engine obeys C: " in found["not_said"][-1]
    assert found["spec"] == ABC.shown()
    assert found["signatures"] == {found["signature"]: sum(arm["faults"] for arm in found["arms"])}
    first = found["launches"][0]
    assert (first["id"], first["arm"], first["result"], first["folder"]) == (
        1, "control", "clean", "runs/0001-control",
    )  # fmt: skip
    assert first["seconds"] == 240 + 10 * first["exposure"]
    assert first["boot_id"] == "boot-one"


def test_before_anything_was_launched_nothing_is_claimed(tmp_path: Path) -> None:
    with create(tmp_path, ABC, StubExecutor(by_arm({}))) as journal:
        found = campaign_result(journal, ABC)
        assert (found.state, found.ended, found.exit_code, found.hours) == ("paused", "not begun", 2, 0)
        assert (found.signature, found.signatures, found.launches, found.drift_p) == (None, {}, [], None)
        for arm in found.arms:
            assert (arm.runs, arm.exposure, arm.faults, arm.void) == (0, 0, 0, 0)
            for name in ("rate", "ratio", "p", "posterior", "expected"):
                assert getattr(arm, name) is None, f"{name}: not run is no figure"
            assert arm.verdict == ("CONTROL" if arm.role == "control" else "UNDECIDED")


def test_an_arm_that_did_not_run_has_no_figures_beside_others_that_did(tmp_path: Path) -> None:
    executor = StubExecutor(guilty("A"))
    executor.during = lambda launch, stop: stop.ask("x") if launch.arm == "all-off" else None
    with create(tmp_path, ABC, executor) as journal:
        loop(journal, ABC, executor).run()
        arms = {arm.name: arm for arm in campaign_result(journal, ABC).arms}
        ran, not_run = arms["all-off"], arms["B=0"]
        assert (ran.runs, not_run.runs) == (1, 0)
        assert ran.expected is not None
        assert ran.posterior is not None
        for name in ("rate", "ratio", "p", "posterior", "expected"):
            assert getattr(not_run, name) is None
        assert arms["control"].rate is not None
        assert arms["control"].ratio is arms["control"].p is arms["control"].posterior is None


def test_a_control_without_a_fault_gives_no_ratio_and_no_infinity(tmp_path: Path) -> None:
    with create(tmp_path, ABC, StubExecutor(by_arm({}))) as journal:
        for arm, result in (("control", clean()), ("A=0", faulted())):
            settle(journal, arm, result)
        found = campaign_result(journal, ABC).to_json()
        json.dumps(found, allow_nan=False)
        arm = next(one for one in found["arms"] if one["name"] == "A=0")
        assert (arm["verdict"], arm["ratio"]) == ("FAULTS", None)
        assert found["conclusion_kind"] == "no_baseline"


def test_a_ratio_to_nothing_is_left_out(tmp_path: Path) -> None:
    """The second block of launches has a control without a fault: beside it the arm's ratio has no finite estimate."""
    script = [("control", 3), ("control", 4), ("control", 5), ("B=0", 3), ("control", None), ("A=0", 6)]
    with create(tmp_path, ABC, StubExecutor(by_arm({}))) as journal:
        for arm, turn in script:
            settle(journal, arm, clean() if turn is None else faulted(turn))
        found = campaign_result(journal, ABC).to_json()
        json.dumps(found, allow_nan=False)
        arms = {arm["name"]: arm for arm in found["arms"]}
        assert (arms["A=0"]["verdict"], arms["A=0"]["ratio"]) == ("FAULTS", None)
        assert arms["A=0"]["p"] is not None
        assert arms["B=0"]["ratio"] is not None


def settle(journal: Journal, arm: str, result: LaunchResult) -> None:
    run = journal.plan(arm, cap=20)
    for state in ("launching", "ready", "probing"):
        journal.move(run, state)
    journal.move(run, result.result, exposure=result.exposure, signature=result.signature)
    journal.move(run, "teardown")
    journal.move(run, "settled")


def ready(journal: Journal, arm: str, **proofs: str) -> None:
    run = journal.plan(arm, cap=20)
    journal.move(run, "launching")
    journal.move(run, "ready", detail={"proofs": proofs})
    journal.move(run, "void", reason="made up")
    journal.move(run, "settled")


def test_a_proof_is_as_strong_as_the_weakest_launch(tmp_path: Path) -> None:
    with create(tmp_path, ABC, StubExecutor(by_arm({}))) as journal:
        ready(journal, "control", A="settings", B="argv", X="settings")
        ready(journal, "A=0", A="environment", B="settings")
        ready(journal, "B=0", A="settings", B="settings")
        assert campaign_result(journal, ABC).proofs == {"A": "environment", "B": "argv"}


def test_interrupted_launches_are_void_with_their_reason_and_not_counted(tmp_path: Path) -> None:
    script = {1: interrupted(), 2: void("the engine did not start: no"), 3: interrupted()}
    executor = StubExecutor(lambda launch, stratum: script.get(launch.number) or faulted())
    executor.during = lambda launch, stop: stop.ask("x") if launch.number == 4 else None
    with create(tmp_path, ABC, executor) as journal:
        loop(journal, ABC, executor).run()
        control = campaign_result(journal, ABC).arms[0]
        assert (control.runs, control.faults, control.void) == (1, 1, 3)
        assert control.void_reasons == {"interrupted: stopped by Ctrl-C": 2, "the engine did not start: no": 1}


def test_one_that_is_not_torn_down_yet_is_not_void(tmp_path: Path) -> None:
    with create(tmp_path, ABC, StubExecutor(by_arm({}))) as journal:
        run = journal.plan("control", cap=20)
        journal.move(run, "launching")
    with Journal.resume(tmp_path, boot_id="boot-one") as journal:
        assert journal.runs()[0].state == "interrupted"
        assert campaign_result(journal, ABC).arms[0].void == 0


def note_session(journal: Journal, pid: int, since: float | None) -> None:
    journal.note(SESSION, pid=pid, since=since)


def test_running_while_the_process_of_the_newest_session_is_there(tmp_path: Path) -> None:
    with create(tmp_path, ABC, StubExecutor(by_arm({}))) as journal:

        def state() -> tuple[str, str]:
            found = campaign_result(journal, ABC)
            assert found.exit_code == 2
            return found.state, found.ended

        with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
            note_session(journal, other.pid, create_time(other.pid))
            assert state() == ("running", "")
            other.communicate(b"\n")
        assert state() == ("paused", "the process that ran it has ended")
        note_session(journal, os.getpid(), (create_time(os.getpid()) or 0.0) - 5.0)
        assert state() == ("paused", "the process that ran it has ended"), "the pid was given away again"
        note_session(journal, os.getpid(), create_time(os.getpid()))
        assert state() == ("running", "")
        journal.note("another", text="says nothing of it")
        assert state() == ("running", "")
        for kind in ("stopped", "wedged", "journal", "bug"):
            journal.note(ENDED, kind=kind, why=f"by {kind}")
            assert state() == ("paused", f"by {kind}")
        note_session(journal, os.getpid(), create_time(os.getpid()))
        assert state() == ("running", "")
        journal.note(REBOOT, why="run 3 left something", number=1)
        assert state() == ("paused", "run 3 left something")
        for kind in ("decided", "budget"):
            journal.note(ENDED, kind=kind, why=f"by {kind}")
            assert state() == ("finished", f"by {kind}")


@pytest.mark.parametrize(
    ("outcome", "kind", "code"),
    [
        (guilty("A"), "single", 0), (guilty("A", "B"), "both_needed", 0), (guilty(), "not_in_list", 0),
        (voids("control"), "no_baseline", 2),
        (by_arm({"A=0": clean(20), "B=0": faulted(), "C=0": faulted(), "all-off": void("x")}), "single", 0),
    ],
)  # fmt: skip
def test_the_exit_code_is_0_for_an_answer_and_2_for_anything_else(
    tmp_path: Path, outcome: Any, kind: str, code: int
) -> None:
    found = played(tmp_path, StubExecutor(outcome))
    assert (found["conclusion_kind"], found["exit_code"], found["state"]) == (kind, code, "finished")
    assert bool(found["outlook"]) == (kind == "undecided")


def test_an_answer_counts_only_once_it_has_ended(tmp_path: Path) -> None:
    executor = StubExecutor(guilty("A"))
    with create(tmp_path, ABC, executor) as journal:
        loop(journal, ABC, executor).run()
        assert campaign_result(journal, ABC).exit_code == 0
        note_session(journal, os.getpid(), create_time(os.getpid()))
        running = campaign_result(journal, ABC)
        assert (running.state, running.exit_code, running.conclusion_kind) == ("running", 2, "single")


def test_the_outlook_is_told_while_there_is_no_answer(tmp_path: Path) -> None:
    spec = campaign("A", "B", "C", budget=3000.0)
    found = played(tmp_path, StubExecutor(guilty("A")), spec)
    assert (found["state"], found["exit_code"]) == ("finished", 2)
    assert any("more clean turns" in text for text in found["outlook"])


@pytest.mark.parametrize("where", ["settings", "variables"])
def test_a_planted_fault_is_simulated(tmp_path: Path, where: str) -> None:
    value: Any = "{}" if where == "settings" else ["{}", {"unset": True}]
    fields = {"settings": {"SOAKRIG_PLANT": "{}"}} if where == "settings" else {}
    variables = {"A": ["1", "0"]} if where == "settings" else {"SOAKRIG_PLANT": value, "A": ["1", "0"]}
    spec = Campaign.from_json({"turns": 20, "variables": variables, **fields})
    with create(tmp_path, spec, StubExecutor(by_arm({}))) as journal:
        assert campaign_result(journal, spec).simulated
    with create(tmp_path / "other", ABC, StubExecutor(by_arm({}))) as journal:
        assert not campaign_result(journal, ABC).simulated


SECRET = "s3cret-value"


def test_no_secret_is_in_it(tmp_path: Path) -> None:
    spec = Campaign.from_json(
        {
            "turns": 20, "settings": {"HF_TOKEN": SECRET + "-0"}, "flags": [f"--api-key={SECRET}-1"],
            "notify": [f"json://user:{SECRET}-2@host"],
            "variables": {
                "MY_API_KEY": [SECRET + "-3", SECRET + "-4", SECRET + "-5", {"unset": True}], "A": ["1", "0"],
                "--other-token": [SECRET + "-6", SECRET + "-7"],
            },
        }
    )  # fmt: skip
    singles = {arm.name for arm in spec.arms if arm.role == "one"}
    executor = StubExecutor(lambda launch, stratum: faulted() if launch.arm == "control" else clean())
    executor.during = lambda launch, stop: stop.ask("x") if singles <= set(executor.arms) else None
    with create(tmp_path, spec, executor) as journal:
        loop(journal, spec, executor).run()
        found = campaign_result(journal, spec)
        text = json.dumps(found.to_json())
        assert SECRET not in text
        assert len({arm.name for arm in found.arms}) == len(found.arms), "names stay apart"
        assert {one.arm for one in found.launches} <= {arm.name for arm in found.arms}
        assert not any(SECRET in launch.run_id for launch, _ in executor.launched)
        assert found.outlook
        one = next(arm for arm in found.arms if arm.role == "one")
        assert (one.variable, one.value, one.changes) == ("MY_API_KEY", "[redacted]", {"MY_API_KEY": "[redacted]"})
        unset = next(arm for arm in found.arms if arm.name == "MY_API_KEY=")
        assert (unset.value, unset.changes) == (None, {"MY_API_KEY": None})


def test_an_arm_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    executor = StubExecutor(by_arm({}))
    with create(tmp_path, ABC, executor) as journal:
        journal.plan("D=0", cap=20)
    with resume(tmp_path, executor) as journal, pytest.raises(RecordError, match="no arm 'D=0'"):
        loop(journal, ABC, executor).run()


def test_a_launch_that_is_under_way_says_how_far_it_is(tmp_path: Path) -> None:
    with create(tmp_path, ABC, StubExecutor(by_arm({}))) as journal:
        run = journal.plan("control", cap=20, why="baseline")
        (one,) = campaign_result(journal, ABC).launches
        assert (one.state, one.result, one.seconds, one.why) == ("planned", None, None, "baseline")
        assert one.began == journal.runs()[0].planned_at
        for state in ("launching", "ready", "probing"):
            journal.move(run, state)
        journal.turn(run, Turn(1, "ok"))
        (one,) = campaign_result(journal, ABC).launches
        assert (one.state, one.result, one.exposure, one.seconds) == ("probing", None, 1, 0)


def test_drift_and_result_kinds_come_from_the_launches(tmp_path: Path) -> None:
    turns = [3, 3, 3, 3, 3, 3, 19, 19, 19, 19, 19, 19]
    executor = StubExecutor(lambda launch, stratum: LaunchResult("faulted", turns[launch.number - 1], "Xid 31"))
    spec = campaign("A", budget=1e6)
    executor.during = lambda launch, stop: stop.ask("x") if launch.number == len(turns) else None
    with create(tmp_path, spec, executor) as journal:
        loop(journal, spec, executor).run()
        found = campaign_result(journal, spec)
        assert found.signature == "Xid 31"
        assert found.signatures == {"Xid 31": len(found.launches)}
