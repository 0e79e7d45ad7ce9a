"""Exposure: work done under watch, and what was in flight at a moment."""

from __future__ import annotations

import pytest

from builders import done, sent
from soakrig.record.events import TurnDone, TurnSent
from soakrig.record.exposure import NEAREST_S, RECENT_TURNS, ExposureCount
from soakrig.record.outcome import OUTCOMES, WORK_DONE


def counted(*events: TurnSent | TurnDone) -> ExposureCount:
    count = ExposureCount()
    for event in events:
        if isinstance(event, TurnSent):
            count.sent(event)
        else:
            count.done(event)
    return count


def test_tokens_are_sums_over_turns() -> None:
    count = counted(
        sent(1, 0.0), done(1, 1.0, prompt_tokens=7001, output_tokens=11),
        sent(2, 2.0), done(2, 3.0, prompt_tokens=7102, output_tokens=13),
        sent(3, 4.0), done(3, 5.0, prompt_tokens=None, output_tokens=17),
    )  # fmt: skip
    assert (count.turns, count.prompt_tokens, count.output_tokens) == (3, 14103, 41)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_only_work_that_the_engine_took_up_counts(outcome: str) -> None:
    assert counted(sent(1, 0.0), done(1, 1.0, outcome)).turns == (outcome in WORK_DONE)
    assert counted(sent(1, 0.0), done(1, 1.0, outcome, response_bytes=0)).turns == 0, "no byte, no work"


def test_a_finished_turn_s_context_is_what_the_engine_measured() -> None:
    count = counted(sent(1, 0.0, context=7000), done(1, 1.0, prompt_tokens=7345))
    span = count.at(0.5).span
    assert span is not None
    assert span.context_tokens == 7345
    count = counted(sent(1, 0.0, context=7000), done(1, 1.0, prompt_tokens=None))
    span = count.at(0.5).span
    assert span is not None
    assert span.context_tokens == 7000, "else the estimate"
    span = counted(sent(1, 0.0, context=7000)).at(0.5).span
    assert span is not None
    assert span.context_tokens == 7000, "in flight there is only the estimate"


@pytest.mark.parametrize(("after", "turn"), [(0.1, 2), (NEAREST_S - 0.1, 2), (NEAREST_S + 0.1, None), (60.0, None)])
def test_a_moment_after_the_last_turn_goes_to_it_for_five_seconds(after: float, turn: int | None) -> None:
    assert NEAREST_S == 5.0
    moment = counted(sent(1, 0.0), done(1, 1.0), sent(2, 1.5), done(2, 2.5)).at(2.5 + after)
    assert (moment.span.turn if moment.span else None) == turn
    assert (moment.exact, moment.in_flight) == (False, [])


def test_a_moment_before_every_turn_goes_to_none() -> None:
    moment = counted(sent(1, 10.0), done(1, 11.0)).at(9.0)
    assert (moment.span, moment.exact) == (None, False)


def test_of_turns_that_ended_before_the_last_end_is_the_nearest() -> None:
    events = [sent(1, 0.0, 0), sent(1, 0.1, 1), done(1, 2.0, conversation=0), done(1, 1.0, conversation=1)]
    span = counted(*events).at(3.0).span
    assert span is not None
    assert (span.conversation, span.end) == (0, 2.0)


def test_both_ends_of_a_turn_belong_to_it() -> None:
    count = counted(sent(1, 1.0), done(1, 2.0))
    assert [count.at(mono).exact for mono in (0.99, 1.0, 2.0, 2.01)] == [False, True, True, False]


def test_all_that_is_in_flight_is_named_the_oldest_first() -> None:
    count = counted(sent(5, 3.0, 1), sent(2, 1.0, 0), sent(9, 2.0, 2))
    moment = count.at(4.0)
    assert moment.in_flight == [(0, 2), (2, 9), (1, 5)]
    assert moment.span is not None
    assert (moment.span.conversation, moment.span.turn) == (0, 2)
    assert count.unfinished() == [(0, 2), (1, 5), (2, 9)]


def test_what_was_surely_in_flight_goes_before_what_may_have_been() -> None:
    moment = counted(sent(1, 0.0), done(1, 1.0, "truncated"), sent(2, 1.5)).at(1.6, error_s=2.0)
    assert moment.in_flight == [(0, 2)]


def test_the_load_until_a_moment_includes_the_turn_in_flight() -> None:
    count = counted(sent(1, 0.0), done(1, 2.0), sent(2, 10.0))
    assert count.at(13.0).seconds_under_load == pytest.approx(5.0)
    assert count.busy_seconds == pytest.approx(2.0), "asking adds nothing"
    count.done(done(2, 14.0))
    assert count.at(20.0).seconds_under_load == pytest.approx(6.0)


def test_a_closed_count_stands_still() -> None:
    count = counted(sent(1, 0.0), done(1, 1.0), sent(2, 2.0))
    count.close(5.0)
    assert count.busy_seconds == pytest.approx(4.0)
    count.done(done(2, 8.0))
    count.sent(sent(3, 9.0))
    assert count.at(20.0).seconds_under_load == pytest.approx(4.0), "what is sent later is no load"
    count.done(done(3, 12.0))
    assert (count.turns, count.prompt_tokens, count.output_tokens) == (1, 7100, 31)
    assert count.busy_seconds == pytest.approx(4.0)


def test_a_closed_count_still_knows_what_was_in_flight() -> None:
    count = counted(sent(1, 0.0))
    count.close(2.0)
    count.done(done(1, 3.0, "post_mortem"))
    assert count.at(2.5).in_flight == [(0, 1)]
    assert count.unfinished() == []


def test_memory_does_not_grow_with_the_run() -> None:
    count = ExposureCount()
    for turn in range(1, RECENT_TURNS + 11):
        count.sent(sent(turn, 2.0 * turn))
        count.done(done(turn, 2.0 * turn + 1))
    assert count.turns == RECENT_TURNS + 10
    assert count.find(0, 10) is None
    oldest = count.find(0, 11)
    assert oldest is not None
    assert (oldest.start, oldest.end) == (22.0, 23.0)


def test_an_end_that_is_told_late_takes_no_busy_time_away() -> None:
    count = ExposureCount()
    count.sent(sent(1, 10.0, 0))
    count.sent(sent(1, 11.0, 1))
    count.done(done(1, 14.0, conversation=1))
    count.done(done(1, 12.0, conversation=0))  # ended earlier, and was questioned for longer
    assert count.busy_seconds == 4.0
