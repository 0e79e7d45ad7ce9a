"""Two runs side by side: when they may stand there, what is said of their hazards and times, and every face of it."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from builders import T0, done, ended, kernel_live, manifest, sent, xid
from html_page import assert_marked_up
from run_folders import long_run, write_run
from soakrig.bisect.run_comparison import LEAST_PAIRS, RunFacts, compare_runs, paired_ratio, reasons_against
from soakrig.cli.main import invoke
from soakrig.record.comparison import Comparison
from soakrig.record.events import Event, TurnDone
from soakrig.record.judge import Judge
from soakrig.record.manifest import Plan
from soakrig.reports.comparison import comparison_html, comparison_markdown

HOST = {"cpu": "A CPU", "cores": 8, "memory_mib": 64000}


def facts(events: list[Event], **fields: Any) -> RunFacts:
    made = manifest(**{"host": HOST, "launched": "embedded", **fields})
    judge = Judge(made)
    for event in events:
        judge.feed(event)
    return RunFacts(f"runs/{made.run_id}", made, judge.result(), [one for one in events if isinstance(one, TurnDone)])


def timed(factor: float, noise: float, seed: int, turns: int = 40, rate: float = 1.0) -> list[Event]:
    """Turns whose TTFT grows with the turn, times ``factor``; the other figure is decode's time, over ``rate``."""
    draw = random.Random(seed)
    events: list[Event] = [kernel_live()]
    for n in range(1, turns + 1):
        ttft = 0.1 * n * factor * draw.lognormvariate(0, noise)
        last = ttft + draw.lognormvariate(0, noise) / rate
        events += [sent(n, T0 + n), done(n, T0 + n + 0.5, ttft_s=ttft, last_token_s=last)]
    return [*events, ended()]


def test_equal_loads_may_be_compared_and_a_change_of_time_is_found() -> None:
    found = compare_runs(facts(timed(1.0, 0.1, 1)), facts(timed(1.3, 0.1, 2, rate=2.0)), [])
    assert (found.comparable, found.exit_code, found.why_not) == (True, 0, [])
    ttft, decode = found.latency
    assert (ttft.answer, decode.answer) == ("higher", "higher")
    assert ttft.ratio is not None
    assert ttft.ratio.low < 1.3 < (ttft.ratio.high or 0)
    assert (ttft.pairs, ttft.kind) == (40, "uncontrolled")
    assert decode.ratio is not None
    assert decode.ratio.low < 2.0 < (decode.ratio.high or 0)


def test_the_interval_holds_as_often_as_it_says() -> None:
    held = 0
    draw = random.Random(3)
    for _ in range(400):
        a = [draw.lognormvariate(0, 0.5) for _ in range(12)]
        b = [value * 1.2 * draw.lognormvariate(0, 0.3) for value in a]
        span = paired_ratio(a, b)
        assert span is not None
        held += span.low <= 1.2 <= (span.high or 0)
    assert held / 400 > 0.92


def test_few_pairs_say_nothing_and_turns_without_a_partner_are_counted() -> None:
    few = LEAST_PAIRS - 1
    found = compare_runs(facts(timed(1, 0.1, 1, turns=few)), facts(timed(9, 0.1, 2, turns=few + 3)), [])
    assert {one.answer for one in found.latency} == {"cannot tell"}
    assert [(one.pairs, one.left_out, one.ratio) for one in found.latency] == [(few, 3, None)] * 2
    assert paired_ratio([1.0] * LEAST_PAIRS, [2.0] * LEAST_PAIRS) is not None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"reproducer": "long-prefill"}, "the reproducer differs: agent-loop and long-prefill"),
        ({"plan": Plan(conversations=1, turns=60)}, r"the planned exposure (the cap) differs: 3 turns and 60 turns"),
        ({"seed": 4}, "the seed of the load differs: 0 and 4"),
        ({"launched": "vllm"}, "the engine differs: embedded and vllm"),
        ({"model": "other"}, "the model differs: m and other"),
        ({"host": {**HOST, "cores": 4}}, "the machine differs, cores: 8 and 4"),
        ({"host": {**HOST, "memory_mib": 24000}}, "the machine differs, memory, GiB: 62 and 23"),
        ({"fingerprint": {"nvidia_driver": "580.1"}}, "the machine differs, nvidia_driver: not known and 580.1"),
        ({"simulated": True}, "a planted fault took part in B alone"),
    ],
)
def test_what_keeps_two_runs_apart(fields: dict[str, Any], says: str) -> None:
    a, b = facts(timed(1, 0, 1)), facts(timed(1, 0, 1), **fields)
    assert reasons_against(a, b) == [says]
    assert (compare_runs(a, b, []).comparable, compare_runs(a, b, []).exit_code) == (False, 2)
    assert reasons_against(b, b) == []


def test_what_the_runs_themselves_keep_apart() -> None:
    whole = facts(timed(1, 0, 1))
    cut = facts(timed(1, 0, 1)[:-1])
    assert reasons_against(whole, cut) == ["B was cut off, or has not ended"]
    deaf = facts([one for one in timed(1, 0, 1) if one != kernel_live()])
    assert any("kernel log was live in A and absent in B" in text for text in reasons_against(whole, deaf))
    other = facts([kernel_live(), sent(1, T0), done(1, T0 + 1, context_tokens=9000), ended()])
    assert any("the load differs: the first turn has 7,100" in text for text in reasons_against(whole, other))
    assert any("B has no finished turn" in text for text in reasons_against(whole, facts([kernel_live(), ended()])))
    slack = facts([kernel_live(), sent(1, T0), done(1, T0 + 1, context_tokens=7150), ended()])
    assert reasons_against(whole, slack) == []


def with_faults(turns: int, faults: int) -> RunFacts:
    events: list[Event] = [kernel_live()]
    for n in range(1, turns + 1):
        events += [sent(n, T0 + 100 * n), done(n, T0 + 100 * n + 1)]
        if n <= faults:
            events.append(xid(31, T0 + 100 * n + 0.5))
    return facts([*events, ended(T0 + 1e6)])


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [((20, 8), (200, 0), "lower"), ((200, 0), (20, 8), "higher"), ((20, 1), (20, 0), "no difference shown")],
)
def test_hazards(a: tuple[int, int], b: tuple[int, int], answer: str) -> None:
    found = compare_runs(with_faults(*a), with_faults(*b), [])
    assert found.hazard.answer == answer
    assert (found.a.faults, found.b.faults) == (a[1], b[1])
    assert found.hazard.ratio is not None
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["hazard"]["answer"] == answer


def test_two_clean_runs_do_not_tell_of_a_ratio() -> None:
    found = compare_runs(with_faults(50, 0), with_faults(60, 0), [])
    assert (found.hazard.answer, found.hazard.ratio) == ("cannot tell", None)
    assert "each bounds its own hazard" in found.hazard.why


def test_every_face_says_the_same() -> None:
    a, b = facts(timed(1.0, 0.1, 1)), facts(timed(1.3, 0.1, 2), simulated=True)
    found = compare_runs(a, b, [("flag --x|y", "<b>", "`z`")])
    html, markdown = comparison_html(found), comparison_markdown(found)
    for page in (html, markdown):
        assert "SIMULATED" in page
        assert "a planted fault took part in B alone" in page
        assert "higher" in page
        assert "uncontrolled" in page
        assert "<b>" not in page.replace("`<b>`", "")
    assert "script" not in html
    assert_marked_up(html)
    assert Comparison.model_validate({**found.model_dump()}) == found


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name, turns in product(("a", "b"), (12,)):
        write_run(tmp_path / "runs" / name, long_run(turns), turns=turns, host=HOST)
    assert invoke(["compare", "a", "b", "--html", "c.html", "--md", "c.md"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("comparable")
    assert max(map(len, out.splitlines())) <= 100
    assert (tmp_path / "c.html").exists()
    assert (tmp_path / "c.md").exists()
    write_run(tmp_path / "runs" / "c", long_run(3), turns=3, host=HOST)
    assert invoke(["compare", "a", "c", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["why_not"] == [
        "the planned exposure (the cap) differs: 12 turns and 3 turns"
    ]
    assert invoke(["compare", "a", "nothing"]) == 64
    assert "there is no run 'nothing'" in capsys.readouterr().err
    assert invoke(["compare", "a", "b", "--html", "no/where"]) == 64
    assert "cannot be written" in capsys.readouterr().err
