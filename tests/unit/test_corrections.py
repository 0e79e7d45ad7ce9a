"""A later fault contradicts an earlier pass of the same settings: both reports say so, with the joint bound."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from rich.console import Console

from builders import T0, dead, done, ended, kernel_live, manifest, sent, xid
from campaign_results import campaign, launch, single
from run_folders import HOSTILE, long_run, write_run
from soakrig.cli.main import invoke
from soakrig.cli.report import look_beside
from soakrig.record.corrections import Corrections, corrections_beside, outlived_launches
from soakrig.record.events import Event, FindingMade
from soakrig.record.finding import Finding
from soakrig.record.hazard import upper_95
from soakrig.record.run_index import INDEX, RunIndex
from soakrig.record.run_summary import CampaignReader, RunSummary
from soakrig.record.same_settings import settings_hash
from soakrig.record.store import EVENTS, RunReader
from soakrig.reports.campaign_page import campaign_html, campaign_markdown
from soakrig.reports.corrections import correction_lines, headline, joint, launch_lines
from soakrig.reports.followed_run import FollowedRun
from soakrig.reports.run_list import Asked, list_page
from soakrig.reports.run_page import run_html, run_markdown
from soakrig.reports.run_view import read_run
from soakrig.reports.terminal import print_report

LOAD = {"tools": 50, "max_tokens": 512}


def passes(folder: Path, at: float, turns: int = 60, **fields: Any) -> Path:
    return write_run(folder, long_run(turns), turns=turns, created=at, **{"load": LOAD, **fields})


def faults(folder: Path, at: float, turns: int = 30, **fields: Any) -> Path:
    events = long_run(turns, faults=1)
    return write_run(folder, events, turns=turns, created=at, **{"load": LOAD, **fields})


def unseen(folder: Path, at: float, **fields: Any) -> Path:
    """60 turns without a kernel log: inconclusive."""
    events = [event for event in long_run(60) if event.kind != "source"]
    return write_run(folder, events, turns=60, created=at, **{"load": LOAD, **fields})


def found(folder: Path, reader: CampaignReader | None = None) -> Corrections:
    told = corrections_beside(folder, reader)
    assert told is not None
    return told


def names(runs: Any) -> list[str]:
    return [run.id for run in runs]


def test_a_fault_after_a_pass_is_told_on_both(tmp_path: Path) -> None:
    before, after = passes(tmp_path / "before", 1.0), faults(tmp_path / "after", 2.0)
    old, new = found(before), found(after)
    assert (names(old.outlived_by), names(new.corrects)) == (["after"], ["before"])
    assert (old.contradicted, new.contradicted) == (True, False)
    for one in (old, new):
        assert (one.runs, one.faults, one.exposure) == (2, 1, 90)
        assert one.upper_95 == pytest.approx(upper_95(1, 90))
    assert headline(old).startswith("OUTLIVED")
    assert "1 fault in 90 turns; at 95 % the chance of a fault is at most 5.16 % a turn (derived" in " ".join(
        correction_lines(old)
    )


def test_a_pass_after_a_fault_clears_nothing(tmp_path: Path) -> None:
    first, second = faults(tmp_path / "first", 1.0), passes(tmp_path / "second", 2.0)
    assert names(found(second).not_cleared) == ["first"]
    assert names(found(first).not_clearing) == ["second"]
    assert "does not clear the settings" in correction_lines(found(second))[0]
    assert found(second).contradicted


def test_runs_that_agree_are_left_alone(tmp_path: Path) -> None:
    one, _ = passes(tmp_path / "one", 1.0), passes(tmp_path / "two", 2.0)
    assert corrections_beside(one) is None
    three, _ = faults(tmp_path / "f" / "three", 1.0), faults(tmp_path / "f" / "four", 2.0)
    assert corrections_beside(three) is None


def test_a_run_that_could_not_see_is_not_pooled(tmp_path: Path) -> None:
    before, _, blind = passes(tmp_path / "a", 1.0), faults(tmp_path / "b", 2.0), unseen(tmp_path / "c", 3.0)
    told = found(before)
    assert (told.runs, told.exposure, told.left_out) == (2, 90, 1)
    assert corrections_beside(blind) is None
    assert "1 inconclusive or void left out" in joint(told)


def test_a_dead_engine_and_a_bad_turn_contradict_a_pass_too(tmp_path: Path) -> None:
    before = passes(tmp_path / "a", 1.0)
    events: list[Event] = [kernel_live(), dead(T0 + 1, 1), ended(T0 + 2, "engine_dead")]
    write_run(tmp_path / "dead", events, created=2.0, load=LOAD)
    bad: list[Event] = [kernel_live(), sent(1, T0), done(1, T0 + 1, "truncated"), ended(T0 + 2, "too_many_bad")]
    write_run(tmp_path / "late-bad", bad, created=3.0, load=LOAD)
    finding = FindingMade(T0 + 90, T0 + 90, Finding("prefix-drift", "the answer drifts", says="fault"))
    write_run(tmp_path / "late-found", [*long_run(60), finding], turns=60, created=4.0, load=LOAD)
    told = found(before)
    assert names(told.outlived_by) == ["dead", "late-bad", "late-found"]
    assert "finding prefix-drift" in correction_lines(told)[0]
    assert (told.faults, told.exposure) == (3, 121), "an engine that died before its first turn is a fault too"
    assert "engine death" in correction_lines(told)[0]
    assert "truncated" in correction_lines(told)[0]


def test_a_run_that_was_cut_off_counts_by_its_events(tmp_path: Path) -> None:
    before = passes(tmp_path / "a", 1.0)
    events = [event for event in long_run(30, faults=1) if event.kind != "end"]
    write_run(tmp_path / "cut", events, result=False, turns=30, created=2.0, load=LOAD)
    assert names(found(before).outlived_by) == ["cut"]


OTHERWISE: list[dict[str, Any]] = [
    {"simulated": True},
    {"model": "another"},
    {"reproducer": "another"},
    {"load": LOAD | {"tools": 4}},
    {"load": {}},
    {"settings": {"set": {"VLLM_MOE_DMA_STAGING": "0"}}},
    {"settings": {"args": ["--max-num-seqs=1"]}},
    {"settings": {"engine": {"engine": "embedded", "config": {"threads": 2}}}},
    {"fingerprint": {"engine": "0.25.1"}},
    {"fingerprint": {"nvidia_driver": "580.95"}},
    {"host": {"cpu": "another"}},
    {"base_url": "http://127.0.0.1:2"},
]


@pytest.mark.parametrize("fields", OTHERWISE, ids=str)
def test_other_settings_say_nothing(tmp_path: Path, fields: dict[str, Any]) -> None:
    before, _ = passes(tmp_path / "a", 1.0), faults(tmp_path / "b", 2.0, **fields)
    assert corrections_beside(before) is None


def engine(pid: int, source: str, **more: Any) -> dict[str, Any]:
    setting = {"value": 1, "source": source, "obeyed": True}
    told = {"engine": "embedded", "pid": pid, "plant": {"seed": pid}, "settings": {"VLLM_MOE_DMA_STAGING": setting}}
    return told | more


SAME: list[dict[str, Any]] = [
    {"seed": 7},
    {"gates": ["ttft_p99 < 20s"]},
    {"host": {"boot_id": "another", "memory_mib": 24105}},
    {"settings": {"engine": engine(9, "environment"), "set": {"VLLM_MOE_DMA_STAGING": "1"}, "arm": "control"}},
    {"settings": {"engine": engine(9, "default", offload={"memory": {"slot_bytes": 1}})}},
]


@pytest.mark.parametrize("fields", SAME, ids=str)
def test_what_a_launch_is_dealt_is_no_setting(tmp_path: Path, fields: dict[str, Any]) -> None:
    usual = {"settings": {"engine": engine(7, "default")}, "host": {"memory_mib": 24101}, "load": LOAD}
    before = passes(tmp_path / "a", 1.0, **usual)
    faults(tmp_path / "b", 2.0, **{**usual, **fields})
    assert names(found(before).outlived_by) == ["b"]


def test_flags_are_the_same_in_any_order_but_for_those_of_one_name() -> None:
    def hashed(*flags: str) -> str:
        return settings_hash(manifest(settings={"args": list(flags)}))

    assert hashed("--b=1", "--a=2") == hashed("--a=2", "--b=1")
    assert hashed("--a=1", "--a=2") != hashed("--a=2", "--a=1")
    assert hashed("--b", "1", "--a", "2") != hashed("--b", "2", "--a", "1")


def test_launches_of_a_campaign_count_as_the_campaign_counted_them(tmp_path: Path) -> None:
    before, folder = passes(tmp_path / "before", 1.0), tmp_path / "night"
    for number, make in ((1, faults), (2, faults), (3, passes)):
        make(folder / "runs" / f"{number:04d}-control", 1.0 + number)
    launches = [launch(n, "control", result, 30.0, folder=f"runs/{n:04d}-control")
                for n, result in ((1, "faulted"), (2, "void"), (3, "clean"))]  # fmt: skip
    (folder / "journal.sqlite").touch()
    told = found(before, lambda folder: campaign([], launches))
    assert names(told.outlived_by) == ["night/runs/0001-control"]
    assert (told.runs, told.faults, told.exposure, told.left_out) == (3, 1, 150, 1)
    own = found(folder / "runs" / "0001-control", lambda folder: campaign([], launches))
    assert names(own.corrects) == ["before"]
    assert own.not_clearing == (), "launches of one campaign are for it to weigh"


def test_every_face_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, _ = passes(tmp_path / "before", 1.0), faults(tmp_path / "after", 2.0)
    html, md = tmp_path / "p.html", tmp_path / "p.md"
    assert invoke(["report", str(before), "--html", str(html), "--md", str(md)]) == 0
    terminal = " ".join(capsys.readouterr().out.split())
    for text in (terminal, " ".join(html.read_text().split()), md.read_text()):
        assert "This pass is outlived" in text
        assert "1 fault in 90 turns" in text
    assert "contradicts this verdict" in html.read_text()
    assert not (tmp_path / INDEX).exists(), "a report writes nothing beside a run"
    with RunIndex(tmp_path, keep=True) as index:
        index.refresh()
    assert names(found(before).outlived_by) == ["after"]
    alone = passes(tmp_path / "elsewhere" / "alone", 1.0)
    view = read_run(alone)
    look_beside(view)
    assert view.corrections is None
    assert "same settings" not in run_html(view)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    before = passes(tmp_path / "before", 1.0)
    bad = [kernel_live(), sent(1, T0), xid(31, T0 + 0.5, signature=HOSTILE), done(1, T0 + 1), ended(T0 + 2, "fault")]
    write_run(tmp_path / "after <script>alert(1)<", bad, created=2.0, load=LOAD)
    view = read_run(before)
    look_beside(view)
    assert "<script>alert(1)" not in run_html(view)
    assert "<script>alert(1)" not in run_markdown(view)
    stream = io.StringIO()
    console = Console(file=stream, width=100, highlight=False)
    print_report(console, view.result, view.series, before, corrections=view.corrections)
    assert "\x1b" not in stream.getvalue()


def test_a_campaign_whose_clean_launch_was_outlived(tmp_path: Path) -> None:
    folder = tmp_path / "night"
    for number in (1, 2):
        passes(folder / "runs" / f"{number:04d}-one", 1.0 + number)
    faults(tmp_path / "later", 9.0)
    launches = [launch(n, "one", result, 60.0, folder=f"runs/{n:04d}-one") for n, result in ((1, "clean"), (2, "void"))]
    (folder / "journal.sqlite").touch()
    with RunIndex(tmp_path, keep=False, campaigns=lambda folder: campaign([], launches)) as index:
        index.refresh()
        (told,) = launch_lines(outlived_launches(index, "night"))
        (row,) = list_page("runs", index.rows(), Asked(verdict="contradicted")).rows
    assert told.startswith("Clean here and outlived: night/runs/0001-one (")
    assert "later (" in told
    assert "1 fault in 90 turns" in told
    assert (row.summary.id, row.outlived, row.corrections) == ("night", True, [told])
    assert told.partition(" (")[0] in campaign_html(single(), [told])
    assert "**later runs:** Clean here" in campaign_markdown(single(), [told])


def test_the_list_is_cut_into_pages_and_shows_launches_of_one_campaign(tmp_path: Path) -> None:
    rows = [
        RunSummary(id=f"r{n:03d}", kind="run", created=float(n), verdict="pass", faults=0, exposure=1)
        for n in range(250)
    ][::-1]
    rows.append(RunSummary(id="c/runs/1", kind="launch", campaign="c"))
    page = list_page("runs", rows, Asked(page=3))
    assert (len(page.rows), page.rows[0].name, page.later) == (50, "r049", "")
    assert Asked.of_query(dict(parse_qsl(page.earlier.removeprefix("/?")))) == Asked(page=2)
    assert list_page("runs", rows, Asked(page=10**6)).rows == page.rows
    assert [row.name for row in list_page("runs", rows, Asked(of="c")).rows] == ["1"]
    assert list_page("runs", rows, Asked(order="oldest")).rows[0].name == "r000"
    odd = Asked.of_query({"verdict": "<script>", "page": "-1", "order": "x"})
    assert odd == Asked()


def test_a_run_is_followed_by_what_was_added(tmp_path: Path) -> None:
    events = long_run(20, faults=1)
    folder = write_run(tmp_path / "now", events, turns=20, result=False)
    raw = (folder / EVENTS).read_bytes()
    (folder / EVENTS).write_bytes(raw[: len(raw) // 2])
    followed = FollowedRun(folder)
    first = followed.look()
    assert 0 < first["turns"] < 20
    (folder / EVENTS).write_bytes(raw)
    now = followed.look()
    assert (now["turns"], now["planned"], now["running"]) == (20, 20, False)
    assert now["faults"] == ["Xid 31 FAULT_PDE"]
    assert now["newest"][0]["turn"] == 20
    assert now["upper_95"] == RunReader(folder).judge().result().hazard.upper_95
