"""`soak bisect` over three variables of a real vLLM, the fault planted in the plug-in: unattended, the right answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.test_bisect_worlds import SEEDS, words

pytestmark = pytest.mark.vllm


def test_one_guilty_variable_of_three(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SEEDS)
    (tmp_path / "kernel.log").touch()
    plant = {"action": "exit", "hazard": 0.4, "when": {"VLLM_MOE_DMA_STAGING": "1"}}
    fixed = {"CPU_OFFLOAD_GB": "1", "PYTHONPATH": str(tmp_path / "site"), "SOAKRIG_PLANT": json.dumps(plant)}
    argv = [sys.executable, "-m", "soakrig", "bisect", "--engine", "tiny-moe"]
    argv += ["VLLM_MOE_DMA_STAGING=1,0", "VLLM_MOE_HOT_SLOTS=8,12", "--arg:--max-num-seqs=4,1"]
    argv += ["--tools", "4", "--max-tokens", "48", "--turns", "10", "--confidence", "0.95"]
    argv += ["--kernel-log", str(tmp_path / "kernel.log"), "--runs-dir", str(tmp_path / "runs"), "--json"]
    argv += [word for name, value in fixed.items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    result = json.loads(done.stdout)
    assert done.returncode == result["exit_code"] == 0, done.stderr[-4000:]
    assert {arm["void"] for arm in result["arms"]} == {0}
    singles = words(result, "one")
    assert singles.pop("VLLM_MOE_DMA_STAGING=0") == "CLEARED"
    assert set(singles.values()) == {"FAULTS"}
    assert words(result, "add_back") == {"back:VLLM_MOE_DMA_STAGING": "FAULTS"}
    assert (result["conclusion_kind"], result["cause"]) == ("single", ["VLLM_MOE_DMA_STAGING"])
    assert result["proofs"]["VLLM_MOE_DMA_STAGING"] == "settings"
