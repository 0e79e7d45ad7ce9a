"""Whether a change drifts more than its control: found where it does, and no alarm where it does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soakrig.reproducers.measure.drift_judge import Drifts, compare, far_of
from soakrig.reproducers.measure.equivalence import EquivalencePlan, judge_equivalence
from soakrig.reproducers.measure.scoring import Top, drift, same_first

PROMPTS, PLACES, CUTS = 24, 600, 48


def like_rounding(seed: int, places: int, scale: float = 1e-3, df: float = 1.5) -> Drifts:
    """Drift as measured in bfloat16: most places none, prompts of their own scale, rare large jumps."""
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    for _ in range(PROMPTS):
        values = np.abs(rng.standard_t(df, places)) * scale * rng.lognormal(0, 0.5)
        values[rng.random(places) < 0.85] = 0.0
        found.append(values)
    return Drifts(found, int(rng.binomial(PROMPTS * places, 0.005)))


def worse(change: Drifts, control: Drifts) -> set[str]:
    return {question.name for question in compare(change, control).worse}


@pytest.mark.parametrize("df", [1.5, 30.0])
def test_no_alarm_where_the_change_drifts_as_the_control_does(df: float) -> None:
    alarms = [worse(like_rounding(seed, PLACES, df=df), like_rounding(1000 + seed, CUTS, df=df)) for seed in range(30)]
    assert sum(map(bool, alarms)) <= 1, alarms


def test_more_drift_everywhere_is_found_with_its_ratio() -> None:
    control, change = like_rounding(1, CUTS), like_rounding(2, PLACES, scale=4e-3)
    found = compare(change, control)
    assert "level" in {question.name for question in found.worse}
    low, estimate, high = found.ratio
    assert 1.5 < low < estimate < high < 6


def test_one_prompt_that_is_wrong_throughout_is_found() -> None:
    change = like_rounding(3, PLACES)
    change.by_prompt[7][:] = 0.3
    found = worse(change, like_rounding(4, CUTS))
    assert "prompt" in found
    assert "level" not in found


def test_one_place_beyond_a_light_tail_is_found_and_not_beyond_a_heavy_one() -> None:
    light = Drifts([np.abs(np.random.default_rng(n).normal(0, 1e-6, CUTS)) for n in range(PROMPTS)])
    change = Drifts([np.abs(np.random.default_rng(100 + n).normal(0, 1e-6, PLACES)) for n in range(PROMPTS)])
    assert worse(change, light) == set()
    change.by_prompt[3][10] = 1e-2
    assert worse(change, light) == {"tail"}
    heavy = like_rounding(5, PLACES)
    heavy.by_prompt[3][10] = 0.3  # a router's choice that was close makes such jumps
    assert worse(heavy, like_rounding(6, CUTS)) == set()


def test_first_choices_are_compared() -> None:
    control, change = like_rounding(7, CUTS), like_rounding(8, PLACES)
    assert worse(Drifts(change.by_prompt, 1500), control) == {"first choice"}


def test_a_control_that_repeats_itself_to_the_bit_tolerates_nothing() -> None:
    nothing = Drifts([np.zeros(CUTS)] * PROMPTS)
    assert worse(Drifts([np.zeros(PLACES)] * PROMPTS), nothing) == set()
    change = [np.zeros(PLACES) for _ in range(PROMPTS)]
    change[0][0] = 1e-9
    assert worse(Drifts(change), nothing) == {"bits"}


def test_a_number_that_is_none_is_worse_than_any_drift() -> None:
    change = like_rounding(9, PLACES)
    change.by_prompt[0][0] = math.inf
    assert worse(change, like_rounding(10, CUTS)) == {"finite"}
    control = like_rounding(10, CUTS)
    control.by_prompt[0][0] = math.inf
    assert compare(like_rounding(9, PLACES), control).notes


def test_far_is_what_one_place_in_a_hundred_exceeds() -> None:
    assert far_of(np.arange(1.0, 1001.0)) == pytest.approx(990.01)
    assert far_of(np.array([0.0] * 999 + [5.0])) == 5.0


# -- distance of two lists ---------------------------------------------------------------------------------------------


def top(**values: float) -> Top:
    return Top(values, min(values.values()), max(values, key=lambda one: values[one]))


def test_drift_of_two_lists() -> None:
    one = top(a=-1.0, b=-2.0, c=-3.0)
    assert drift(one, one) == 0.0
    assert drift(one, top(a=-1.5, b=-2.0, c=-3.0)) == pytest.approx(0.5 / 3)
    assert drift(one, top(a=-1.0, b=-2.0, d=-3.0)) == 0.0, "the last place of a list may be anybody's"
    assert drift(one, top(d=-1.0, b=-2.0, c=-3.0)) == pytest.approx(4.0 / 4), "a and d: at least 2 each"
    longer = Top({"a": -1.0, "b": -2.0, "c": -3.0, "z": -8.0}, -8.0, "a")
    assert drift(one, longer) == 0.0, "z is below what one could have listed"
    short = Top({"a": -1.0}, -3.0, "a")
    assert drift(one, short) == pytest.approx(1.0 / 3), "b is not listed there, and has at most -3"
    assert math.isnan(drift(Top({}, -1.0, ""), Top({}, -1.0, "")))
    assert drift(one, Top({}, -1.0, "")) == math.inf
    assert drift(one, top(a=math.nan, b=-2.0)) == math.inf
    assert same_first(one, top(a=-2.0, b=-2.5))
    assert not same_first(one, top(a=-2.0, b=-1.5))
    assert same_first(one, Top({"b": -1.0}, -3.0, "")), "a part of a character cannot be told apart"


VALUES = st.dictionaries(st.sampled_from("abcdefg"), st.floats(-20, 0), min_size=1, max_size=5)


@given(VALUES, VALUES)
def test_drift_is_symmetrical_and_never_negative(one: dict[str, float], other: dict[str, float]) -> None:
    a, b = top(**one), top(**other)
    assert drift(a, b) == pytest.approx(drift(b, a))
    assert drift(a, b) >= 0.0
    assert drift(a, a) == 0.0


# -- the verdict from observations -------------------------------------------------------------------------------------


def observations(change: Drifts, control: Drifts, again: bool = True) -> list[dict]:
    seen: list[dict] = [{"what": "launch", "side": "A", "launch": 1, "simulated": False}]
    for prompt in range(PROMPTS):
        cached = control.by_prompt[prompt].tolist()
        seen.append({"what": "cached", "prompt": prompt, "drift": cached, "differ": 0, "hits": CUTS, "told": CUTS})
        seen.append({"what": "change", "prompt": prompt, "drift": change.by_prompt[prompt].tolist(), "differ": 0})
        if again:
            seen.append({"what": "again", "prompt": prompt, "drift": [0.0] * PLACES, "differ": 0})
    return seen


def test_verdicts_against_the_cached_drift() -> None:
    plan = EquivalencePlan(basis="cached")
    control = like_rounding(11, CUTS)
    passed = judge_equivalence(observations(like_rounding(12, PLACES), control), plan)
    assert (passed["verdict"], passed["exit_code"]) == ("pass", 0)
    assert "B does not compute the same" in passed["notes"][0]
    assert passed["change"]["kind"] == "measured"
    assert passed["ratio"]["kind"] == "derived"
    assert "greedy" in str(passed["not_evidence"])
    failed = judge_equivalence(observations(like_rounding(13, PLACES, scale=1e-2), control), plan)
    assert (failed["verdict"], failed["exit_code"], failed["size"]) == ("fail", 1, "above")
    few = judge_equivalence(observations(like_rounding(12, PLACES), control)[:10], plan)
    assert few["verdict"] == "inconclusive"
    wide = judge_equivalence(
        observations(like_rounding(12, PLACES), control), EquivalencePlan(basis="cached", precision=1.01)
    )
    assert wide["verdict"] == "inconclusive"


def test_verdicts_against_another_launch_of_the_control() -> None:
    control, change = like_rounding(11, CUTS), like_rounding(12, PLACES)
    plan = EquivalencePlan(basis="again")
    strict = judge_equivalence(observations(change, control), plan)
    assert strict["verdict"] == "fail"
    assert "repeats itself to the bit" in strict["reasons"][0]
    once = judge_equivalence(observations(change, control, again=False), plan)
    assert once["verdict"] == "inconclusive"


def test_a_control_that_repeats_itself_makes_any_difference_one_and_tells_its_size() -> None:
    control, plan = like_rounding(11, CUTS, df=30.0), EquivalencePlan()
    same = judge_equivalence(observations(Drifts([np.zeros(PLACES)] * PROMPTS), control), plan)
    assert (same["verdict"], same["equal_bits"], same["size"]) == ("pass", True, None)
    for scale, size in ((1e-5, "below"), (1e-3, "like"), (1e-1, "above")):
        seen = observations(like_rounding(12, PLACES, scale=scale, df=30.0), control)
        found = judge_equivalence(seen, plan)
        assert (found["verdict"], found["size"]) == ("fail", size)
        assert ("--against cached" in found["reasons"][-1]) == (size != "above")
    one = [np.zeros(PLACES) for _ in range(PROMPTS)]
    one[3][5] = 1e-9
    seen = observations(Drifts(one), control)
    assert judge_equivalence(seen, plan)["reasons"][0].startswith(f"1 of {PROMPTS * PLACES} places differ")
    seen.append({"what": "again_b", "prompt": 0, "drift": [0.0, 0.1], "differ": 0})
    assert "B does not even repeat itself: 1 of 2" in judge_equivalence(seen, plan)["reasons"][1]


def test_a_control_that_does_not_repeat_itself_is_measured_by_its_cached_drift() -> None:
    control = like_rounding(11, CUTS)
    for scale, verdict in ((1e-3, "pass"), (1e-2, "fail")):
        seen = observations(like_rounding(12, PLACES, scale=scale), control)
        for one in seen:
            if one["what"] == "again":
                one["drift"] = [1e-4, *one["drift"][1:]]
        assert judge_equivalence(seen, EquivalencePlan())["verdict"] == verdict
    unknown = judge_equivalence(observations(like_rounding(12, PLACES), control, again=False), EquivalencePlan())
    assert unknown["verdict"] == "inconclusive"
    assert "use --launches 2" in unknown["reasons"][0]


@pytest.mark.parametrize(("side", "verdict"), [("A", "inconclusive"), ("B", "fail")])
def test_an_engine_that_dies_is_a_finding_of_its_side(side: str, verdict: str) -> None:
    dead = {"what": "dead", "side": side, "launch": 1, "why": "gone"}
    found = judge_equivalence([dead], EquivalencePlan())
    assert found["verdict"] == verdict
    assert found["reasons"] == [f"{side} died or did not start: gone"]


def test_places_that_came_from_no_cache_are_said_to() -> None:
    seen = observations(like_rounding(12, PLACES), like_rounding(11, CUTS))
    for one in seen:
        one.pop("hits", None)
    assert "prefix caching is off?" in " ".join(judge_equivalence(seen, EquivalencePlan())["notes"])
    seen[2]["not_fresh"] = 1
    assert "not fresh" in " ".join(judge_equivalence(seen, EquivalencePlan())["notes"])
