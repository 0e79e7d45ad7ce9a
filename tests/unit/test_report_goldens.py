"""Every terminal report beside the campaign's, as golden texts of 100 columns."""

from __future__ import annotations

from functools import cache

import pytest

from report_golden import GOLDEN, renderings
from soakrig.reports.terminal import WIDTH

NAMES = sorted(path.name for path in GOLDEN.iterdir())


@cache
def made() -> dict[str, str]:
    return renderings()


@pytest.mark.parametrize("name", NAMES)
def test_golden(name: str) -> None:
    text = made()[name]
    assert text == (GOLDEN / name).read_text("utf-8"), "python tests/report_golden.py writes it anew"
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "\x1b" not in text


def test_no_golden_text_is_missing_or_left_over() -> None:
    assert sorted(made()) == NAMES
