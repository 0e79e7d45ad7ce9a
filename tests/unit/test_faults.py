"""Faults: which signals are one event, which belong to it, and which are faults of their own."""

from __future__ import annotations

from typing import Any

import pytest

from soakrig.record.exposure import Moment, Span
from soakrig.record.faults import FaultBook
from soakrig.record.result import Fault
from soakrig.record.signal import Signal

GPU, OTHER_GPU = "0000:01:00", "0000:02:00"


def xid(at: float, number: int = 31, **fields: Any) -> Signal:
    base: dict[str, Any] = {"time": at + 1e6, "mono": at, "xid": number, "pci": GPU, "signature": f"Xid {number}"}
    source, severity = fields.pop("source", "kernel_log"), fields.pop("severity", "fault")
    return Signal("xid", source, severity, f"{number}@{at}", **{**base, **fields})


def nvml(at: float, number: int = 31, **fields: Any) -> Signal:
    return xid(at, number, source="nvml", **fields)


def exited(at: float, **fields: Any) -> Signal:
    base: dict[str, Any] = {"severity": "fault", "signature": "engine exited", **fields}
    return Signal("process_exit", "process", raw=f"exit@{at}", time=at + 1e6, mono=at, **base)


def faults(*signals: Signal, simulated: bool = False) -> list[Fault]:
    book = FaultBook()
    for signal in signals:
        book.add(signal, Moment(None, False, [], 0.0))
    return book.faults(simulated=simulated)


@pytest.mark.parametrize(("apart", "signals"), [(1.9, 1), (-1.9, 1), (2.1, 2), (-2.1, 2)])
def test_nvml_s_word_within_two_seconds_of_the_kernel_log_s_is_the_same_event(apart: float, signals: int) -> None:
    (fault,) = faults(xid(100.0), nvml(100.0 + apart))
    assert fault.signals == signals


def test_nvml_s_word_much_later_is_another_fault() -> None:
    assert [fault.source for fault in faults(xid(100.0), nvml(112.1))] == ["kernel_log", "nvml"]


def test_another_gpu_and_another_number_are_other_events() -> None:
    assert [fault.pci for fault in faults(xid(100.0), nvml(100.5, pci=OTHER_GPU))] == [GPU, OTHER_GPU]
    (fault,) = faults(xid(100.0, 31), nvml(100.5, 43))
    assert (fault.xid, fault.signals) == (31, 2), "clean-up of the same GPU"


def test_an_xid_that_only_nvml_saw_is_a_fault() -> None:
    (fault,) = faults(nvml(100.0))
    assert (fault.source, fault.xid, fault.signals) == ("nvml", 31, 1)


@pytest.mark.parametrize(("apart", "found"), [(-5.1, 2), (-4.9, 1), (29.0, 1), (31.0, 2)])
def test_a_process_exit_belongs_to_an_xid_from_5_s_before_to_30_s_after(apart: float, found: int) -> None:
    got = faults(xid(100.0), exited(100.0 + apart))
    assert len(got) == found
    assert sorted(fault.signature for fault in got) == sorted(["Xid 31", "engine exited"][:found])
    assert sum(fault.signals for fault in got) == 2


def test_what_follows_a_process_exit_belongs_to_that() -> None:
    log_line = Signal("death_line", "engine_log", "fault", "EngineDeadError", time=1e6, mono=51.0)
    (fault,) = faults(exited(50.0), log_line)
    assert (fault.signature, fault.signals) == ("engine exited", 2)
    late = Signal("death_line", "engine_log", "fault", "EngineDeadError", time=1e6 + 81.0, mono=81.0)
    assert [f.signature for f in faults(exited(50.0), late)] == ["engine exited", "engine_log: death_line"]


def test_faults_come_in_order_of_time() -> None:
    assert [fault.time for fault in faults(exited(300.0), xid(200.0), exited(50.0))] == [1000050, 1000200, 1000300]


@pytest.mark.parametrize("severity", ["warning", "info"])
def test_what_is_no_fault_makes_none(severity: str) -> None:
    assert faults(xid(100.0, severity=severity), nvml(200.0, severity=severity)) == []
    assert faults(exited(300.0, severity=severity)) == []


def test_a_warning_before_a_fault_is_counted_as_its_forerunner() -> None:
    (fault,) = faults(xid(90.0, 63, severity="warning"), xid(100.0))
    assert (fault.xid, fault.signals) == (31, 2)


def injected(*signals: Signal) -> list[str]:
    book = FaultBook()
    for signal in signals:
        book.add(signal, Moment(None, False, [], 0.0))
    return [signal.raw for signal in book.injected()]


def test_of_injected_lines_only_fault_lines_speak_against_a_run() -> None:
    lines = [xid(1.0, injected=True), xid(2.0, 63, severity="warning", injected=True)]
    lines += [xid(3.0, 13, severity="info", injected=True), xid(4.0)]
    assert injected(*lines) == ["31@1.0"]


def test_an_injected_line_is_a_fault_only_of_a_simulated_run() -> None:
    planted = xid(1.0, injected=True)
    assert faults(planted) == []
    (fault,) = faults(planted, simulated=True)
    assert fault.injected


def test_an_injected_line_does_not_hide_what_nvml_saw() -> None:
    (fault,) = faults(xid(1.0, injected=True), nvml(1.2))
    assert (fault.source, fault.injected) == ("nvml", False)


def test_a_fault_carries_its_headline_and_the_turn_that_was_in_flight() -> None:
    book = FaultBook()
    headline = xid(10.0, pid=77, process="python3", detail={"advice": "restart the application"})
    first, second = Span(2, 9, 12_345, 8.0), Span(0, 4, 999, 9.0)
    book.add(headline, Moment(first, True, [(2, 9), (0, 4)], 123.4567))
    book.add(exited(11.0), Moment(second, True, [(0, 4)], 124.0))
    (fault,) = book.faults(simulated=False)
    assert (fault.conversation, fault.turn, fault.context_tokens) == (2, 9, 12_345)
    assert (fault.attribution, fault.in_flight) == ("several", [(2, 9), (0, 4)])
    assert (fault.seconds_under_load, fault.time) == (123.457, 1_000_010.0)
    assert (fault.pid, fault.process, fault.pci, fault.raw) == (77, "python3", GPU, "31@10.0")
    assert fault.advice == "restart the application"


@pytest.mark.parametrize(
    ("moment", "attribution"),
    [
        (Moment(Span(0, 1, 1, 0.0), True, [(0, 1)], 0.0), "exact"),
        (Moment(Span(0, 1, 1, 0.0), True, [(0, 1), (1, 1)], 0.0), "several"),
        (Moment(Span(0, 1, 1, 0.0), False, [], 0.0), "nearest"),
        (Moment(None, False, [], 0.0), "none"),
    ],
)
def test_attribution_says_how_sure_the_turn_is(moment: Moment, attribution: str) -> None:
    book = FaultBook()
    book.add(xid(1.0), moment)
    assert book.faults(simulated=False)[0].attribution == attribution
