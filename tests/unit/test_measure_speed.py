"""Faster, slower, the same, or not to be told: time to first token and decode apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from soakrig.reproducers.measure.speed import SpeedPlan, judge_speed

PLAN = SpeedPlan()


def turns(
    ttft: float = 1.0, decode: float = 1.0, *, noise: float = 0.02, launch: float = 0.0, blocks: int = 4, seed: int = 0
) -> list[dict[str, Any]]:
    """Pairs in which B takes ``ttft`` and ``decode`` times as long; ``launch``: spread of launches (log)."""
    rng = np.random.default_rng(seed)
    seen: list[dict[str, Any]] = []
    for block in range(1, blocks + 1):
        own = {side: rng.normal(0, launch) for side in "AB"}
        for prompt in range(12):
            size = rng.lognormal(0, 0.3)  # prompts differ by more than sides do
            for side in "AB":
                jitter = [math.exp(own[side] + rng.normal(0, noise)) for _ in range(2)]
                times = (ttft, decode) if side == "B" else (1.0, 1.0)
                seen.append({
                    "what": "turn", "side": side, "block": block, "prompt": prompt, "outcome": "ok", "why": "",
                    "ttft_s": 0.3 * size * jitter[0] * times[0], "decode_s": 0.02 * jitter[1] * times[1],
                    "cached_tokens": 0, "simulated": False,
                })  # fmt: skip
    return seen


def answers(seen: list[dict[str, Any]]) -> tuple[str, str, str]:
    found = judge_speed(seen, PLAN)
    return found["figures"]["ttft_s"]["answer"], found["figures"]["decode_s"]["answer"], found["verdict"]


def test_a_slower_prefill_is_no_slower_decode() -> None:
    assert answers(turns(ttft=1.2)) == ("slower", "same", "fail")
    assert answers(turns(decode=1.2)) == ("same", "slower", "fail")
    assert answers(turns(ttft=0.8)) == ("faster", "same", "pass")


def test_the_ratio_has_its_interval_and_kind() -> None:
    found = judge_speed(turns(ttft=1.2, launch=0.01), PLAN)["figures"]["ttft_s"]
    ratio = found["ratio"]
    assert ratio["low"] < 1.2 < ratio["high"]
    assert ratio["kind"] == "derived"
    assert found["A"]["kind"] == "measured"
    assert found["pairs"] == 48


def test_launches_that_differ_among_themselves_leave_it_open() -> None:
    """Twelve pairs of one launch are no twelve launches."""
    noisy = [answers(turns(launch=0.1, noise=0.005, seed=seed)) for seed in range(20)]
    wrong = [one for one in noisy if {"slower", "faster"} & set(one)]
    assert len(wrong) <= 4, "at 5 % a question"
    assert ("cannot tell", "cannot tell", "inconclusive") in noisy


def test_identical_sides_are_the_same_where_the_noise_allows_it() -> None:
    alarms = [answers(turns(seed=seed)) for seed in range(20)]
    assert sum(bool({"slower", "faster"} & set(one)) for one in alarms) <= 2
    assert answers(turns(noise=0.3)) == ("cannot tell", "cannot tell", "inconclusive")


def test_too_little_to_judge() -> None:
    assert answers(turns(ttft=2.0, blocks=1))[0] == "cannot tell", "one launch of each says nothing about launches"
    few = [one for one in turns(ttft=2.0) if one["prompt"] == 0]
    assert "at least 8 are needed" in judge_speed(few, PLAN)["figures"]["ttft_s"]["text"]
    assert judge_speed([], PLAN)["verdict"] == "inconclusive"


def test_turns_that_were_not_ok_are_left_out_and_said() -> None:
    seen = turns()
    seen[1] |= {"outcome": "truncated", "ttft_s": 99.0}
    found = judge_speed(seen, PLAN)
    assert found["left_out"] == 1
    assert found["verdict"] == "inconclusive"
    assert found["figures"]["ttft_s"]["pairs"] == 47
    assert "B truncated" in found["reasons"][-1]


@pytest.mark.parametrize(("side", "verdict"), [("A", "inconclusive"), ("B", "fail")])
def test_an_engine_that_dies(side: str, verdict: str) -> None:
    found = judge_speed([*turns(), {"what": "dead", "side": side, "block": 4, "why": "gone"}], PLAN)
    assert found["verdict"] == verdict
    assert found["reasons"][0].startswith(f"{side} died")


def test_warm_up_is_not_measured_and_cached_prompts_show() -> None:
    seen = turns()
    assert judge_speed([{**seen[0], "what": "warm-up", "ttft_s": 9.0}, *seen], PLAN)["turns"] == len(seen)
    assert judge_speed(seen, PLAN)["fresh"]
    assert not judge_speed([{**seen[0], "cached_tokens": 64}, *seen[1:]], PLAN)["fresh"]
