"""Grouping of signals into incidents."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from soakrig.record.incident import Incident, IncidentGrouper, group_incidents
from soakrig.record.signal import Signal

A, B = "0000:17:00", "0000:ca:00"


def xid(at: float, number: int, pci: str | None = A, **more: Any) -> Signal:
    severity = more.pop("severity", "fault")
    return Signal("xid", "kernel_log", severity, f"{number}@{at}", mono=at, xid=number, pci=pci,
                  signature=f"Xid {number}", **more)  # fmt: skip


def other(at: float, kind: str, severity: Any = "fault", pci: str | None = None, **detail: Any) -> Signal:
    return Signal(kind, "kernel_log", severity, f"{kind}@{at}", mono=at, pci=pci, detail=detail)


def shape(incidents: list[Incident]) -> list[tuple[str, list[str], list[str]]]:
    return [(i.headline.raw, [s.raw for s in i.precursors], [s.raw for s in i.aftermath]) for i in incidents]


def test_a_burst_is_one_incident_named_after_its_first_fault() -> None:
    got = group_incidents([xid(1.0, 31), xid(1.001, 43), xid(1.002, 45), xid(1.5, 31)])
    assert shape(got) == [("31@1.0", [], ["43@1.001", "45@1.002", "31@1.5"])]
    assert got[0].signature == "Xid 31"
    assert (got[0].count, got[0].first, got[0].last) == (4, 1.0, 1.5)


def test_an_exception_before_an_mmu_fault_is_its_precursor() -> None:
    assert shape(group_incidents([xid(1, 13), xid(2, 31)])) == [("31@2", ["13@1"], [])]


def test_late_teardown_is_aftermath_but_a_new_fault_is_not() -> None:
    got = group_incidents([xid(0, 31), xid(62, 13), xid(100, 31)])
    assert shape(got) == [("31@0", [], ["13@62"]), ("31@100", [], [])]


def test_teardown_after_two_minutes_stands_alone() -> None:
    assert len(group_incidents([xid(0, 31), xid(121, 13)])) == 2
    assert len(group_incidents([xid(0, 31), xid(119, 13)])) == 1


def test_gpus_are_apart_except_for_verdicts_and_clean_up() -> None:
    assert len(group_incidents([xid(0, 31, A), xid(0.1, 31, B)])) == 2
    assert shape(group_incidents([xid(0, 149, A), xid(1, 154, B), xid(2, 45, B)])) == [("149@0", [], ["154@1", "45@2"])]
    assert len(group_incidents([xid(0, 31, A), xid(30, 45, B)])) == 2


def test_a_line_goes_to_the_incident_of_its_own_gpu() -> None:
    got = group_incidents([xid(0, 31, A), xid(0.1, 31, B), xid(0.2, 45, A)])
    assert shape(got) == [("31@0", [], ["45@0.2"]), ("31@0.1", [], [])]


def test_pcie_warnings_before_a_lost_gpu_are_precursors_with_a_limit() -> None:
    early = other(-200, "aer", "warning", "0000:00:03")
    near = other(0, "aer", "warning", "0000:00:03")
    assert shape(group_incidents([early, near, xid(30, 79)])) == [("79@30", ["aer@0"], [])]


def test_warnings_alone_are_no_incident() -> None:
    assert group_incidents([other(0, "aer", "warning"), xid(1, 63, severity="warning")]) == []


def test_the_bus_lost_line_is_the_same_event_whichever_comes_first() -> None:
    for signals in ([other(0, "bus_lost", pci=A), xid(0.1, 79)], [xid(0, 79), other(0.1, "bus_lost", pci=A)]):
        (incident,) = group_incidents(signals)
        assert incident.headline.xid == 79
        assert [s.kind for s in incident.aftermath] == ["bus_lost"]


def test_a_dead_gsp_leads_to_the_verdict_45_seconds_later() -> None:
    signals = [other(0, "nvrm_other"), other(0.1, "gsp_ratelimit", pci=A), xid(45, 154)]
    assert shape(group_incidents(signals)) == [("154@45", ["nvrm_other@0", "gsp_ratelimit@0.1"], [])]


def test_a_hung_task_belongs_to_the_fault_that_it_began_with() -> None:
    assert len(group_incidents([xid(0, 119), other(170, "hung_task", secs=122)])) == 1
    assert len(group_incidents([xid(0, 119), other(250, "hung_task", secs=122)])) == 2


def test_injected_lines_and_other_boots_are_kept_apart() -> None:
    assert len(group_incidents([xid(0, 31), xid(0.1, 43, injected=True)])) == 2
    assert len(group_incidents([xid(0, 31, detail={"boot_id": "a"}), xid(0.1, 43, detail={"boot_id": "b"})])) == 2


def test_quotations_identities_and_gaps_are_no_members() -> None:
    notes = [other(0.1, kind, "info", A) for kind in ("quoted", "gpu_ident", "gap")]
    assert shape(group_incidents([xid(0, 31), *notes])) == [("31@0", [], [])]


def test_the_drivers_last_verdict_is_the_incidents() -> None:
    verdicts = [
        xid(n, 154, detail={"recovery_to": to}) for n, to in ((1, "Drain and Reset"), (2, "GPU Reset Required"))
    ]
    (incident,) = group_incidents([xid(0, 149), *verdicts])
    assert incident.recovery == "GPU Reset Required"
    assert group_incidents([xid(0, 31)])[0].recovery is None


SIGNALS = st.lists(
    st.builds(
        xid,
        st.floats(0, 400).map(lambda t: round(t, 3)),
        st.sampled_from([13, 31, 43, 45, 63, 79, 119, 154]),
        st.sampled_from([A, B, None]),
        severity=st.sampled_from(["fault", "warning", "info"]),
    ),
    max_size=30,
)


@given(SIGNALS)
def test_every_fault_is_in_exactly_one_incident_and_one_at_a_time_is_the_same(signals: list[Signal]) -> None:
    whole = group_incidents(signals)
    members = [id(s) for i in whole for s in i.signals]
    assert len(members) == len(set(members))
    assert {id(s) for s in signals if s.severity == "fault"} <= set(members)
    grouper = IncidentGrouper()
    for signal in sorted(signals, key=lambda s: s.mono):
        grouper.add(signal)
    assert shape(grouper.incidents) == shape(whole)
    for incident in whole:
        assert incident.headline.severity == "fault"
        assert all(s.mono <= incident.headline.mono for s in incident.precursors)
        assert incident.first <= incident.headline.mono <= incident.last
