"""What more hours would buy: nothing is promised that was not measured, and a fault is worth more than an hour."""

from __future__ import annotations

import re

import pytest

from bisect_world import CONTROL, evidence
from soakrig.bisect.evidence import Arm, ArmRun, Evidence
from soakrig.bisect.outlook import outlook
from soakrig.bisect.statistics import clean_exposure
from soakrig.bisect.verdicts import Rule, judge

ARMS = [Arm("control", "control"), Arm("all off", "all_off", ("A", "B")), Arm("A", "one", ("A",)),
        Arm("B", "one", ("B",)), Arm("back A", "add_back", ("A",))]  # fmt: skip
RULE = Rule(arms=3)


def told(seen: Evidence, seconds: float = 3600.0, unit: str = "turns", rule: Rule = RULE) -> tuple[str, ...]:
    return outlook(seen, judge(seen, ARMS, rule), rule, seconds, unit)


def test_nothing_was_measured() -> None:
    assert told(Evidence(())) == ()
    assert told(evidence(("control", CONTROL)), seconds=0.0) == ()
    assert told(evidence(("A", [(60, False)]))) == (), "no control to say anything by"


def test_a_control_without_the_fault_needs_another_load_rather_than_hours() -> None:
    (text,) = told(evidence(("control", [(60, False), (60, False)])))
    assert text.startswith("The control did 120 turns without the fault: at 97.5 %, its hazard is at most 0.031 a unit")
    assert "load that provokes it" in text
    (text,) = told(evidence(("control", [(60, False)])), unit="output_tokens")
    assert "60 output tokens" in text


def test_a_control_with_too_few_faults_needs_so_many_more_turns_at_the_pace_so_far() -> None:
    """One fault in 80 turns; three are needed: 160 more, at 3600 s for the 100 turns of all arms."""
    seen = evidence(("control", [(20, True), (60, False)]), ("A", [(20, False)]))
    assert told(seen) == ("The control needs some 160 more turns, about 1.6 h at the pace so far.",)
    (text,) = told(seen, rule=Rule(arms=3, min_control_faults=2))
    assert text.startswith("The control needs some 80 more turns, about 0.8 h ")


def test_as_many_faults_as_are_asked_for_are_enough_of_the_control() -> None:
    seen = evidence(("control", [(20, True)] * 3), ("A", [(20, False)]))
    assert [text.partition(":")[0] for text in told(seen)] == ["A", "B"]


def test_an_arm_of_which_every_launch_was_void_is_open() -> None:
    seen = evidence(("control", CONTROL))
    seen = seen.plus(*(ArmRun("A", 0.0, 60, 10 + n, void="made up") for n in range(3)))
    assert judge(seen, ARMS, RULE)["A"].word == "VOID"
    assert [text.partition(":")[0] for text in told(seen)] == ["A", "B"]


def test_an_open_arm_needs_what_is_left_of_the_clean_work_that_would_clear_it() -> None:
    seen = evidence(("control", CONTROL), ("A", [(60, False)]), ("B", [(7, True)]))
    mean = 181 / 5
    needed = clean_exposure(RULE.level(0), at_least=2.0, control_faults=5) * mean
    (text,) = told(seen)
    found = re.match(r"A: some (\d+) more clean turns, about ([\d.]+) h at the pace so far, would clear it", text)
    assert found is not None, text
    assert int(found[1]) == pytest.approx(needed - 60, abs=0.5)
    assert float(found[2]) == pytest.approx((needed - 60) / (181 + 67), rel=0.05)
    assert "to at least 2 times; a fault would settle it sooner" in text


def test_an_arm_that_nearly_has_it_needs_one_mean_time_between_faults_at_least() -> None:
    clean: list[tuple[float, bool]] = [(60, False)] * 60
    seen = evidence(("control", CONTROL), ("A", clean))
    verdicts = judge(seen, ARMS, RULE)
    cleared = {**verdicts, "A": verdicts["A"]}
    assert verdicts["A"].word == "CLEARED"
    assert all(not text.startswith("A:") for text in outlook(seen, cleared, RULE, 3600.0, "turns"))
    many = evidence(("control", CONTROL), ("A", [*[(60.0, False)] * 14, (40.0, False)]))
    again = judge(many, ARMS, Rule(arms=3, confidence=0.9999999))
    assert again["A"].word == "UNDECIDED"
    needed = clean_exposure(Rule(arms=3).level(0), at_least=2.0, control_faults=5) * 181 / 5
    text = next(one for one in outlook(many, again, RULE, 3600.0, "turns") if one.startswith("A:"))
    assert 0 < needed - (14 * 60 + 40) < 181 / 5
    assert f"some {181 / 5:.0f} more" in text, "so long until the next fault, were nothing changed"


def test_only_single_variables_that_are_open_and_had_no_fault_are_worth_hours() -> None:
    seen = evidence(("control", CONTROL), ("all off", [(60, False)]), ("A", [(3, True)]), ("back A", [(60, False)]))
    assert told(seen) == tuple(text for text in told(seen) if text.startswith("B: some "))
    assert len(told(seen)) == 1, "B was not run yet"
