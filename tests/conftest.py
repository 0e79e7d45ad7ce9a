"""Fixtures that several test modules share."""

from __future__ import annotations

import pytest

from builders import manifest
from soakrig.record.judge import Judge
from soakrig.record.result import Result


@pytest.fixture
def empty_result() -> Result:
    """What a judge says that has seen nothing."""
    return Judge(manifest()).result()
