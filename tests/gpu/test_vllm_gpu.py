"""The plug-in on a card: the bits of stock vLLM, eager and with captured graphs. Needs CUDA and vLLM; else says so."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from soakrig.engine.offload.counters import COUNTERS
from soakrig.engine.vllm.installation import find_installation
from soakrig.engine.vllm.tiny import make_tiny
from soakrig.engine.vllm.tiny_spec import TinySpec
from soakrig.errors import PreflightRefusedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
TOP_K = 4
CASES = {
    "lru": {"VLLM_MOE_HOT_SLOTS": "8", "VLLM_MOE_SLOT_POLICY": "lru"},
    "clock": {"VLLM_MOE_HOT_SLOTS": "16", "VLLM_MOE_SLOT_POLICY": "clock"},
    "in place": {"CPU_OFFLOAD_GB": "1", "VLLM_MOE_DMA_STAGING": "0"},
}


def serve(folder: Path, cases: dict[str, dict[str, str]], *, eager: bool) -> dict[str, Any]:
    """One process of vLLM, through the driver of the CPU tests."""
    try:
        installation = find_installation()
    except PreflightRefusedError as error:
        pytest.skip(str(error))
    if installation.cpu:
        pytest.skip(f"{installation.text} is built for the CPU")
    rng = random.Random(1)
    prompts = [[rng.randrange(300, 900) for _ in range(length)] for length in (4, 150, 1200)]
    job = {
        "model": str(folder / "model"), "eager": eager, "prompts": prompts, "tokens": 32, "cases": cases, "cuda": True,
        # Graphs hold what routes to no more experts than there are staging rows; the Triton kernel takes row numbers.
        "engine": {"max_cudagraph_capture_size": 64 // TOP_K, "kernel_config": {"moe_backend": "triton"}},
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    driver = Path(__file__).parents[1] / "vllm/equality_driver.py"
    python = str(installation.python) if installation.python.exists() else sys.executable
    argv = [python, str(driver), str(folder / "job.json"), str(folder / "out.json")]
    subprocess.run(argv, check=True, cwd=folder, timeout=180, stdin=subprocess.DEVNULL)
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_every_case_gives_the_bits_of_stock(eager: bool, tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", TinySpec(top_k=TOP_K))
    stock = serve(tmp_path, {}, eager=eager)["stock"]["answers"]
    served = serve(tmp_path, CASES, eager=eager)
    for case, said in served.items():
        assert said["answers"] == stock, case
        assert sum(layer[0][COUNTERS.index("unique")] for layer in said["report"]["counters"]) > 0
        assert said["report"]["memory"]["bank_bytes_pinned"] == said["report"]["memory"]["bank_bytes_asked"]
