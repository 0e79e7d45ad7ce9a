"""What a launch came to, read from its run's result: the name of its fault, and whether it counts."""

from __future__ import annotations

from typing import Any

import pytest

from builders import T0, alive, dead, done, ended, judged, kernel_live, manifest, sent, turns, xid
from soakrig.bisect.launch_result import LaunchResult, read_result, signature_of, void
from soakrig.record.judge import Judge
from soakrig.record.outcome import CONTENT, OUTCOMES
from soakrig.record.result import EngineEnd, Exposure, Fault, HitRate, Offload, OffloadPath, Result

XID_31 = "Xid 31 FAULT_PDE VIRT_WRITE"


def result(**fields: Any) -> Result:
    """A run of 60 ok turns with 1000 tokens that passed, but for ``fields``."""
    plain: dict[str, Any] = {
        "verdict": "pass", "exit_code": 0, "reasons": [], "unknown": [], "outcomes": {"ok": 60},
        "exposure": Exposure(turns=60, output_tokens=1000), "engine": EngineEnd(alive=True),
    }  # fmt: skip
    return Judge(manifest()).result().model_copy(update={**plain, **fields})


def fault(source: str, signature: str) -> Fault:
    return Fault(signature=signature, source=source, time=1.0, raw="raw")


def offload(bad_ids: int) -> Offload:
    return Offload(
        kind="measured", first_step=0, last_step=1, hit_rate=HitRate(), misses_per_step_per_layer=None,
        large=OffloadPath(), bytes_moved=0, bad_ids=bad_ids, counters={},
    )  # fmt: skip


DEAD = EngineEnd(alive=False, exit_status=-9)


@pytest.mark.parametrize(
    ("fields", "signature"),
    [
        ({}, None),
        ({"faults": [fault("kernel_log", XID_31)]}, XID_31),
        # what a dying engine shows first is a race: the device's word, then how it ended, then the others'
        ({"faults": [fault("process", "gone"), fault("kernel_log", XID_31)], "engine": DEAD}, XID_31),
        ({"faults": [fault("engine_log", "died"), fault("nvml", "Xid 79")], "engine": DEAD}, "Xid 79"),
        ({"faults": [fault("kernel_log", "a"), fault("nvml", "b")]}, "a"),
        ({"faults": [fault("engine_log", "EngineDeadError")], "engine": DEAD}, "engine death, signal 9"),
        ({"faults": [fault("liveness", "engine death")], "engine": DEAD}, "engine death, signal 9"),
        ({"engine": EngineEnd(alive=False, exit_status=0)}, "engine death, exit status 0"),
        ({"engine": EngineEnd(alive=False, exit_status=70)}, "engine death, exit status 70"),
        ({"engine": EngineEnd(alive=False)}, "engine death, no answer"),
        ({"faults": [fault("process", "worker gone")]}, "engine process died"),
        ({"faults": [fault("process", "worker gone")], "engine": EngineEnd(alive=None, exit_status=1)},
         "engine death, exit status 1"),
        ({"faults": [fault("engine_log", "EngineDeadError"), fault("metrics", "m")]}, "EngineDeadError"),
        ({"faults": [fault("engine_log", "x")], "outcomes": {"error_frame": 1}}, "x"),
        ({"offload": offload(2), "outcomes": {"ok": 1, "degenerate": 1}}, "expert id out of range"),
        ({"offload": offload(0), "outcomes": {"ok": 1, "hung": 1}}, "turn hung"),
        ({"outcomes": {"degenerate": 3, "ok": 4, "error_frame": 1}}, "turn error_frame"),
        ({"outcomes": {"ok": 4, "aborted": 1, "post_mortem": 2}}, None),
        ({"outcomes": {"ok": 4, "hung": 0}}, None),
    ],
)  # fmt: skip
def test_the_same_fault_has_the_same_name_whoever_saw_it_first(fields: dict[str, Any], signature: str | None) -> None:
    assert signature_of(result(**fields)) == signature


@pytest.mark.parametrize("outcome", [name for name in OUTCOMES if name not in ("ok", "aborted", "post_mortem")])
def test_every_outcome_that_is_not_ok_is_a_fault_of_its_own_unless_it_is_tolerated(outcome: str) -> None:
    bad = result(outcomes={"ok": 2, outcome: 1}, verdict="fail")
    assert signature_of(bad) == f"turn {outcome}"
    assert signature_of(bad, CONTENT) == (None if outcome in CONTENT else f"turn {outcome}")
    found = read_result(bad, "turns", 60, CONTENT)
    assert found.result == ("clean" if outcome in CONTENT else "faulted")
    assert found.exposure == 3


def test_a_tolerated_turn_excuses_no_other_fault() -> None:
    both = result(outcomes={"ok": 2, "answerless": 1, "truncated": 1}, verdict="fail")
    assert read_result(both, "turns", 60, CONTENT) == LaunchResult("faulted", 4.0, "turn truncated")
    dying = result(outcomes={"ok": 2, "answerless": 1}, verdict="fail", engine=DEAD)
    assert read_result(dying, "turns", 60, CONTENT).signature == "engine death, signal 9"


def test_a_run_without_a_fault_is_clean_only_where_everything_was_seen_and_done() -> None:
    assert read_result(result(), "turns", 60) == LaunchResult("clean", 60.0)
    unknown = ["the kernel log was not watched for the whole run (absent): none", "exposure not reached: 3 of 60 turns"]
    seen_in_part = result(verdict="inconclusive", reasons=unknown, unknown=unknown)
    assert read_result(seen_in_part, "turns", 60) == void("; ".join(unknown))
    assert read_result(result(verdict="inconclusive"), "turns", 60) == void("the run was inconclusive")


def test_a_fail_by_tolerated_turns_alone_is_void_where_something_was_not_seen() -> None:
    events = (*turns(1, 2), sent(3, T0 + 5), done(3, T0 + 6, "answerless"), alive(), ended())
    blind, seen = judged(*events).result(), judged(kernel_live(), *events).result()
    assert (blind.verdict, seen.verdict) == ("fail", "fail")
    assert seen.unknown == []
    found = read_result(blind, "turns", 3, CONTENT)
    assert (found.result, found.exposure, found.signature) == ("void", 0.0, None)
    assert found.reason.startswith("the kernel log was not watched")
    assert "answerless" not in found.reason, "what is tolerated is not why"
    assert read_result(seen, "turns", 3, CONTENT) == LaunchResult("clean", 3.0)


def test_a_fault_counts_though_something_else_was_not_seen() -> None:
    events = [kernel_live(), *turns(1, 2), sent(3, T0 + 5), xid(31, T0 + 5.2), done(3, T0 + 6, "truncated")]
    cut_off = judged(*events, dead(T0 + 7, 3, status=-6)).result()
    assert cut_off.unknown
    assert read_result(cut_off, "turns", 60) == LaunchResult("faulted", 3.0, "Xid 31")


def test_a_fault_before_a_turn_was_over_says_nothing_of_the_arm() -> None:
    for outcomes in ({}, {"post_mortem": 2}, {"aborted": 1}):
        early = result(outcomes=outcomes, verdict="fail", engine=DEAD)
        assert read_result(early, "turns", 60) == void("engine death, signal 9 before the first turn was over")


def test_exposure_counts_turns_or_tokens_and_never_more_than_the_cap() -> None:
    fatal = result(outcomes={"ok": 4, "error_frame": 1, "post_mortem": 3, "aborted": 2}, engine=DEAD, verdict="fail")
    assert read_result(fatal, "turns", 60).exposure == 5
    assert read_result(fatal, "output_tokens", 5000).exposure == 1000
    assert read_result(fatal, "turns", 3).exposure == 3
    assert read_result(fatal, "output_tokens", 64).exposure == 64
    assert read_result(result(), "output_tokens", 5000) == LaunchResult("clean", 1000.0)
    assert read_result(result(), "turns", 30) == LaunchResult("clean", 30.0)


def test_without_a_token_a_fault_counts_as_one_and_a_clean_run_proves_nothing() -> None:
    none = {"exposure": Exposure(turns=2, output_tokens=0), "outcomes": {"answerless": 2}}
    assert read_result(result(**none, engine=DEAD, verdict="fail"), "output_tokens", 64).exposure == 1
    assert read_result(result(**none, verdict="fail"), "output_tokens", 64, CONTENT).result == "void"


def test_a_void_reason_is_one_line_and_never_empty() -> None:
    assert void("  first\nsecond").reason == "first"
    assert void(" \n").reason
