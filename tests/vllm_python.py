"""The Python that has vLLM; without one the suite is skipped, saying why, but in CI it has to run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soakrig.engine.vllm.installation import find_installation
from soakrig.errors import PreflightRefusedError


def vllm_python() -> Path:
    """Its path. Skips the test where there is none, and fails it in CI."""
    try:
        return find_installation().python
    except PreflightRefusedError as error:
        if os.environ.get("CI") == "true":
            raise AssertionError(f"CI has to run this: {error}") from error
        pytest.skip(str(error))
