"""Findings in the record: what they do to a verdict, to the signature, and that the events alone carry them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from builders import alive, done, ended, judged, kernel_live, sent, turns
from soakrig.bisect.launch_result import read_result, signature_of
from soakrig.record.events import EngineSwitched, Event, FindingMade, SampleTaken, dump, parse
from soakrig.record.finding import Finding
from soakrig.record.result import Result
from soakrig.reports.series import Series
from soakrig.reports.terminal import report_parts

DRIFT = Finding("prefix-drift-warm", "warm: drifts by 2 nat", 2.0, "nat", "measured", "<= 0.1 nat", "fault", 0, 3)


def made(finding: Finding) -> FindingMade:
    return FindingMade(1005.0, 1005.0, finding)


def whole(*findings: Finding) -> list[Event]:
    return [kernel_live(), *turns(1, 3), *map(made, findings), alive(), ended()]


def test_a_clean_run_with_clean_findings_passes() -> None:
    result = judged(*whole(Finding("x", "as it should be", 1.0, says="clean"), Finding("y", "by the way"))).result()
    assert (result.verdict, [one.name for one in result.findings]) == ("pass", ["x", "y"])
    assert signature_of(result) is None


def test_a_fault_fails_and_names_itself_where_nothing_else_does() -> None:
    result = judged(*whole(DRIFT)).result()
    assert (result.verdict, result.exit_code) == ("fail", 1)
    assert result.reasons[0] == "warm: drifts by 2 nat"
    assert signature_of(result) == "finding prefix-drift-warm"
    launch = read_result(result, "turns", 60)
    assert (launch.result, launch.signature, launch.exposure) == ("faulted", "finding prefix-drift-warm", 3)
    bad = judged(kernel_live(), sent(1, 1000), done(1, 1001, "degenerate"), made(DRIFT), alive(), ended()).result()
    assert signature_of(bad) == "turn degenerate"
    assert signature_of(bad, tolerated=("degenerate",)) == "finding prefix-drift-warm"


def test_what_is_unknown_beats_pass_and_not_fail() -> None:
    unknown = Finding("z", "could not be seen", says="unknown")
    assert judged(*whole(unknown)).result().verdict == "inconclusive"
    both = judged(*whole(unknown, DRIFT)).result()
    assert (both.verdict, both.unknown) == ("fail", ["could not be seen"])


def test_events_and_result_survive_the_disk() -> None:
    event = made(DRIFT)
    assert parse(dump(event)) == event
    result = judged(*whole(DRIFT)).result()
    assert Result.from_json(result.to_json()) == result
    assert result.to_json()["findings"][0] == {
        "name": "prefix-drift-warm", "text": "warm: drifts by 2 nat", "value": 2.0, "unit": "nat", "kind": "measured",
        "bound": "<= 0.1 nat", "says": "fault", "conversation": 0, "turn": 3,
    }  # fmt: skip


def test_a_result_of_before_findings_is_still_read() -> None:
    data = judged(*whole()).result().to_json()
    del data["findings"]
    assert Result.from_json(data).findings == []


def test_the_report_has_figure_kind_and_bound() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    for part in report_parts(judged(*whole(DRIFT)).result(), Series(), None):
        console.print(part)
    text = " ".join(console.export_text().split())
    assert "FAULT warm: drifts by 2 nat 2 nat (measured) <= 0.1 nat" in text


@pytest.mark.parametrize("switched", [True, False])
def test_the_counters_of_an_engine_that_was_restarted_begin_anew(switched: bool) -> None:
    def sample(at: float, tokens: float) -> SampleTaken:
        return SampleTaken(at, at, "metrics", {"generation_tokens": tokens})

    again = [EngineSwitched(1006.0, 1006.0, "ended", "restart"), EngineSwitched(1007.0, 1007.0, "started", "restart")]
    events: list[Event] = [kernel_live(), sample(1000.0, 50.0), *turns(1, 2, start=1001.0), sample(1005.0, 50.0)]
    events += again if switched else []
    events += [sample(1008.0, 50.0), sent(3, 1009.0), done(3, 1010.0), alive(), ended()]
    contradicted = "the engine's own token counter stood still" in " ".join(judged(*events).result().unknown)
    assert contradicted is not switched
