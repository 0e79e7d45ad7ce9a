"""A folder that an earlier version left is read, judged again to the same verdict, and shown by every face."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from soakrig.cli.main import invoke
from soakrig.reports.run_page import run_html, run_markdown
from soakrig.reports.run_view import read_run

OLDER = Path(__file__).parents[1] / "fixtures" / "runs" / "before-findings"


def test_an_older_folder_is_read_and_judged_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = json.loads((OLDER / "result.json").read_text())
    folder = Path(shutil.copytree(OLDER, tmp_path / "runs" / kept["run_id"]))
    view = read_run(folder)
    assert view.stored
    assert view.missing == []
    again = read_run(folder, rejudge=True).result
    assert (again.verdict, again.reasons, again.outcomes) == (kept["verdict"], kept["reasons"], kept["outcomes"])
    assert [fault.signature for fault in again.faults] == [fault["signature"] for fault in kept["faults"]]
    assert kept["faults"][0]["signature"] in run_html(view)
    assert "SIMULATED" in run_markdown(view)
    assert [case.name for case in view.faults[0].cases] == ["02-xid"]
    assert invoke(["report", str(folder), "--rejudge", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert invoke(["compare", str(folder), str(folder), "--json"]) == 0
