"""The judge at its limits: one record, one tenth of a second, one turn more or less decides."""

from __future__ import annotations

from typing import Any

import pytest

from builders import T0, alive, dead, done, ended, judged, kernel_live, sent, source, turns, xid
from soakrig.record import faults
from soakrig.record.events import Event, SignalSeen, ToolLagged
from soakrig.record.manifest import Plan
from soakrig.record.result import Fault, Result
from soakrig.record.signal import Signal

THREE_CLEAN = turns(1, 3)  # [T0, T0+1], [T0+1.5, T0+2.5], [T0+3, T0+4]


def clean(*more: Event, reason: str = "completed", detail: str = "", **fields: Any) -> Result:
    """A run with nothing wrong but what ``more`` brings."""
    return judged(kernel_live(), *THREE_CLEAN, *more, alive(), ended(reason=reason, detail=detail), **fields).result()


def only_fault(*events: Event) -> Fault:
    (fault,) = judged(kernel_live(), *events, alive(), ended()).result().faults
    return fault


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_any_lost_kernel_record_is_a_gap(lost: int) -> None:
    result = clean(source("kernel_log", "live", lost=lost))
    assert result.verdict == "inconclusive"
    assert f"{lost} kernel-log records were lost" in result.reasons


@pytest.mark.parametrize("counts", [(4, 2), (2, 4), (4, 0)])
def test_lost_records_are_the_most_that_any_update_said(counts: tuple[int, int]) -> None:
    result = clean(*(source("kernel_log", "live", lost=count) for count in counts))
    assert result.sources["kernel_log"].lost == 4
    assert result.verdict == "inconclusive"


@pytest.mark.parametrize(("seconds", "verdict"), [(4.9, "pass"), (5.0, "pass"), (5.1, "inconclusive")])
def test_a_standstill_of_the_tool_counts_beyond_five_seconds(seconds: float, verdict: str) -> None:
    result = clean(ToolLagged(T0, T0, seconds), ToolLagged(T0 + 1, T0 + 1, 1.5))
    assert result.verdict == verdict
    assert (result.tool.lag_max_s, result.tool.lags) == (seconds, 2)


@pytest.mark.parametrize("reason", ["interrupted", "stopped", "store", "tool_error"])
def test_a_run_that_ended_early_is_inconclusive_with_its_reason(reason: str) -> None:
    result = clean(reason=reason, detail="what happened")
    assert (result.verdict, result.exit_code, result.ended) == ("inconclusive", 2, reason)
    assert f"the run ended early ({reason}): what happened" in result.reasons


def timed(*events: Event, seconds: float) -> Result:
    plan = Plan(conversations=1, seconds=seconds)
    return judged(kernel_live(), *events, alive(), ended(), plan=plan).result()


def test_a_plan_in_seconds_is_measured_from_the_first_request_to_the_last_answer() -> None:
    reached = timed(*THREE_CLEAN, seconds=4.0)
    assert reached.verdict == "pass", reached.reasons
    late = timed(*turns(1, 3, T0 + 50), seconds=40.0)
    assert late.verdict == "inconclusive", "seconds before the first request are no load"


def test_a_plan_in_seconds_that_was_not_reached_says_how_far_it_came() -> None:
    result = timed(*THREE_CLEAN, seconds=60.0)
    assert result.verdict == "inconclusive"
    assert "exposure not reached: 4.0 of 60.0 s (busy 3.0 s)" in result.reasons


@pytest.mark.parametrize("events", [[], [sent(1, T0)]], ids=["nothing sent", "nothing came back"])
def test_a_plan_in_seconds_without_an_answer_has_no_exposure(events: list[Event]) -> None:
    result = timed(*events, seconds=60.0)
    assert result.verdict == "inconclusive"
    assert "exposure not reached: 0 of 60 s" in result.reasons


def test_planned_turns_are_those_of_every_conversation() -> None:
    plan = Plan(conversations=2, turns=3)
    half = clean(plan=plan)
    assert half.verdict == "inconclusive"
    assert "exposure not reached: 3 of 6 turns" in half.reasons
    assert clean(*turns(1, 3, T0 + 0.1, conversation=1), plan=plan).verdict == "pass"
    five = clean(*turns(1, 2, T0 + 0.1, conversation=1), plan=plan)
    assert "exposure not reached: 5 of 6 turns" in five.reasons


def test_faults_that_were_not_kept_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "KEPT_SIGNALS", 2)
    result = clean(*(xid(31, T0 + 0.5 + n) for n in range(5)))
    assert any(reason.startswith("3 ") and "were not judged" in reason for reason in result.reasons), result.reasons
    kept = clean(*(xid(31, T0 + 0.5 + n) for n in range(2)))
    assert not any("were not judged" in reason for reason in kept.reasons)


def test_a_leniency_that_was_used_is_repeated_with_its_count() -> None:
    def accepting(turn: int, at: float) -> list[Event]:
        return [sent(turn, at), done(turn, at + 1.0, accepted=["null-finish"])]

    one = judged(kernel_live(), *accepting(1, T0), *turns(2, 3, T0 + 2), alive(), ended()).result()
    assert (one.verdict, one.accepted) == ("pass", {"null-finish": 1})
    assert "accepted by --accept null-finish: 1 turn" in one.reasons
    two = judged(kernel_live(), *accepting(1, T0), *accepting(2, T0 + 2), *turns(3, 3, T0 + 4), alive(), ended())
    assert "accepted by --accept null-finish: 2 turns" in two.result().reasons


def test_no_leniency_is_spoken_of_where_none_was_used() -> None:
    result = clean(accept=["null-finish"])
    assert result.accepted == {}
    assert not any("--accept" in reason for reason in result.reasons)


def test_the_moment_that_a_signal_means_decides_its_turn_and_not_that_of_reading() -> None:
    fault = only_fault(*THREE_CLEAN, xid(31, T0 + 30, time=T0 + 2.0, mono=T0 + 2.0))
    assert (fault.turn, fault.attribution, fault.time) == (2, "exact", T0 + 2.0)
    early = only_fault(*turns(1, 2), sent(3, T0 + 3), xid(31, T0 + 3.5, mono=T0 + 0.5), done(3, T0 + 4))
    assert (early.turn, early.attribution) == (1, "exact")


def test_a_signal_without_a_moment_of_its_own_is_of_the_moment_of_reading() -> None:
    fault = only_fault(*turns(1, 1), sent(2, T0 + 1.5), xid(31, T0 + 2.0, mono=0.0), done(2, T0 + 2.5))
    assert (fault.turn, fault.attribution) == (2, "exact")


@pytest.mark.parametrize(
    ("at", "error_s", "turn", "attribution"),
    [
        (T0 + 1.2, 0.0, 1, "nearest"),
        (T0 + 1.2, 0.25, 1, "exact"),
        (T0 + 1.4, 0.0, 1, "nearest"),
        (T0 + 1.4, 0.2, 2, "exact"),
        (T0 + 4.3, 0.2, 3, "nearest"),
        (T0 + 4.3, 0.4, 3, "exact"),
    ],
)
def test_the_error_of_a_signal_s_time_widens_what_it_may_have_hit(
    at: float, error_s: float, turn: int, attribution: str
) -> None:
    fault = only_fault(*THREE_CLEAN, xid(31, at, error_s=error_s))
    assert (fault.turn, fault.attribution) == (turn, attribution)


def test_a_turn_in_flight_at_the_death_adds_nothing_when_it_ends() -> None:
    events = [kernel_live(), sent(1, T0), sent(1, T0 + 0.5, 1), done(1, T0 + 1, "empty_200", response_bytes=0)]
    result = judged(*events, dead(T0 + 2, 1), done(1, T0 + 9, "truncated", conversation=1), ended()).result()
    assert result.outcomes == {"empty_200": 1, "truncated": 1}
    exposure = result.exposure
    assert (exposure.turns, exposure.prompt_tokens, exposure.output_tokens) == (0, 0, 0)
    assert exposure.busy_seconds == pytest.approx(2.0), "the load ends where the engine was found dead"


def test_what_is_sent_after_the_death_is_no_load() -> None:
    events = [kernel_live(), *turns(1, 1), dead(T0 + 2, 1), sent(2, T0 + 3), done(2, T0 + 8, "truncated")]
    exposure = judged(*events, ended(reason="engine_dead")).result().exposure
    assert exposure.turns == 1
    assert (exposure.prompt_tokens, exposure.output_tokens) == (7100, 31)
    assert exposure.busy_seconds == pytest.approx(1.0)


def test_died_after_turn_is_that_of_the_conversation_that_found_it() -> None:
    events = [kernel_live(), *turns(1, 5, conversation=0), *turns(1, 2, T0 + 0.1, conversation=1)]
    events += [sent(3, T0 + 20, 1), done(3, T0 + 21, "truncated", conversation=1)]
    result = judged(*events, dead(T0 + 22, 3, conversation=1), ended(reason="engine_dead")).result()
    assert result.engine.died_after_turn == 2
    nobody = judged(*events, dead(T0 + 22, None, conversation=None), ended(reason="engine_dead")).result()  # type: ignore[arg-type]
    assert nobody.engine.died_after_turn == 5, "no conversation found it: the one that came furthest"


def test_an_engine_that_was_found_dead_stays_dead() -> None:
    events = [kernel_live(), *turns(1, 3), dead(T0 + 5, 3, status=1), alive(T0 + 6), ended()]
    result = judged(*events).result()
    assert (result.engine.alive, result.engine.exit_status, result.verdict) == (False, 1, "fail")


def test_the_hazard_counts_turns_and_neither_aborted_nor_post_mortem_ones() -> None:
    events: list[Event] = [kernel_live()]
    for number, outcome in enumerate(["ok", "ok", "truncated", "aborted", "post_mortem"], 1):
        events += [sent(number, T0 + 2 * number), done(number, T0 + 2 * number + 1, outcome)]
    hazard = judged(*events, alive(), ended(), turns=5).result().hazard
    assert (hazard.faults, hazard.exposure) == (1, 3)


def test_a_warning_is_no_fault_and_does_not_hide_a_pass() -> None:
    warning = Signal("aer", "kernel_log", "warning", "corrected", T0 + 0.5, T0 + 0.5, pci="0000:01:00")
    result = clean(SignalSeen(T0 + 0.5, T0 + 0.5, warning))
    assert (result.verdict, result.faults) == ("pass", [])
