"""The judge: what events support, and nothing more."""

from __future__ import annotations

import random

import pytest

from builders import T0, alive, dead, done, ended, judged, kernel_live, sent, source, turns, xid
from soakrig.record.events import Note, SampleTaken, ToolLagged
from soakrig.record.faults import KEPT_SIGNALS
from soakrig.record.outcome import OUTCOMES


def test_a_clean_whole_watched_run_passes_and_prints_its_bound() -> None:
    result = judged(kernel_live(), *turns(1, 3), alive(), ended()).result()
    assert (result.verdict, result.exit_code) == ("pass", 0)
    assert result.exposure.turns == 3
    assert result.exposure.busy_seconds == pytest.approx(3.0)
    assert result.outcomes == {"ok": 3}
    assert result.hazard.upper_95 == pytest.approx(1 - 0.05 ** (1 / 3))
    assert any("exclude" in reason and "do not show that there is no fault" in reason for reason in result.reasons)


@pytest.mark.parametrize("outcome", [name for name in OUTCOMES if name not in ("ok", "aborted")])
def test_every_bad_outcome_fails(outcome: str) -> None:
    events = [kernel_live(), *turns(1, 2), sent(3, T0 + 5), done(3, T0 + 6, outcome), alive(), ended()]
    result = judged(*events).result()
    assert (result.verdict, result.exit_code) == ("fail", 1)
    assert result.first_bad is not None
    assert (result.first_bad.turn, result.first_bad.outcome) == (3, outcome)
    assert result.outcomes == {"ok": 2, outcome: 1}
    assert result.hazard.faults == (0 if outcome == "post_mortem" else 1)


def test_a_turn_that_the_tool_cut_is_inconclusive() -> None:
    result = judged(kernel_live(), *turns(1, 2), sent(3, T0 + 5), done(3, T0 + 6, "aborted"), alive(), ended()).result()
    assert result.verdict == "inconclusive"
    assert result.first_bad is None
    assert result.hazard.exposure == 2


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([*turns(1, 3), alive(), ended()], "kernel log was not watched"),
        ([source("kernel_log", "absent", "no permission"), *turns(1, 3), alive(), ended()], "no permission"),
        ([source("kernel_log", "partial", "dmesg"), *turns(1, 3), alive(), ended()], "partial"),
        ([kernel_live(), *turns(1, 3), source("kernel_log", "live", lost=4), alive(), ended()], "4 kernel-log records"),
        ([kernel_live(), *turns(1, 2), alive(), ended()], "2 of 3 turns"),
        ([kernel_live(), *turns(1, 3), alive()], "cut off"),
        ([kernel_live(), *turns(1, 3), ended()], "whether the engine lives"),
        ([kernel_live(), *turns(1, 3), alive(), ended(reason="interrupted", detail="Ctrl-C")], "Ctrl-C"),
        ([kernel_live(), *turns(1, 3), alive(), ended(reason="store", detail="disk full")], "disk full"),
        ([kernel_live(), *turns(1, 3), ToolLagged(T0, T0, 9.0), alive(), ended()], "stood still for 9.0 s"),
        ([kernel_live(), *turns(1, 3), sent(4, T0 + 9), alive(), ended()], "cut short by this tool"),
        (
            [kernel_live(), source("metrics", "absent", "the metrics watcher crashed: boom", untrusted=True),
             *turns(1, 3), alive(), ended()],
            "the metrics watcher crashed",
        ),
    ],
)  # fmt: skip
def test_what_could_not_be_seen_is_never_clean(events: list, says: str) -> None:
    result = judged(*events).result()
    assert (result.verdict, result.exit_code) == ("inconclusive", 2)
    assert any(says in reason for reason in result.reasons), result.reasons


def test_a_gap_in_the_kernel_log_does_not_heal() -> None:
    events = [
        kernel_live(),
        source("kernel_log", "partial", "gap"),
        source("kernel_log", "live"),
        *turns(1, 3),
        alive(),
        ended(),
    ]
    assert judged(*events).result().verdict == "inconclusive"


def test_a_source_lost_in_mid_run_stays_lost() -> None:
    events = [
        kernel_live(),
        *turns(1, 2),
        source("kernel_log", "absent", "EIO"),
        *turns(3, 3, T0 + 9),
        alive(),
        ended(),
    ]
    result = judged(*events).result()
    assert result.verdict == "inconclusive"
    assert result.sources["kernel_log"].detail == "lost in mid-run: EIO"


def test_missing_nvml_is_a_note_only() -> None:
    events = [kernel_live(), source("nvml", "absent", "no driver"), *turns(1, 3), alive(), ended()]
    assert judged(*events).result().verdict == "pass"


def test_an_xid_is_tied_to_the_turn_in_flight() -> None:
    events = [kernel_live(), *turns(1, 2), sent(3, T0 + 5, context=7300), xid(31, T0 + 5.4), done(3, T0 + 6), alive()]
    result = judged(*events, ended(reason="fault")).result()
    assert (result.verdict, result.exit_code) == ("fail", 1)
    (fault,) = result.faults
    assert (fault.xid, fault.turn, fault.conversation, fault.context_tokens) == (31, 3, 0, 7300)
    assert fault.attribution == "exact"
    assert fault.seconds_under_load == pytest.approx(2.4)
    assert result.outcomes == {"ok": 3}, "the turn keeps its own outcome"


def test_an_xid_read_late_goes_to_the_turn_of_its_own_time() -> None:
    events = [kernel_live(), *turns(1, 3), xid(31, T0 + 2.0), alive(), ended(reason="fault")]
    (fault,) = judged(*events).result().faults
    assert (fault.turn, fault.attribution) == (2, "exact")


def test_an_xid_between_turns_goes_to_the_nearest_and_says_so() -> None:
    events = [kernel_live(), *turns(1, 3), xid(31, T0 + 4.4), alive(), ended(reason="fault")]
    (fault,) = judged(*events).result().faults
    assert (fault.turn, fault.attribution) == (3, "nearest")
    events = [kernel_live(), *turns(1, 3), xid(31, T0 + 60), alive(), ended(reason="fault")]
    (fault,) = judged(*events).result().faults
    assert (fault.turn, fault.attribution) == (None, "none")


def test_with_several_in_flight_all_are_named() -> None:
    events = [kernel_live(), sent(1, T0, 0), sent(1, T0 + 0.1, 1), xid(31, T0 + 0.5), done(1, T0 + 1), alive(), ended()]
    (fault,) = judged(*events).result().faults
    assert fault.attribution == "several"
    assert fault.in_flight == [(0, 1), (1, 1)]


def test_nvml_and_kernel_log_of_one_xid_are_one_fault() -> None:
    nvml = {"source": "nvml", "pid": None, "process": None, "raw": "nvml event"}
    events = [kernel_live(), sent(1, T0), xid(31, T0 + 0.5), xid(31, T0 + 1.5, **nvml), done(1, T0 + 2), alive()]
    assert len(judged(*events, ended()).result().faults) == 1
    apart = [kernel_live(), sent(1, T0), xid(31, T0 + 0.5, **nvml), done(1, T0 + 2), alive(), ended()]
    (fault,) = judged(*apart).result().faults
    assert fault.source == "nvml", "NVML alone is enough"


def test_process_and_log_signals_near_an_xid_belong_to_it() -> None:
    exit_signal = {"kind": "process_exit", "source": "process", "xid": None, "signature": "engine exited"}
    events = [
        kernel_live(),
        sent(1, T0),
        xid(31, T0 + 0.5),
        xid(0, T0 + 2, **exit_signal),
        done(1, T0 + 3, "truncated"),
    ]
    result = judged(*events, dead(T0 + 3.1, 1), ended(reason="engine_dead")).result()
    (fault,) = result.faults
    assert (fault.xid, fault.signals) == (31, 2)
    alone = [kernel_live(), sent(1, T0), xid(0, T0 + 2, **exit_signal), done(1, T0 + 3, "truncated"), ended()]
    (fault,) = judged(*alone).result().faults
    assert fault.signature == "engine exited"


def test_of_several_turns_the_one_that_found_the_engine_dead_is_named() -> None:
    gone = {"kind": "process_exit", "source": "process", "xid": None, "signature": "engine exited", "error_s": 1.0}
    events = [kernel_live(), sent(1, T0, 0), sent(1, T0 + 0.1, 1), done(1, T0 + 1.5, "truncated", 0)]
    events += [done(1, T0 + 1.6, "truncated", 1), dead(T0 + 1.7, 1, conversation=1), xid(0, T0 + 1.8, **gone)]
    result = judged(*events, ended(reason="engine_dead")).result()
    (fault,) = result.faults
    assert fault.in_flight == [(0, 1), (1, 1)]
    assert (fault.conversation, fault.turn, fault.attribution) == (1, 1, "exact")


def test_a_turn_that_ended_ok_is_not_blamed_for_what_a_later_one_met() -> None:
    gone = {"kind": "process_exit", "source": "process", "xid": None, "signature": "engine exited", "error_s": 1.0}
    events = [kernel_live(), *turns(1, 2, T0), sent(3, T0 + 3), done(3, T0 + 3.1, "truncated")]
    (fault,) = judged(*events, xid(0, T0 + 3.2, **gone), ended()).result().faults
    assert (fault.turn, fault.attribution) == (3, "exact")


def test_of_ok_turns_of_one_conversation_the_last_is_named() -> None:
    events = [kernel_live()]
    for n in range(1, 11):
        events += [sent(n, T0 + 0.01 * n), done(n, T0 + 0.01 * n + 0.005)]
    (fault,) = judged(*events, xid(31, T0 + 0.3, error_s=1.0), alive(), ended()).result().faults
    assert (fault.turn, fault.attribution, fault.in_flight) == (10, "exact", [(0, 10)])


def test_a_flood_of_warnings_pushes_no_fault_out() -> None:
    warning = {"kind": "aer", "severity": "warning", "xid": None, "signature": "AER corrected"}
    flood = [xid(0, T0 + n * 1e-5, **warning) for n in range(KEPT_SIGNALS + 10)]
    events = [kernel_live(), sent(1, T0), *flood, xid(31, T0 + 0.5), done(1, T0 + 1), alive(), ended()]
    result = judged(*events).result()
    assert [fault.xid for fault in result.faults] == [31]
    assert result.verdict == "fail"


def test_a_fault_after_the_end_of_a_turn_that_was_told_late_is_not_in_it() -> None:
    events = [kernel_live(), sent(1, T0), xid(31, T0 + 2.5), done(1, T0 + 1.0), alive(), ended(reason="fault")]
    (fault,) = judged(*events).result().faults
    assert (fault.turn, fault.attribution, fault.in_flight) == (1, "nearest", [])


def scrape(value: float, at: float) -> SampleTaken:
    return SampleTaken(at, at, "metrics", {"generation_tokens": value})


def test_a_counter_that_stands_still_contradicts_and_one_that_catches_up_does_not() -> None:
    still = [kernel_live(), scrape(5, T0 - 1), *turns(1, 3), scrape(5, T0 + 6), scrape(5, T0 + 7)]
    result = judged(*still, alive(), ended()).result()
    assert result.verdict == "inconclusive"
    assert any("stood still at 5" in reason for reason in result.reasons)
    caught_up = judged(*still, scrape(98, T0 + 9), alive(), ended()).result()
    assert caught_up.verdict == "pass"
    too_late = judged(*still, scrape(5, T0 + 31), scrape(98, T0 + 40), alive(), ended()).result()
    assert too_late.verdict == "inconclusive"
    by_a_canary_only = judged(*still, scrape(9, T0 + 9), alive(), ended()).result()
    assert by_a_canary_only.verdict == "inconclusive"
    after_a_long_prefill = [kernel_live(), scrape(5, T0 - 60), *turns(1, 3), scrape(5, T0 + 6), scrape(5, T0 + 7)]
    assert judged(*after_a_long_prefill, scrape(98, T0 + 9), alive(), ended()).result().verdict == "pass"
    moving = [
        kernel_live(),
        scrape(5, T0 - 1),
        *turns(1, 3),
        scrape(98, T0 + 6),
        scrape(98, T0 + 7),
        scrape(98, T0 + 8),
    ]
    assert judged(*moving, alive(), ended()).result().verdict == "pass"


@pytest.mark.parametrize("first", ["absent", "partial"])
def test_a_kernel_log_that_comes_late_was_not_watched(first: str) -> None:
    events = [source("kernel_log", first, "no file yet"), *turns(1, 2), kernel_live(T0 + 4), *turns(3, 3, T0 + 9)]
    assert judged(*events, alive(), ended()).result().verdict == "inconclusive"


def test_one_that_is_there_before_the_first_turn_was() -> None:
    events = [source("kernel_log", "absent", "no file yet"), kernel_live(), *turns(1, 3), alive(), ended()]
    assert judged(*events).result().verdict == "pass"


def test_events_that_tell_a_turn_twice_prove_nothing() -> None:
    events = [kernel_live(), *turns(1, 3), *turns(3, 3, T0 + 9)[1:], alive(), ended()]
    result = judged(*events).result()
    assert result.verdict == "inconclusive"
    assert result.outcomes == {"ok": 3}


def test_an_injected_line_is_neither_a_fault_nor_clean() -> None:
    events = [kernel_live(), sent(1, T0), xid(31, T0 + 0.5, injected=True), done(1, T0 + 1), *turns(2, 3, T0 + 2)]
    result = judged(*events, alive(), ended()).result()
    assert result.verdict == "inconclusive"
    assert result.faults == []
    assert any("injected" in reason for reason in result.reasons)


def test_a_planted_injected_line_is_a_simulated_fault() -> None:
    events = [kernel_live(), sent(1, T0), xid(31, T0 + 0.5, injected=True), done(1, T0 + 1), alive(), ended()]
    result = judged(*events, simulated=True).result()
    assert result.verdict == "fail"
    assert result.simulated
    assert result.faults[0].injected


def test_a_dead_engine_is_a_fault_and_what_follows_is_no_exposure() -> None:
    events = [kernel_live(), *turns(1, 33, T0)]
    at = T0 + 60
    events += [sent(34, at), done(34, at + 1, "empty_200"), dead(at + 2, 34, status=-9)]
    events += [sent(35, at + 3), done(35, at + 4, "post_mortem")]
    result = judged(*events, ended(at + 5, "engine_dead"), turns=60).result()
    assert result.verdict == "fail"
    assert result.engine.died_after_turn == 33
    assert result.engine.exit_status == -9
    assert result.exposure.turns == 33
    assert result.outcomes == {"ok": 33, "empty_200": 1, "post_mortem": 1}
    (fault,) = result.faults
    assert fault.signature == "engine death, exit status -9"
    assert fault.turn == 34


def test_the_exit_status_may_come_after_the_death() -> None:
    events = [kernel_live(), *turns(1, 1), sent(2, T0 + 2), done(2, T0 + 3, "truncated"), dead(T0 + 3, 2)]
    result = judged(*events, dead(T0 + 5, 2, status=139), ended(reason="engine_dead")).result()
    assert result.engine.exit_status == 139
    assert result.engine.died_after_turn == 1


def test_death_before_the_first_ok_turn() -> None:
    events = [kernel_live(), sent(1, T0), done(1, T0 + 1, "refused"), dead(T0 + 2, 1), ended(reason="engine_dead")]
    assert judged(*events).result().engine.died_after_turn == 0


def test_gates_hold_break_and_stay_unknown() -> None:
    clean = [kernel_live(), *turns(1, 3), alive(), ended()]
    held = judged(*clean, gates=["ttft_p99 < 1s"]).result()
    assert (held.verdict, held.gates[0].held) == ("pass", True)
    broken = judged(*clean, gates=["ttft_p99 < 0.1s"]).result()
    assert (broken.verdict, broken.gates[0].held) == ("fail", False)
    no_tokens = [kernel_live(), sent(1, T0), done(1, T0 + 1, "ok", ttft_s=None), *turns(2, 3, T0 + 2), alive(), ended()]
    assert judged(*no_tokens, gates=["ttft_p50 < 1s"]).result().verdict == "pass"
    nothing = judged(kernel_live(), alive(), ended(), gates=["ttft_p50 < 1s"]).result()
    assert nothing.verdict == "inconclusive"
    assert any("not measured" in reason for reason in nothing.reasons)


def test_fail_beats_unknown_and_still_lists_it() -> None:
    result = judged(*turns(1, 2), sent(3, T0 + 5), done(3, T0 + 6, "hung"), alive(), ended()).result()
    assert result.verdict == "fail"
    assert "hung" in result.reasons[0]
    assert any("kernel log" in reason for reason in result.reasons)


def test_latency_keeps_ttft_and_decode_apart_and_leaves_bad_turns_out() -> None:
    slow = done(3, T0 + 6, "truncated", ttft_s=99.0)
    result = judged(kernel_live(), *turns(1, 2), sent(3, T0 + 5), slow, alive(), ended()).result()
    assert result.latency.ttft_s.p99 == pytest.approx(0.25)
    assert result.latency.decode_tokens_per_s.p50 == pytest.approx(30 / 0.75)
    assert (result.latency.turns, result.latency.left_out) == (2, 1)


def test_outcomes_sum_to_the_turns_sent() -> None:
    rng = random.Random(3)
    for _ in range(50):
        events = [kernel_live()]
        count = rng.randint(1, 30)
        for n in range(1, count + 1):
            events.append(sent(n, T0 + n))
            if n < count or rng.random() < 0.5:
                events.append(done(n, T0 + n + 0.5, rng.choice(OUTCOMES)))
        assert sum(judged(*events).result().outcomes.values()) == count


def test_busy_seconds_are_the_union_of_what_was_in_flight() -> None:
    events = [
        sent(1, 0.0, 0),
        sent(1, 0.5, 1),
        done(1, 1.0, conversation=0),
        done(1, 7.0, conversation=1),
        sent(2, 9.0, 0),
        done(2, 10.0),
    ]
    assert judged(*events).result().exposure.busy_seconds == pytest.approx(8.0)


def test_samples_and_notes_change_nothing() -> None:
    events = [kernel_live(), *turns(1, 3), alive(), ended()]
    more = [*events[:3], Note(T0, T0, "hello"), SampleTaken(T0, T0, "process", {"rss_mib": 1.0}), *events[3:]]
    assert judged(*events).result() == judged(*more).result()


def test_an_idle_run_is_inconclusive() -> None:
    result = judged(kernel_live(), alive(), ended(), turns=60).result()
    assert result.verdict == "inconclusive"
    assert result.hazard.upper_95 is None
