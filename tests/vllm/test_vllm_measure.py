"""A decode step of a real vLLM, taken apart by its own profiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from soakrig.reproducers.measure.folder import MeasureFolder
from soakrig.reproducers.measure.profile import measure_profile
from soakrig.reproducers.measure.sides import Bench, Side
from vllm_python import vllm_python

pytestmark = pytest.mark.vllm


def test_where_a_decode_step_goes(tmp_path: Path) -> None:
    vllm_python()
    with MeasureFolder(tmp_path, "profile", {}) as folder:
        table = measure_profile(Bench("tiny-moe", start_s=1800.0), Side("x"), folder, 12)
    assert table["verdict"] == "pass"
    assert table["steps"] == 11, "the first of the 12 tokens comes with the prefill"
    rows = {row["what"]: row["ms"] for row in table["rows"]}
    assert all(rows[name] > 0 for name in ("experts", "attention", "dense GEMM"))
    assert 0 < table["busy_ms"] <= table["wall_ms"], "on a CPU operators of one thread do not overlap"
