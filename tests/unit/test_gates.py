from __future__ import annotations

import pytest

from soakrig.errors import UsageError
from soakrig.record.gates import FIGURES, parse_gate


def test_units_are_brought_to_the_figure_s_own() -> None:
    assert parse_gate("ttft_p99 < 20s").limit == 20.0
    assert parse_gate("ttft_p99<1500ms").limit == 1.5
    assert parse_gate("decode_p50 >= 15 tok/s").limit == 15.0
    assert parse_gate(" ok_rate  >=  99.5 % ").text == "ok_rate >= 99.5 %"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft_p99", "is no gate"),
        ("ttft_p99 < fast", "is no gate"),
        ("ttft_p95 < 2s", "was meant"),
        ("latency < 2s", "does not exist"),
        ("ttft_p99 < 2%", "measured in s"),
        ("decode_p50 > 3s", "measured in tok/s"),
        ("turns > 60s", "plain number"),
        ("ttft_p99 == 2s", "is no gate"),
    ],
)
def test_bad_gates_say_what_was_meant(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_gate(text)
    assert caught.value.exit_code == 64
    assert caught.value.remedy


def test_every_figure_can_be_read_from_an_empty_result(empty_result) -> None:
    for name in FIGURES:
        held = parse_gate(f"{name} >= 0").check(empty_result).held
        assert held in (True, None)
    assert parse_gate("ttft_p99 < 1s").check(empty_result).held is None, "not measured is not held"
