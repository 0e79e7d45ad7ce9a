"""Memory of the tool over thousands of turns, by the benchmark that makes the figure, at a third of its length."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks/long_soak.py"


@pytest.mark.slow
def test_memory_stays_flat_and_the_events_give_the_same_result(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    argv = [sys.executable, str(BENCHMARK), "--turns", "8000", "--json", str(figures), "--keep", str(tmp_path)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(figures.read_text())
    assert seen["outcomes"] == {"ok": 8000}
    assert (seen["verdict"], seen["exit_code"], seen["rejudged_the_same"]) == ("pass", 0, True)
    assert seen["rss_peak_ratio"] < 1.10
    assert seen["samples"] >= 20
