from __future__ import annotations

import pytest

from bisect_world import CONTROL, evidence, five_variables
from soakrig.bisect.conclusion import Conclusion, conclude
from soakrig.bisect.evidence import ArmRun
from soakrig.bisect.price import Pace, price
from soakrig.bisect.verdicts import Rule, judge
from soakrig.errors import UsageError

ARMS = five_variables(pairs=True)
RULE = Rule(arms=6)
LONG: list[tuple[float, bool]] = [(60, False)] * 20
SHORT: list[tuple[float, bool]] = [(60, False)] * 3
BAD: list[tuple[float, bool]] = [(9, True), (3, True), (12, True)]


def concluded(control: list[tuple[float, bool]] | None = None, **arms: list[tuple[float, bool]]) -> Conclusion:
    """Arms by name, ``_`` for a blank; the control before and after all of them."""
    parts = [(name.replace("_", " "), lengths) for name, lengths in arms.items()]
    seen = evidence(("control", CONTROL * 2 if control is None else control), *parts)
    return conclude(seen, judge(seen, ARMS, RULE), RULE)


OTHERS = {"B": BAD, "C": BAD, "D": BAD, "E": BAD}


@pytest.mark.parametrize(
    ("arms", "kind", "variables", "says"),
    [
        ({"all_off": LONG, "A": LONG, **OTHERS, "back_A": BAD}, "single", ("A",), "needed, and enough for it"),
        ({"all_off": LONG, "A": LONG, **OTHERS, "back_A": SHORT}, "necessary", ("A",), "needs a partner"),
        ({"all_off": LONG, "A": LONG, **OTHERS}, "necessary", ("A",), "was not tried"),
        ({"all_off": LONG, **OTHERS, "A": LONG, "B": LONG, "back_A": SHORT}, "both_needed", ("A", "B"),
         "Each is needed"),
        ({"all_off": LONG, **OTHERS, "A": LONG, "B": LONG, "back_A": BAD}, "unclear", ("A", "B"), "only hides"),
        ({"all_off": BAD + BAD}, "not_in_list", (), "not in the list"),
        ({"all_off": LONG, "A": BAD, **OTHERS, "back_A": BAD, "back_B": BAD, "back_C": SHORT}, "either", ("A", "B"),
         "causes of their own"),
        ({"all_off": LONG, "A": BAD, **OTHERS, "back_A": BAD, "back_B": BAD}, "unclear", ("A", "B"), "all off should"),
        ({"all_off": LONG, "A": BAD, **OTHERS, "back_A": SHORT, "A_and_B": BAD}, "pair", ("A", "B"), "with all off"),
        ({"all_off": LONG, "A": BAD, **OTHERS}, "unclear", (), "try pairs"),
        ({"all_off": SHORT, "A": BAD, **OTHERS, "back_A": BAD, "back_B": BAD, "back_C": SHORT}, "unclear", (),
         "not yet enough"),
        ({"A": BAD, **OTHERS}, "none", (), "needs the all-off arm"),
        ({"all_off": LONG, "A": SHORT, **OTHERS}, "undecided", (), "1 of 5 variables"),
        ({"all_off": LONG, "A": [*LONG, (40, True), *LONG], **OTHERS}, "reduced", ("A",), "still comes"),
    ],
)  # fmt: skip
def test_arms_together(
    arms: dict[str, list[tuple[float, bool]]], kind: str, variables: tuple[str, ...], says: str
) -> None:
    found = concluded(**arms)
    assert (found.kind, found.variables) == (kind, variables)
    assert says in found.text
    assert "fixed" not in found.text + " ".join(found.not_said)


def test_without_a_baseline_it_says_so() -> None:
    found = concluded(control=[(4, True), (9, True)], A=LONG)
    assert found.kind == "no_baseline"
    assert "faulted 2 times" in found.text


def test_what_is_not_said() -> None:
    found = concluded(all_off=SHORT, A=LONG, **OTHERS, back_A=BAD)
    said = " ".join(found.not_said)
    assert "another load" in said
    assert "Not that the fault is gone" in said
    assert "clean so far is not cleared" in said
    assert "stood still" not in said


def test_a_control_that_changed_is_told() -> None:
    fast: list[tuple[float, bool]] = [(5, True), (3, True), (8, True), (4, True), (6, True)]
    drifting = [*fast, (60.0, False), (60.0, False), (60.0, False), (60.0, False), (50.0, True)]
    found = concluded(control=drifting, A=SHORT)
    assert any("stood still" in one for one in found.not_said)


def test_a_void_arm_is_told() -> None:
    seen = evidence(("control", CONTROL)).plus(ArmRun("A", 0, 60, 70, void="unknown variable"))
    found = conclude(seen, judge(seen, ARMS, RULE), RULE)
    assert "Nothing of A: no run of it counts." in found.not_said


def test_the_price_grows_with_what_is_asked() -> None:
    pace = Pace(hazard=1 / 33, cap=60, turn_s=10, launch_s=240)
    base = price(8, Rule(arms=9), pace)
    assert price(8, Rule(arms=9, confidence=0.999), pace).hours > base.hours
    assert price(8, Rule(arms=9, at_least=4), pace).hours > 1.3 * base.hours
    assert price(3, Rule(arms=4), pace).hours < base.hours
    assert price(8, Rule(arms=9), Pace(1 / 100, 60, 10, 240)).hours > 2 * base.hours
    assert base.hours_90 > base.hours
    assert base.turns_90 > base.turns


def test_the_price_is_what_simulated_campaigns_cost() -> None:
    """Means of benchmarks/bisect_power.py, eight variables: 8.8 h with one culprit, 1.1 h with none."""
    pace = Pace(hazard=1 / 33, cap=60, turn_s=10, launch_s=240)
    assert price(8, Rule(arms=9), pace).hours == pytest.approx(8.8, rel=0.15)
    assert price(8, Rule(arms=9), pace, culprit=False).hours == pytest.approx(1.1, rel=0.15)
    assert price(8, Rule(arms=9), pace) == price(8, Rule(arms=9), pace)


def test_a_fault_in_the_first_turns_is_cheap() -> None:
    short = price(5, Rule(arms=6), Pace(hazard=1 / 8, cap=20, turn_s=0.5, launch_s=8))
    assert short.hours * 60 < 15


@pytest.mark.parametrize(("hazard", "cap", "turn_s"), [(0.0, 60, 1.0), (1.0, 60, 1.0), (0.1, 0, 1.0), (0.1, 60, -1.0)])
def test_a_pace_without_sense_is_refused(hazard: float, cap: int, turn_s: float) -> None:
    with pytest.raises(UsageError, match="expected a chance"):
        Pace(hazard, cap, turn_s, 10.0)
