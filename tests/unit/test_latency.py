"""Latency of ok turns, and the gates that compare it: which figure, which end, and what equality means."""

from __future__ import annotations

from typing import Any

import pytest

from builders import T0, alive, done, ended, judged, kernel_live, sent, turns
from soakrig.record.events import Event, ToolLagged
from soakrig.record.gates import FIGURES, parse_gate
from soakrig.record.latency import LatencyCount, decode_rate
from soakrig.record.result import Latency, Result

SCALE = range(1, 12)  # eleven values: the 10th, 50th and 90th percentiles are the 2nd, 6th and 10th


def latency_of(*events: Event, wall_s: float = 10.0) -> Latency:
    count = LatencyCount()
    for event in events:
        if event.kind == "turn":
            count.add(event)
    return count.latency(wall_s)


@pytest.mark.parametrize(
    ("sources", "counted"),
    [
        (["usage", "usage"], "usage"),
        (["deltas", "deltas"], "deltas"),
        (["usage", "deltas"], "mixed"),
        (["deltas", "usage", "usage"], "mixed"),
        ([], "none"),
    ],
)
def test_where_token_counts_come_from_is_said(sources: list[str], counted: str) -> None:
    events = [done(n, T0 + n, counted=source) for n, source in enumerate(sources, 1)]
    assert latency_of(*events).counted == counted
    bad = done(9, T0 + 9, "truncated", counted="deltas")
    assert latency_of(*events, bad).counted == counted, "turns that are not ok have no say"


def test_percentiles_are_the_right_ends() -> None:
    events = [
        done(n, T0 + n, ttft_s=n / 10, first_answer_s=n / 5, last_token_s=n / 10 + 10 / (7 * n), output_tokens=11)
        for n in SCALE
    ]
    found = latency_of(*events)  # decode rates of 7, 14 ... 77 tokens a second
    assert found.decode_tokens_per_s.model_dump() == pytest.approx({"p10": 14.0, "p50": 42.0, "p90": 70.0})
    assert found.ttft_s.model_dump() == pytest.approx({"p50": 0.6, "p90": 1.0, "p99": 1.09})
    assert found.first_answer_s.model_dump() == pytest.approx({"p50": 1.2, "p90": 2.0, "p99": 2.18})


@pytest.mark.parametrize(
    ("fields", "rate"),
    [
        ({"ttft_s": 1.0, "last_token_s": 3.0, "output_tokens": 11}, 5.0),
        ({"ttft_s": 1.0, "last_token_s": 3.0, "output_tokens": 2}, 0.5),
        ({"ttft_s": 1.0, "last_token_s": 3.0, "output_tokens": 1}, None),
        ({"ttft_s": 1.0, "last_token_s": 1.0, "output_tokens": 11}, None),
        ({"ttft_s": None, "last_token_s": 3.0}, None),
        ({"ttft_s": 1.0, "last_token_s": None}, None),
    ],
)
def test_decode_is_the_tokens_after_the_first_over_their_time(fields: dict[str, Any], rate: float | None) -> None:
    event = done(1, T0, **fields)
    assert decode_rate(event) == rate
    assert latency_of(event).decode_tokens_per_s.p50 == rate


def test_figures_that_a_turn_lacks_are_left_out_one_by_one() -> None:
    found = latency_of(done(1, T0, ttft_s=None), done(2, T0, first_answer_s=None, ttft_s=0.3), done(3, T0, "hung"))
    assert found.ttft_s.p50 == 0.3
    assert found.first_answer_s.p50 == 0.5
    assert (found.turns, found.left_out) == (2, 1)


def run(*events: Event, **fields: Any) -> Result:
    return judged(kernel_live(), *events, alive(), ended(), **fields).result()


def test_throughput_is_tokens_of_ok_turns_from_the_first_request_to_the_last_end() -> None:
    at = T0 + 100.0
    result = run(*turns(1, 3, at), turns=3)
    assert result.latency.throughput_tokens_per_s == pytest.approx(93 / 4.0)
    drained = run(*turns(1, 3, at), sent(4, at + 4.5), done(4, at + 8.0, "truncated"), turns=4)
    assert drained.latency.throughput_tokens_per_s == pytest.approx(93 / 8.0), "the drain counts, its tokens do not"


def test_throughput_of_nothing_is_unknown() -> None:
    assert run().latency.throughput_tokens_per_s is None
    assert run(sent(1, T0), done(1, T0 + 1, "hung")).latency.throughput_tokens_per_s is None
    assert latency_of(done(1, T0), wall_s=0.0).throughput_tokens_per_s is None


def uneven() -> list[Event]:
    """Eleven ok turns, no two figures alike, and one that is not ok."""
    events: list[Event] = []
    for n in SCALE:
        at = T0 + 10.0 * n
        fields: dict[str, Any] = {"ttft_s": n / 10, "first_answer_s": n / 5, "last_token_s": n / 10 + 30 / (7 * n)}
        events += [sent(n, at), done(n, at + 6.0, **fields)]
    return [*events, sent(12, T0 + 120), done(12, T0 + 121, "truncated"), ToolLagged(T0, T0, 0.75)]


FIGURES_OF_UNEVEN = [
    ("ttft_p50", 0.6),
    ("ttft_p90", 1.0),
    ("ttft_p99", 1.09),
    ("first_answer_p50", 1.2),
    ("first_answer_p99", 2.18),
    ("decode_p10", 14.0),
    ("decode_p50", 42.0),
    ("throughput", 11 * 31 / 111.0),
    ("ok_rate", 100.0 * 11 / 12),
    ("turns", 12.0),
    ("hazard_upper_95", 0.33868),
    ("tool_lag_max", 0.75),
]


@pytest.mark.parametrize(("name", "value"), FIGURES_OF_UNEVEN)
def test_every_gate_reads_its_own_figure(name: str, value: float) -> None:
    result = run(*uneven(), turns=12)
    assert parse_gate(f"{name} > 0").check(result).value == pytest.approx(value, rel=1e-4)


def test_no_figure_is_left_out_of_the_test_above() -> None:
    assert [name for name, _ in FIGURES_OF_UNEVEN] == list(FIGURES)


def test_ok_rate_is_of_all_turns_sent_those_without_an_end_included() -> None:
    result = run(*turns(1, 3), sent(4, T0 + 9), turns=4)
    assert parse_gate("ok_rate > 0%").check(result).value == pytest.approx(75.0)
    assert parse_gate("ok_rate >= 75%").check(result).held is True
    assert parse_gate("ok_rate > 75%").check(result).held is False


@pytest.mark.parametrize(
    ("compare", "below", "equal", "above"),
    [
        ("<", True, False, False),
        ("<=", True, True, False),
        (">", False, False, True),
        (">=", False, True, True),
    ],
)
def test_what_a_comparison_says_below_at_and_above_its_limit(
    compare: str, below: bool, equal: bool, above: bool
) -> None:
    result = run(*turns(1, 3), turns=3)
    held = [parse_gate(f"turns {compare} {limit}").check(result).held for limit in (4, 3, 2)]
    assert held == [below, equal, above]


@pytest.mark.parametrize(("gate", "verdict"), [("turns >= 3", "pass"), ("turns > 3", "fail")])
def test_a_gate_at_its_limit_decides_the_run(gate: str, verdict: str) -> None:
    result = run(*turns(1, 3), gates=[gate])
    assert result.verdict == verdict
    assert (f"gate broken: {gate}, measured 3" in result.reasons) == (verdict == "fail")
