"""The Triton kernels of the offload core without a card: run in Triton's interpreter, and what they refuse.

The interpreter is chosen when triton is first imported, so its checks run in a child process: ``interpreted/``. It
shows neither races nor graph capture; ``tests/gpu/`` does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from soakrig.engine.offload.kernels import gather, interpreted

ROOT = Path(__file__).parent.parent.parent
CHECKS = Path(__file__).parent / "interpreted"


def run_interpreted(file: Path) -> str:
    """Pytest on a file of ``interpreted/``; its output. Fails where a check failed, or none ran, or one was skipped."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", str(file)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert re.search(r"^\d+ passed in ", text, flags=re.MULTILINE), text
    return text


@pytest.mark.parametrize("name", ["gather_checks.py", "assign_checks.py"])
def test_in_the_interpreter(name: str) -> None:
    run_interpreted(CHECKS / name)


def test_every_file_of_checks_is_run() -> None:
    assert {path.name for path in CHECKS.glob("*.py")} == {"gather_checks.py", "assign_checks.py"}


def test_this_process_does_not_run_the_interpreter() -> None:
    assert not interpreted()


BANK = torch.zeros(4, 8)
IDS = torch.zeros(2, dtype=torch.int32)
BAD = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("bank", "out", "src", "dst", "said"),
    [
        (BANK, BANK.to(torch.int32), IDS, IDS, "the bank has torch.float32 [8], the output torch.int32 [8]"),
        (BANK, torch.zeros(4, 9), IDS, IDS, "the output torch.float32 [9]"),
        (BANK, BANK, IDS, IDS[:1], "two contiguous lists of one length, got [2], [1]"),
        (BANK, BANK, IDS.view(1, 2), IDS.view(1, 2), "two contiguous lists of one length, got [1, 2], [1, 2]"),
        (BANK, BANK, torch.zeros(4, dtype=torch.int32)[::2], IDS, "two contiguous lists"),
        (BANK.view(4, 2, 4).transpose(1, 2), torch.zeros(4, 4, 2), IDS, IDS, "contiguous rows, got shape [4, 4, 2]"),
        (BANK, torch.zeros(4, 16)[:, ::2], IDS, IDS, "contiguous rows, got shape [4, 8], stride (16, 2)"),
        (BANK, torch.zeros(0, 8), IDS, IDS, "rows on both sides, got 4 and 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    bank: torch.Tensor, out: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        gather(bank, out, src, dst, BAD)


@pytest.mark.parametrize("json_asked", [True, False])
def test_the_benchmark_measures_nothing_without_a_card(json_asked: bool) -> None:
    argv = [sys.executable, "benchmarks/gpu_offload.py", *(["--json"] if json_asked else [])]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if json_asked:
        said = json.loads(done.stdout)
        assert said["state"] == "skipped"
        assert "finds no CUDA device" in said["why"]
        assert said.keys() == {"state", "why", "torch", "triton"}
    else:
        assert done.stdout.startswith("skipped: torch ")
