from __future__ import annotations

from dataclasses import replace

import pytest

from bisect_world import CONTROL, XID, evidence, five_variables, play
from soakrig.bisect.allocation import LAUNCHES_BETWEEN_CONTROLS, MAX_VOIDS, next_step
from soakrig.bisect.conclusion import conclude
from soakrig.bisect.evidence import Arm, ArmRun, Evidence
from soakrig.bisect.verdicts import Rule, judge

ARMS = five_variables()
RULE = Rule(arms=6)
CLEAN = (60.0, False)
OFF = ("all off", [CLEAN] * 4)


def step_name(seen: Evidence, arms: list[Arm] = ARMS, **asked: object) -> str | None:
    step = next_step(seen, arms, RULE, **asked)  # type: ignore[arg-type]
    return step.arm.name if step.arm else None


def test_the_control_comes_first_until_it_faulted_three_times() -> None:
    assert step_name(Evidence(())) == "control"
    assert step_name(evidence(("control", [(5, True), CLEAN, (9, True)]))) == "control"
    assert step_name(evidence(("control", [(5, True), CLEAN, (9, True), (30, True)]))) == "all off"


def test_all_off_goes_on_until_the_cause_may_be_in_the_list() -> None:
    assert step_name(evidence(("control", CONTROL), ("all off", [CLEAN]))) == "all off"
    assert step_name(evidence(("control", CONTROL), OFF)) in set("ABCDE")


def test_where_no_single_change_helps_all_off_has_to_be_beyond_doubt_first() -> None:
    faults = [(name, [(9.0, True), (12.0, True), (5.0, True)]) for name in "ABCDE"]
    seen = evidence(("control", CONTROL), OFF, *faults, ("control", CONTROL))
    assert step_name(seen) == "all off"
    sure = evidence(("control", CONTROL * 2), ("all off", [CLEAN] * 30), *faults, ("control", CONTROL))
    assert (step_name(sure) or "").startswith("back ")


def test_all_off_that_faults_ends_the_campaign_but_not_at_its_first_fault() -> None:
    once = evidence(("control", CONTROL), ("all off", [(4, True)]))
    assert step_name(once) == "all off"
    often = evidence(("control", CONTROL), ("all off", [(4, True), (20, True), (13, True), (8, True)]))
    step = next_step(often, ARMS, RULE)
    assert (step.kind, step.arm) == ("stop", None)
    assert "not in the list" in step.why


def test_every_variable_gets_a_first_look_in_an_order_drawn_by_the_seed() -> None:
    seen = evidence(("control", CONTROL), OFF)
    names = {step_name(seen, seed=seed) for seed in range(40)}
    assert names == set("ABCDE")
    assert len({step_name(seen, seed=3) for _ in range(5)}) == 1


def test_controls_are_interleaved_and_come_first_after_a_reboot() -> None:
    seen = evidence(("control", CONTROL), OFF, ("A", [(9, True)]), ("B", [(9, True)]))
    assert len(seen.runs) - len(CONTROL) == LAUNCHES_BETWEEN_CONTROLS
    assert step_name(seen) == "control"
    fewer = Evidence(seen.runs[:-1])
    assert step_name(fewer) != "control"
    assert step_name(fewer, after_reboot=True) == "control"


def test_an_arm_does_not_run_far_ahead_of_the_controls_of_its_hours() -> None:
    faults = [(name, [(9.0, True), (12.0, True)]) for name in "BCDE"]
    behind = evidence(("control", CONTROL), OFF, *faults, ("control", [(9, True)]), ("A", [CLEAN] * 2))
    step = next_step(behind, ARMS, RULE)
    assert step.arm == ARMS[0]
    assert "ahead" in step.why
    level = evidence(("control", CONTROL), OFF, *faults, ("control", CONTROL), ("A", [CLEAN] * 2))
    assert step_name(level) == "A"


def test_the_two_likeliest_take_turns() -> None:
    looks = [("A", [CLEAN]), ("B", [CLEAN]), ("C", [(2.0, True)]), ("D", [(3.0, True)]), ("E", [(4.0, True)])]
    seen = evidence(("control", CONTROL), OFF, *looks, ("control", [(48, True)]))
    assert step_name(seen) in ("A", "B")
    seen = seen.plus(ArmRun("A", 60, 60, 100))
    assert step_name(seen) == "B"
    # a rival that faults is no rival any more
    gone = seen.plus(*(ArmRun("B", 2, 60, 101 + n, signature=XID) for n in range(2)))
    assert judge(gone, ARMS, RULE)["B"].settled
    assert step_name(gone) == "A"


def test_what_was_cleared_is_put_back_and_nothing_else() -> None:
    faults = [(name, [(9.0, True), (12.0, True), (5.0, True)]) for name in "BCDE"]
    seen = evidence(("control", CONTROL * 3), OFF, *faults, ("control", CONTROL * 3), ("A", [CLEAN] * 14))
    seen = seen.plus(*(replace(run, order=run.order + 500) for run in evidence(("control", CONTROL)).runs))
    assert judge(seen, ARMS, RULE)["A"].word == "CLEARED"
    assert step_name(seen) == "back A"
    returned = seen.plus(ArmRun("back A", 3, 60, 900, signature=XID), ArmRun("back A", 7, 60, 901, signature=XID))
    step = next_step(returned, ARMS, RULE)
    assert (step.kind, step.why) == ("stop", "every arm is settled")


def test_an_arm_that_cannot_be_run_is_left_alone_and_a_void_control_stops() -> None:
    seen = evidence(("control", CONTROL), OFF, ("control", CONTROL[:1]))
    broken = [ArmRun("A", 0, 60, 50 + n, void="engine did not start") for n in range(MAX_VOIDS)]
    assert "A" not in {step_name(seen.plus(*broken), seed=seed) for seed in range(40)}
    assert "A" in {step_name(seen.plus(*broken[:-1]), seed=seed) for seed in range(40)}
    mended = replace(broken[-1], void="", exposure=60)
    looked = [ArmRun(name, 4, 60, 60 + n, signature=XID) for n, name in enumerate("BCDE")]
    controls = ArmRun("control", 48, 60, 70, signature=XID)
    assert step_name(seen.plus(*broken[:-1], mended, *looked, controls)) == "A"
    dead = [ArmRun("control", 0, 60, n, void="no GPU") for n in range(MAX_VOIDS)]
    step = next_step(Evidence(tuple(dead)), ARMS, RULE)
    assert step.kind == "stop"
    assert "no GPU" in step.why


def test_a_host_without_controls_of_its_own_runs_them_first() -> None:
    seen = Evidence(tuple(replace(run, stratum="a") for run in evidence(("control", CONTROL)).runs))
    assert step_name(seen, stratum="a") == "all off"
    assert step_name(seen, stratum="b") == "control"


GUILTY = {
    "one": ({"A"}, False, "single"), "AND": ({"A", "B"}, False, "both_needed"), "OR": ({"A", "B"}, True, "either"),
    "none": (set[str](), False, "not_in_list"),
}  # fmt: skip


@pytest.mark.parametrize("structure", GUILTY)
def test_whole_campaigns_find_what_is_there(structure: str) -> None:
    """Simulated: 1 fault in 8 turns, launches of 20; every campaign of these seeds has to end with the right words."""
    guilty, either, kind = GUILTY[structure]

    def ratio(arm: Arm) -> float:
        on = {"control": set("ABCDE"), "all_off": set(), "one": set("ABCDE") - set(arm.variables)}
        left = guilty & on.get(arm.role, set(arm.variables))
        return float(bool(left) if either or not guilty else left == guilty) if guilty else 1.0

    kinds: list[str] = []
    for seed in range(12):
        seen, order = play(ARMS, ratio, RULE, hazard=1 / 8, cap=20, seed=seed)
        verdicts = judge(seen, ARMS, RULE)
        cleared = {one.arm.name for one in verdicts.values() if one.word == "CLEARED" and one.arm.role == "one"}
        assert cleared == (set() if either else guilty)
        kinds.append(conclude(seen, verdicts, RULE).kind)
        assert len(order) < 150
    assert kinds.count(kind) >= 11
