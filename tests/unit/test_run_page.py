"""The report of a run as a page, as Markdown and as JUnit XML: whole, inert, and of any folder that can be read."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from xml.etree import ElementTree as Tree

import pytest

from builders import T0, done, kernel_live, sent, xid
from html_page import assert_marked_up
from run_folders import HOSTILE, long_run, write_case, write_run
from soakrig.cli.main import invoke
from soakrig.errors import RecordError
from soakrig.record.events import RunEnded
from soakrig.record.store import EVENTS, RESULT
from soakrig.reports.junit import junit_xml
from soakrig.reports.run_chart import BINS, run_chart
from soakrig.reports.run_page import run_html, run_markdown
from soakrig.reports.run_view import read_run

SETTINGS = {
    "set": {"VLLM_MOE_DMA_STAGING": "1", "HF_TOKEN": "hf_hunter2hunter2"},
    "args": ["--max-num-seqs=1"],
    "engine": {
        "engine": "embedded", "pid": 7,
        "settings": {"OMP_NUM_THREADS": {"value": 4, "source": "default", "obeyed": True},
                     "VLLM_MOE_DMA_STAGING": {"value": 1, "source": "environment", "obeyed": False}},
    },
}  # fmt: skip


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    fault, bad = xid(31, T0 + 2.5, signature="Xid 31 FAULT_PDE"), done(2, T0 + 3, "truncated", why=HOSTILE)
    events = [
        kernel_live(),
        sent(1, T0),
        done(1, T0 + 1),
        sent(2, T0 + 2),
        fault,
        bad,
        RunEnded(T0 + 4, T0 + 4, "fault"),
    ]
    folder = write_run(
        tmp_path / "faulty", events, settings=SETTINGS, gates=["ttft_p99 < 20s"], fingerprint={"a": HOSTILE}
    )
    request = {"messages": [{"role": "user", "content": "secret words"}, {"role": "tool", "content": "x"}],
               "tools": [{}, {}], "max_tokens": 64, "stream": True}  # fmt: skip
    write_case(folder, "01-xid", T0 + 2.5, log=f"first line\n{HOSTILE}\nlast line\n", **request)
    write_case(folder, "02-late", T0 + 900)
    return folder


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_the_page_is_whole_and_asks_for_nothing(faulty: Path) -> None:
    html = run_html(read_run(faulty))
    assert not re.findall(r"(?:src|href)=\"(?!#)", html), "no address in it"
    assert "url(" not in html
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html, "no other script runs"
    data = re.search(r'<script type="application/json" id="turns-data">(.*?)</script>', html, re.S)
    assert data is not None
    turns = json.loads(data[1])
    assert (turns["turn"], turns["outcomes"], turns["outcome"]) == ([1, 2], ["ok", "truncated"], [0, 1])
    assert turns["why"]["1"].startswith("</script>"), "as it was, for the script to write as text"


def test_headings_tables_and_boxes_are_marked_up(faulty: Path, tmp_path: Path) -> None:
    control = read_run(write_run(tmp_path / "control", long_run(2)))
    assert_marked_up(run_html(read_run(faulty), control))
    assert_marked_up(run_html(control))


def test_what_a_fault_opens_to(faulty: Path) -> None:
    html = run_html(read_run(faulty))
    fault = html[html.index('id="fault-1"') : html.index('<section aria-labelledby="turns">')]
    told = text_of(fault)
    assert "Xid 31 FAULT_PDE" in told
    assert "turn 2 of conversation 0, 7,200 context tokens" in told
    assert "1 user, 1 tool messages, 2 tools, max_tokens 64, streamed" in told
    assert "nvml.temperature_c" in told
    assert "last line" in told
    assert "secret words" not in html, "the request's shape, not its text"
    others = html[html.index("Evidence that belongs to no fault") :]
    assert "02-late" in others
    assert "02-late" not in fault


def test_no_text_of_the_run_becomes_markup(faulty: Path) -> None:
    html, markdown = run_html(read_run(faulty)), run_markdown(read_run(faulty))
    assert "<b>" not in html
    assert html.count("<script") == 2
    assert "\x1b" not in html + markdown
    assert "\u202e" not in html + markdown
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", markdown)
    assert "](http" not in outside
    assert "<b>" not in outside
    for page in (html, markdown):
        assert "hunter2" not in page


def test_the_settings_and_what_differs(faulty: Path, tmp_path: Path) -> None:
    control = write_run(tmp_path / "control", long_run(2), settings={**SETTINGS, "set": {"VLLM_MOE_DMA_STAGING": "0"}})
    html = run_html(read_run(faulty), read_run(control))
    value = "<code>(.*?)</code>"
    rows = re.findall(f'<th scope="row">{value}</th><td class="same">{value}</td><td class="changed">{value}', html)
    assert ("set VLLM_MOE_DMA_STAGING", "0", "1") in rows
    assert "flag --max-num-seqs" not in [name for name, *_ in rows], "the same in both"
    assert re.search(
        r"VLLM_MOE_DMA_STAGING</code></th><td class=\"changed\"><code>1</code></td><td>environment</td><td>NO", html
    )
    markdown = run_markdown(read_run(faulty), read_run(control))
    assert "| `set VLLM_MOE_DMA_STAGING` | `0` | `1` |" in markdown
    assert "None." in run_markdown(read_run(control), read_run(control))


def test_simulated_is_said_everywhere(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", long_run(3), simulated=True)
    view = read_run(folder)
    assert "<title>SIMULATED" in run_html(view)
    assert "banner" in run_html(view)
    assert run_markdown(view).startswith("> **SIMULATED**")
    assert b"SIMULATED" in junit_xml(view.result, 1.0)
    clean = read_run(write_run(tmp_path / "clean", long_run(3)))
    assert "SIMULATED" not in run_html(clean).replace('{"SIMULATED', "")


def test_a_folder_cut_at_any_byte_still_reports(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", long_run(6, faults=1), result=False)
    lines = (whole / EVENTS).read_bytes()
    for n, cut in enumerate(range(0, len(lines) + 1, 97)):
        folder = write_run(tmp_path / f"cut{n}", [], result=False, turns=6)
        (folder / EVENTS).write_bytes(lines[:cut])
        view = read_run(folder)
        assert any("result.json" in text for text in view.missing)
        assert "verdict was derived again" in run_html(view)
        assert run_markdown(view)
        assert junit_xml(view.result, view.wall_s)
    (folder / RESULT).write_bytes(b'{"schema": 1, "ver')
    view = read_run(folder)
    assert not view.stored
    assert any("result.json" in text and "cannot be read" in text for text in view.missing)
    (folder / EVENTS).write_bytes(b"nonsense\n" + lines)
    with pytest.raises(RecordError, match="line 1 is no event"):
        read_run(folder)
    (folder / EVENTS).unlink()
    assert any("events" in text for text in read_run(folder).missing)


def test_evidence_that_is_broken_is_told(faulty: Path) -> None:
    case = faulty / "evidence" / "01-xid"
    (case / "samples.jsonl").write_bytes(b'{"values": {"a": 1}, "source": "nvml"}\n{"cut')
    (case / "c0000-t00002.json").write_bytes(b"{")
    (case / "cause.json").unlink()
    view = read_run(faulty)
    assert any("c0000-t00002.json: no JSON" in text for text in view.missing)
    assert any("samples.jsonl: a broken line" in text for text in view.missing)
    assert "01-xid" in [one.name for one in view.other_cases], "without its cause it belongs to no fault"
    assert "c0000-t00002.json: no JSON" in run_html(view)


def test_the_timeline_keeps_peaks_and_faults(tmp_path: Path) -> None:
    view = read_run(write_run(tmp_path / "run", long_run(5000, faults=4, bad_every=1000)))
    chart = run_chart(view)
    assert chart is not None
    assert [panel.label for panel in chart.panels] == ["TTFT", "decode", "context", "engine memory", "KV cache in use"]
    assert [mark.number for mark in chart.marks] == [1, 2, 3, 4]
    ttft = chart.panels[0]
    assert (ttft.low, ttft.high) == ("0", "0.59")
    assert len(re.findall(r",", ttft.line)) <= BINS
    assert sum(one.outcome == "truncated" for one in chart.strip) == 5
    assert all(chart.left <= mark.x <= chart.right for mark in chart.marks)
    assert run_chart(read_run(write_run(tmp_path / "none", []))) is None


def test_junit(faulty: Path, tmp_path: Path) -> None:
    root = Tree.fromstring(junit_xml(read_run(faulty).result, 2.5))
    cases = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert cases["verdict"] == ["failure"]
    assert cases["gate ttft_p99 < 20s"] == []
    assert cases["fault 1: Xid 31 FAULT_PDE"] == ["failure"]
    assert cases["turns truncated"] == ["failure"]
    assert (root.get("tests"), root.get("failures"), root.get("errors"), root.get("skipped")) == ("4", "3", "0", "0")
    clean = write_run(tmp_path / "clean", long_run(3), turns=3)
    root = Tree.fromstring(junit_xml(read_run(clean).result, 1.0))
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("1", "0", "0")
    short = write_run(tmp_path / "short", long_run(3), turns=5)
    root = Tree.fromstring(junit_xml(read_run(short).result, 1.0))
    assert [child.tag for child in root.iter("testcase").__next__()] == ["error"], "inconclusive is never green"


def test_the_command_writes_every_face(
    faulty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["report", str(faulty), "--html", "r.html", "--md", "r.md", "--junit", "r.xml", "--csv", "r.csv"]
    assert invoke([*words, "--parquet", "r.parquet"]) == 1
    assert {"r.html", "r.md", "r.xml", "r.csv", "r.parquet"} <= {path.name for path in tmp_path.iterdir()}
    import pandas as pd

    assert list(pd.read_parquet("r.parquet")["outcome"]) == list(pd.read_csv("r.csv")["outcome"]) == ["ok", "truncated"]
    assert not pd.read_csv("r.csv")["simulated"].any()
    capsys.readouterr()
    for option in ("--html", "--md", "--junit", "--csv", "--parquet"):
        assert invoke(["report", str(faulty), option, "no/such/place"]) == 64
        assert f"{option} no/such/place cannot be written" in capsys.readouterr().err
    assert invoke(["report", str(faulty), "--against", str(faulty)]) == 64
    assert "`soak compare A B`" in capsys.readouterr().err
    (faulty / RESULT).write_text("{")
    assert invoke(["report", str(faulty)]) == 1
    assert "it left no result.json that can be read" in capsys.readouterr().out
    assert invoke(["report", str(faulty), "--rejudge"]) == 1
    assert json.loads((faulty / RESULT).read_text())["verdict"] == "fail"
