"""Fixtures that several test modules share."""

from __future__ import annotations

import hypothesis
import pytest

from builders import manifest
from soakrig.record.judge import Judge
from soakrig.record.result import Result

# The same examples every time: a gate that finds a new case at random fails for changes that did not cause it. And no
# deadlines: how long an example takes is the machine's business.
hypothesis.settings.register_profile("gate", derandomize=True, deadline=None)
hypothesis.settings.load_profile("gate")


@pytest.fixture
def empty_result() -> Result:
    """What a judge says that has seen nothing."""
    return Judge(manifest()).result()
