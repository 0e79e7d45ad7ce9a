from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import f

from bisect_world import CONTROL, XID, evidence, words
from soakrig.bisect.evidence import Arm, ArmRun, Evidence
from soakrig.bisect.posterior import Prior, ratio_posteriors
from soakrig.bisect.statistics import chance_of_so_few, chance_of_so_few_crashes
from soakrig.bisect.verdicts import Rule, judge, word_by_runs
from soakrig.errors import UsageError

PUBLISHED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "fixtures" / "bisect" / "published.json").read_text()
)
ARMS = [Arm("control", "control"), Arm("A", "one", ("A",))]
CLEAN = (60.0, False)
PUBLISHED_RULE = Rule(arms=1, at_least=1.0)
"""What the published counts were held against: any reduction, one arm, 1 %."""


def judged(arm: list[tuple[float, bool]], control: list[tuple[float, bool]] = CONTROL, rule: Rule | None = None) -> Any:
    return judge(evidence(("control", control), ("A", arm)), ARMS, rule or Rule())["A"]


def test_one_fault_is_faults_at_once() -> None:
    one = judged([CLEAN, (12, True)])
    assert (one.word, one.claim, one.faults, one.runs, one.exposure) == ("FAULTS", "FAULTS", 1, 2, 72)
    assert judged([(12, True)], control=[]).word == "FAULTS"  # no statistics needed


def test_a_quiet_soak_is_undecided() -> None:
    one = judged([CLEAN] * 2)
    assert one.word == "UNDECIDED"
    assert one.p is not None
    assert one.p > 0.01
    assert "is asked for" in one.why


def test_cleared_says_to_what_factor_and_never_rounds_it_up() -> None:
    one = judged([CLEAN] * 40)
    assert one.word == "CLEARED"
    assert chance_of_so_few(one.cells, 1 / one.factor) == pytest.approx(Rule().level(0), rel=1e-6)
    shown = float(one.claim.removeprefix("CLEARED to at least ").removesuffix(" times"))
    assert 2.0 <= shown <= one.factor < shown + 0.1
    assert one.ratio.low == one.ratio.estimate == 0.0
    assert one.settled
    fewer = next(n for n in range(1, 40) if judged([CLEAN] * n).word == "CLEARED")
    assert judged([CLEAN] * (fewer - 1)).word == "UNDECIDED"
    assert chance_of_so_few(judged([CLEAN] * fewer).cells, 0.5) <= Rule().level(0)
    assert chance_of_so_few(judged([CLEAN] * (fewer - 1)).cells, 0.5) > Rule().level(0)


def test_below_three_faults_of_the_control_no_clean_arm_is_judged() -> None:
    two = [(2.0, True), (24.0, True)]
    one = judged([CLEAN] * 500, control=two, rule=PUBLISHED_RULE)
    assert (one.word, one.p, one.ratio, one.factor) == ("UNDECIDED", None, None, None)
    assert "the control has 2 faults" in one.why
    assert judged([CLEAN] * 500, control=[*two, (9.0, True)], rule=PUBLISHED_RULE).word == "CLEARED"


def test_controls_of_another_host_do_not_add_up_to_three() -> None:
    seen = Evidence(
        (
            *(ArmRun("control", 9, 60, n, signature=XID, stratum="a") for n in range(2)),
            *(ArmRun("control", 9, 60, 10 + n, signature=XID, stratum="b") for n in range(2)),
            *(ArmRun("A", 60, 60, 20 + n, stratum="ab"[n % 2]) for n in range(400)),
        )
    )
    assert words(seen, ARMS, PUBLISHED_RULE)["A"] == "UNDECIDED"


def test_reduced_has_its_ratio_and_interval() -> None:
    control = CONTROL * 4
    one = judged([CLEAN] * 20 + [(40, True)] + [CLEAN] * 20, control=control)
    assert one.word == "REDUCED"
    assert 0 < one.ratio.low < one.ratio.estimate < one.ratio.high < 1
    assert one.claim.startswith("REDUCED to 0.0")
    assert judged([CLEAN] * 3 + [(40, True)], control=control).word == "FAULTS"


def test_an_arm_that_never_took_effect_is_void() -> None:
    seen = evidence(("control", CONTROL)).plus(ArmRun("A", 1, 60, 30, signature=XID, void="unknown variable"))
    one = judge(seen, ARMS, Rule())["A"]
    assert (one.word, one.runs, one.void) == ("VOID", 0, 1)
    assert "unknown variable" in one.why
    assert words(evidence(("control", CONTROL)), ARMS, Rule())["A"] == "UNDECIDED"


def test_the_error_is_split_over_arms_and_over_looks() -> None:
    rule = Rule(confidence=0.99, arms=8)
    assert sum(rule.level(faults) for faults in range(60)) * 8 == pytest.approx(0.01)
    n = next(n for n in range(1, 60) if judged([CLEAN] * n).word == "CLEARED")
    assert judged([CLEAN] * n, rule=rule).word == "UNDECIDED"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 30), st.integers(1, 10))
def test_more_clean_work_never_weakens_a_clean_arm(n: int, more: int) -> None:
    ps = [judged([CLEAN] * k).p or 1.0 for k in (n, n + more)]
    assert ps[1] <= ps[0]


@pytest.mark.parametrize("wrong", [{"confidence": 1.0}, {"arms": 0}, {"at_least": 0.5}, {"min_control_faults": 1}])
def test_a_rule_without_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Rule(**wrong)


def exposures(case: dict[str, Any], arm: dict[str, Any]) -> Evidence:
    """Published lengths as runs; an unknown length of a fault counts as one unit."""
    found: list[ArmRun] = []
    sides = (("control", case["control"], ""), (arm["name"], arm, arm.get("void", "")))
    for name, side, void in sides:
        for length in side.get("faults_at", []):
            found.append(ArmRun(name, length or 1, 1e6, len(found), signature=XID, void=void))
        for length in side.get("clean", []):
            found.append(ArmRun(name, length, 1e6, len(found)))
    return Evidence(tuple(found), clock_kind="counted")


@pytest.mark.parametrize(
    ("case", "arm"),
    [pytest.param(case, arm, id=f"{case['id']}: {arm['name']}") for case in PUBLISHED for arm in case["arms"]],
)
def test_published_arms_get_the_word_that_their_counts_bore(case: dict[str, Any], arm: dict[str, Any]) -> None:
    control = case["control"]
    if "p_runs" in arm:
        counts = (control["runs"], control["crashed"], arm["runs"], arm["crashed"])
        assert chance_of_so_few_crashes(*counts) == pytest.approx(arm["p_runs"], abs=5e-5)
        assert word_by_runs(*counts, PUBLISHED_RULE) == arm["says"]
    if "p_runs" in arm and "p" not in arm:
        return
    seen = exposures(case, arm)
    one = judge(seen, [ARMS[0], Arm(arm["name"], "one", (arm["name"],))], PUBLISHED_RULE)[arm["name"]]
    assert one.word == arm["says"]
    if "p" in arm:
        assert chance_of_so_few(seen.cells(arm["name"])) == pytest.approx(arm["p"], abs=5e-5)


def test_no_published_claim_that_fell_later_is_endorsed() -> None:
    fell = [case for case in PUBLISHED if case["contradicted"]]
    assert len(PUBLISHED) == 15
    assert len(fell) == 5
    assert {arm["says"] for case in fell for arm in case["arms"]} <= {"FAULTS", "UNDECIDED"}
    endorsed = {case["id"] for case in PUBLISHED for arm in case["arms"] if arm["says"] == "CLEARED"}
    assert endorsed == {"llama-26119", "vllm-51599"}


def test_one_fault_of_an_operator_judges_nothing() -> None:
    seen = Evidence((ArmRun("control", 33, 60, 0, signature=XID), *(ArmRun("A", 60, 60, n) for n in range(1, 90))))
    assert judge(seen, ARMS, PUBLISHED_RULE)["A"].word == "UNDECIDED"


def test_the_posterior_is_bayes_rule_on_a_fine_grid() -> None:
    """One arm, one host, against adaptive integration over the ratio; the hazard integrates in closed form."""
    prior = Prior(none=0.5, immune=0.2)
    control_faults, control_exposure, faults, exposure = 5, 165.0, 1, 200.0

    def likelihood(ratio: float) -> float:
        return ratio**faults * (control_exposure + ratio * exposure) ** -(control_faults + faults) * 1e14

    def mass(low: float, high: float) -> float:
        # even on the logarithm between 1/64 and 4
        return quad(lambda x: likelihood(np.exp(x)) / np.log(256), np.log(low), np.log(high))[0]

    whole = 0.5 * likelihood(1.0) + 0.2 * likelihood(0.0) + 0.3 * mass(1 / 64, 4)
    found = ratio_posteriors({"": (control_faults, control_exposure)}, {"A": {"": (faults, exposure)}}, prior=prior)[
        "A"
    ]
    for factor in (2.0, 5.0):
        assert found.at_least(factor) == pytest.approx(0.3 * mass(1 / 64, 1 / factor) / whole, abs=0.02)


def test_the_posterior_beside_two_gammas() -> None:
    # 0 faults in 300 turns beside 5 in 165: published as 0.93 for a fifth, from two Jeffreys priors
    published = f.cdf(0.2 * 300 / 165 * 5.5 / 0.5, 1, 11)
    assert published == pytest.approx(0.93, abs=0.005)
    found = ratio_posteriors({"": (5, 165.0)}, {"A": {"": (0, 300.0)}}, prior=Prior(none=0.0, immune=0.0))["A"]
    assert found.at_least(5) == pytest.approx(published, abs=0.01)


def test_faults_of_one_arm_sharpen_the_others() -> None:
    alone = ratio_posteriors({"": (3, 3.0)}, {"A": {"": (0, 6.0)}})["A"]
    beside = ratio_posteriors({"": (3, 3.0)}, {"A": {"": (0, 6.0)}, "B": {"": (6, 6.0)}, "C": {"": (7, 6.0)}})["A"]
    assert beside.at_least(2) > alone.at_least(2)
    assert ratio_posteriors({"": (3, 3.0)}, {}) == {}


def test_two_hosts_say_more_than_one() -> None:
    one = ratio_posteriors({"a": (4, 4.0)}, {"A": {"a": (0, 5.0)}})["A"].at_least(5)
    two = ratio_posteriors({"a": (4, 4.0), "b": (4, 90.0)}, {"A": {"a": (0, 5.0), "b": (0, 112.5)}})["A"].at_least(5)
    assert two > one


def test_a_fault_on_a_host_without_enough_controls_is_not_overlooked() -> None:
    control = evidence(("control", CONTROL * 3)).runs
    here = [ArmRun("A", 60, 60, 100 + n) for n in range(40)]
    here[5] = ArmRun("A", 40, 60, 105, signature=XID)
    seen = Evidence((*control, *here, ArmRun("control", 60, 60, 200, stratum="b")))
    assert words(seen, ARMS, Rule())["A"] == "REDUCED"
    there = ArmRun("A", 5, 60, 201, signature=XID, stratum="b")
    assert words(seen.plus(there), ARMS, Rule())["A"] == "FAULTS"


def test_late_faults_of_the_control_do_not_make_a_baseline_for_short_runs() -> None:
    control = [ArmRun("control", length, 60, n, signature=XID) for n, length in enumerate((9, 50, 55, 58))]
    one = judge(Evidence((*control, *(ArmRun("A", 20, 20, 10 + n) for n in range(90)))), ARMS, PUBLISHED_RULE)["A"]
    assert (one.word, one.p) == ("UNDECIDED", None)
    assert "has 1 faults in as long runs" in one.why


def test_two_crashes_are_no_baseline_either() -> None:
    assert word_by_runs(2, 2, 200, 0, PUBLISHED_RULE) == "UNDECIDED"
    assert word_by_runs(3, 3, 200, 0, PUBLISHED_RULE) == "CLEARED"
