"""The Xid catalogue and the advice drawn from it."""

from __future__ import annotations

import pytest

from soakrig.record.signal import Signal
from soakrig.soak.watch.xid import parse_xid
from soakrig.soak.watch.xid_catalogue import advice, catalogue, severity_of


def xid(number: int, text: str = "") -> Signal:
    signal = parse_xid(f"NVRM: Xid (PCI:0000:65:00): {number}, {text}")
    assert signal is not None
    return signal


def test_at_least_70_numbers_and_each_is_told_in_words() -> None:
    entries = catalogue()
    assert len(entries) >= 70
    for number, entry in entries.items():
        assert entry.number == number
        assert entry.name.replace("_", "").isalnum()
        assert entry.meaning.endswith(".")
        assert entry.source
        for text in (entry.immediate, entry.investigate):
            assert text == "" or text.endswith(".")
            assert "_" not in text  # NVIDIA's codes are put into words
        assert set(entry.causes) <= {
            "hardware", "driver", "application", "system memory corruption", "PCIe or NVLink bus", "thermal",
            "frame buffer",
        }  # fmt: skip


def test_only_what_is_purely_informational_does_not_fail_a_run() -> None:
    mild = {n: e.severity for n, e in catalogue().items() if e.severity != "fault"}
    assert mild == {
        63: "warning", 92: "warning", 93: "warning", 162: "info", 163: "warning", 164: "warning", 165: "warning",
    }  # fmt: skip
    assert severity_of(4711) == "fault"


def test_the_tables_advice_names_meaning_and_both_actions() -> None:
    text = advice(xid(79, "GPU has fallen off the bus."))
    assert "PCIe" in text
    assert "Reboot the host." in text
    assert "support" in text


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        (1, "GPU Reset Required", "asks for a GPU reset"),
        (2, "Node Reboot Required", "asks for a reboot of the host"),
        (4, "Drain and Reset", "then to reset it"),
        (8, "Swap The Board", "verdict on the GPU: Swap The Board"),
    ],
)
def test_the_drivers_own_verdict_beats_the_table(code: int, name: str, words: str) -> None:
    verdict = xid(154, f"GPU recovery action changed from 0x0 (None) to 0x{code:x} ({name})")
    assert words in advice(verdict)
    assert "changed its own verdict" not in advice(verdict)  # the line speaks for itself
    beside = advice(xid(31, "Ch 00000001"), [verdict])
    assert words in beside
    assert "Restart the application" not in beside


def test_the_last_verdict_of_several_counts() -> None:
    first = xid(154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)")
    last = xid(154, "GPU recovery action changed from 0x4 (Drain and Reset) to 0x1 (GPU Reset Required)")
    assert "asks for a GPU reset" in advice(xid(149), [first, last])


def test_an_unknown_number_is_called_a_fault() -> None:
    assert "treat it as a fault" in advice(xid(4711))


def test_nothing_is_said_of_a_kind_without_advice() -> None:
    assert advice(Signal("segfault", "kernel_log", "warning", "x")) == ""
    assert "host memory" in advice(Signal("oom_kill", "kernel_log", "fault", "x"))
