"""Whole campaigns of `soak bisect` on the embedded engine, unattended, each with a planted fault to pin down.

Each launch draws its fault anew, as a real one would; the seeds follow from the launches' numbers, so that a campaign
goes the same way every time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

VARIABLES = (
    "VLLM_MOE_DMA_STAGING=1,0",
    "VLLM_MOE_PREFILL_GROUPS=1,0",
    "VLLM_MOE_HOT_SLOTS=6,4",
    "OMP_NUM_THREADS=1,2",
    "--arg:--max-num-seqs=8,1",
)
SEEDS = """
import json, os
mark, plant = os.environ.get("SOAKRIG_LAUNCH", ""), os.environ.get("SOAKRIG_PLANT")
if plant and "#" in mark:
    os.environ["SOAKRIG_PLANT"] = json.dumps({**json.loads(plant), "seed": int(mark.rpartition("#")[2])})
"""
"""As sitecustomize of the engine: the number of the launch is in the mark of its processes."""
Json = dict[str, Any]


def campaign(folder: Path, plant: Json) -> Json:
    """Run one to its end; its result."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SEEDS)
    (folder / "kernel.log").touch()
    fixed = {
        "CPU_OFFLOAD_GB": "1",
        "PYTHONPATH": str(folder / "site"),
        "SOAKRIG_PLANT": json.dumps({"action": "exit", **plant}),
    }
    argv = [
        sys.executable,
        "-m",
        "soakrig",
        "bisect",
        *VARIABLES,
        "--tools",
        "1",
        "--max-tokens",
        "64",
        "--turns",
        "24",
    ]
    argv += ["--kernel-log", str(folder / "kernel.log"), "--runs-dir", str(folder / "runs"), "--json"]
    argv += [word for name, value in fixed.items() for word in ("--set", f"{name}={value}")]
    argv += [f"--arg={flag}" for flag in ("--layers=2", "--experts=8", "--hidden=64", "--threads=1")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    result: Json = json.loads(done.stdout)
    assert done.returncode == result["exit_code"] == 0, done.stderr[-4000:]
    assert result["state"] == "finished"
    assert result["simulated"] is True
    assert {arm["void"] for arm in result["arms"]} == {0}
    (page,) = folder.glob("runs/*/report.html")
    assert result["conclusion"].split(".")[0][:40] in page.read_text()
    assert result["conclusion"].split(".")[0][:20] in page.with_name("report.md").read_text()
    return result


def words(result: Json, role: str) -> dict[str, str]:
    return {arm["name"]: arm["verdict"] for arm in result["arms"] if arm["role"] == role and arm["runs"]}


@pytest.mark.parametrize("hazard", [0.125, {"per_1k_context": 0.06}], ids=["constant", "rising with the context"])
def test_one_guilty_variable_of_five(tmp_path: Path, hazard: object) -> None:
    result = campaign(tmp_path, {"hazard": hazard, "when": {"VLLM_MOE_DMA_STAGING": "1"}})
    singles = words(result, "one")
    assert singles.pop("VLLM_MOE_DMA_STAGING=0") == "CLEARED"
    assert set(singles.values()) == {"FAULTS"}
    assert len(singles) == 4
    (off,) = (arm for arm in result["arms"] if arm["role"] == "all_off")
    assert off["runs"] > 0
    assert off["faults"] == 0
    assert words(result, "add_back") == {"back:VLLM_MOE_DMA_STAGING": "FAULTS"}
    assert (result["conclusion_kind"], result["cause"]) == ("single", ["VLLM_MOE_DMA_STAGING"])


def test_no_guilty_variable(tmp_path: Path) -> None:
    result = campaign(tmp_path, {"hazard": 0.125})
    assert "CLEARED" not in {arm["verdict"] for arm in result["arms"]}
    assert words(result, "all_off") == {"all-off": "FAULTS"}
    assert result["conclusion_kind"] == "not_in_list"
    assert "not in the list" in result["conclusion"]


def test_two_guilty_variables_that_are_both_needed(tmp_path: Path) -> None:
    when = {"VLLM_MOE_DMA_STAGING": "1", "VLLM_MOE_PREFILL_GROUPS": "1"}
    result = campaign(tmp_path, {"hazard": 0.125, "when": when})
    singles = words(result, "one")
    cleared = {name for name, word in singles.items() if word == "CLEARED"}
    assert cleared == {"VLLM_MOE_DMA_STAGING=0", "VLLM_MOE_PREFILL_GROUPS=0"}
    assert set(singles.values()) == {"CLEARED", "FAULTS"}
    assert result["conclusion_kind"] == "both_needed"
    assert set(result["cause"]) == set(when)
