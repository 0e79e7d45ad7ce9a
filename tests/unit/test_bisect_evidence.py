from __future__ import annotations

from dataclasses import replace

import pytest

from bisect_world import CONTROL, XID, evidence, runs
from soakrig.bisect.drift import drift_p
from soakrig.bisect.evidence import ArmRun, Evidence
from soakrig.bisect.statistics import Cell, chance_of_so_few
from soakrig.errors import RecordError

OTHER = "oom_kill"


def test_exposure_of_an_arm_is_counted_on_the_controls_clock() -> None:
    seen = evidence(("control", CONTROL), ("A", [(60, False), (24, True)]))
    # lengths 5 11 23 34 48 with 6 5 4 3 2 launches at risk
    whole = 1 / 6 + 1 / 5 + 1 / 4 + 1 / 3 + 1 / 2
    (cell,) = seen.cells("A")
    assert cell == Cell(5, pytest.approx(5.0), 1, pytest.approx(whole + 1 / 6 + 1 / 5 + 1 / 4))
    assert seen.totals("A") == {"": (1, pytest.approx(cell.arm_exposure))}


def test_only_one_signature_is_pooled() -> None:
    seen = evidence(("control", CONTROL), ("A", [(60, False), (9, True)]))
    odd = ArmRun("A", 30, 60, 50, signature=OTHER)
    seen = seen.plus(odd)
    assert seen.pooled_signature == XID
    assert [why for _, why in seen.void("A")] == [f"another fault: {OTHER}"]
    assert [run.order for run in seen.counted("A")] == [6, 7]
    asked = replace(seen, signature=OTHER)
    assert [run.order for run in asked.counted("A")] == [6, 50]


def test_the_controls_signature_outweighs_a_commoner_one_of_an_arm() -> None:
    seen = evidence(("control", CONTROL[:1]), ("A", [(9, True)] * 3))
    odd = tuple(replace(run, signature=OTHER) if run.arm == "A" else run for run in seen.runs)
    assert Evidence(odd).pooled_signature == XID


def test_another_fault_of_the_control_is_exposure_and_never_speaks_for_an_arm() -> None:
    seen = evidence(("control", CONTROL), ("A", [(60, False)] * 4))
    more = seen.plus(ArmRun("control", 59, 60, 90, signature=OTHER), ArmRun("control", 55, 60, 91, signature=OTHER))
    assert more.control_faults == {"": 5}
    assert len(more.void("control")) == 2
    assert chance_of_so_few(more.cells("A")) > chance_of_so_few(seen.cells("A"))


def test_a_void_run_counts_for_nothing_on_either_side() -> None:
    seen = evidence(("control", CONTROL), ("A", [(60, False)]))
    more = seen.plus(
        ArmRun("A", 60, 60, 90, void="variable not in effect"), ArmRun("control", 60, 60, 91, void="port taken"),
        ArmRun("A", 3, 60, 92, signature=XID, void="another process on the card"),
    )  # fmt: skip
    assert more.cells("A") == seen.cells("A")
    assert [why for _, why in more.void("A")] == ["variable not in effect", "another process on the card"]


def test_no_arm_is_held_against_another_host() -> None:
    there = runs("control", *CONTROL, first=0, stratum="host a")
    seen = Evidence((*there, *runs("A", (60, False), (60, False), first=20, stratum="host b")))
    assert seen.cells("A") == []
    both = seen.plus(*runs("A", (60, False), first=30, stratum="host a"))
    assert len(both.cells("A")) == 1
    assert both.totals("A").keys() == {"host a"}


def test_two_hosts_each_with_its_own_control() -> None:
    fast = runs("control", (2, True), (4, True), (3, True), first=0, stratum="fast")
    slow = runs("control", (50, True), (60, False), (55, True), (58, True), first=10, stratum="slow")
    arm = [*runs("A", (60, False), first=20, stratum="fast"), *runs("A", (60, False), first=21, stratum="slow")]
    cells = Evidence((*fast, *slow, *arm)).cells("A")
    assert [(cell.control_faults, cell.arm_exposure) for cell in cells] == [
        (3, pytest.approx(1 / 3 + 1 / 2 + 1)), (3, pytest.approx(1 / 4 + 1 / 3 + 1 / 2)),
    ]  # fmt: skip


def test_blocks_begin_with_a_control_and_end_after_three_faults_of_it() -> None:
    seen = evidence(
        ("control", [(9, True)] * 4), ("A", [(60, False)] * 6), ("control", [(9, True)]), ("A", [(60, False)] * 6),
        ("control", [(60, False), (9, True), (8, True)]), ("A", [(60, False)]), ("control", [(9, True)]),
    )  # fmt: skip
    assert [seen.blocks[n] for n in range(len(seen.runs))] == [0] * 10 + [1] * 11 + [2]
    assert [cell.control_faults for cell in seen.cells("A")] == [4, 3]


def test_another_fault_of_the_control_ends_no_block() -> None:
    odd = [replace(run, signature=OTHER) for run in evidence(("control", [(9, True)] * 3)).runs]
    asked = Evidence((*odd, *runs("A", (60, False), first=3), *runs("control", (9, True), first=4)), signature=XID)
    assert set(asked.blocks.values()) == {0}


def test_after_a_drift_the_old_baseline_alone_would_be_wrong() -> None:
    """The hazard falls to a third after the baseline; an arm that changes nothing then looks good beside it."""
    before = [(9, True), (20, True), (15, True), (4, True), (12, True)]
    after: list[tuple[float, bool]] = [(60, False), (60, False), (41, True), (60, False), (60, False), (22, True)]
    parts: list[tuple[str, list[tuple[float, bool]]]] = [("control", before), ("A", [(60, False)])]
    for one in after:
        parts += [("control", [one]), ("A", [(60, False)])]
    seen = evidence(*parts)
    stale = [Cell(5, 60, 0, 7 * 60)]
    assert chance_of_so_few(stale) < 1e-4
    assert chance_of_so_few(seen.cells("A")) > 0.02
    drifted, steady = drift_p(seen), drift_p(evidence(("control", CONTROL)))
    assert drifted is not None
    assert steady is not None
    assert drifted < 0.02 < 0.3 < steady


def test_drift_needs_runs_and_a_fault() -> None:
    assert drift_p(evidence(("control", [(60, False)] * 4))) is None
    assert drift_p(Evidence(())) is None


def test_runs_of_two_caps_are_not_pooled_by_count() -> None:
    seen = evidence(("control", CONTROL)).plus(ArmRun("A", 30, 30, 40))
    assert seen.cells("A")[0].control_faults == 3  # those of the first 30 turns
    with pytest.raises(RecordError, match="different caps"):
        _ = replace(seen, clock_kind="counted").clocks


@pytest.mark.parametrize(
    ("exposure", "void", "match"), [(61, "", "expected 0 to 60"), (-1, "", "expected 0 to 60"), (0, "", "did no work")]
)
def test_a_damaged_run_is_refused(exposure: float, void: str, match: str) -> None:
    with pytest.raises(RecordError, match=match):
        ArmRun("A", exposure, 60, 1, void=void)


def test_no_run_is_counted_twice() -> None:
    run = ArmRun("A", 60, 60, 1)
    with pytest.raises(RecordError, match="place 1"):
        Evidence((run, replace(run, arm="B")))
    assert ArmRun("A", 0, 60, 1, void="no boot").void
