"""A vLLM of the registry is served, answers a canary, and ends with its supervisor however that ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from e2e.serving import Box, all_ended
from vllm_python import vllm_python

pytestmark = pytest.mark.vllm
EXTRA = """
[models.{one}-vllm]
backend = "vllm"
checkpoint = "tiny-moe"
context = 2048
validated_context = 2048
host_ram_gib = 2.5
slot = ""
canary = {{ accept = "anything" }}
"""


def test_a_vllm_of_the_registry(tmp_path: Path) -> None:
    vllm_python()
    with Box(tmp_path, EXTRA) as box:
        box.one = f"{box.one}-vllm"
        box.run("serve", box.one, "--detach")
        launch = box.launch(box.one)
        assert launch.supervisor is not None
        now = box.status(box.one)
        assert (now["state"], now["pid"]) == ("ready", launch.root.pid if launch.root else 0)
        os.kill(launch.supervisor.pid, signal.SIGKILL)
        box.gone(box.one)
        all_ended(launch)
