"""Claims that a run with the same settings speaks against: a pass that a later fault outlived, and the other way round.

Runs are pooled where this tool judged them (pass or fail) under the same settings (``record.same_settings``). An
inconclusive run is left out: what it did not see is not clean. Launches of a campaign count as their campaign counted
them; between launches of one campaign nothing is told, since that is what a campaign does. A simulated run has settings
of its own, so that it never speaks for or against a real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from soakrig.record.hazard import upper_95
from soakrig.record.run_index import RunIndex
from soakrig.record.run_summary import LAUNCHES, CampaignReader, RunSummary, is_campaign


@dataclass(frozen=True, slots=True)
class Corrections:
    """What other runs of the same settings say to ``run``'s verdict; every list has the oldest first.

    ``outlived_by``: later runs that faulted, where it passed. ``corrects``: earlier passes, where it faulted.
    ``not_cleared``: earlier runs that faulted, where it passed. ``not_clearing``: later passes, where it faulted.
    ``runs``, ``faults``, ``exposure`` (turns): pooled over all that count; ``upper_95``: their joint bound per turn,
    derived. ``left_out``: inconclusive ones.
    """

    run: RunSummary
    outlived_by: tuple[RunSummary, ...]
    corrects: tuple[RunSummary, ...]
    not_cleared: tuple[RunSummary, ...]
    not_clearing: tuple[RunSummary, ...]
    runs: int
    faults: int
    exposure: int
    upper_95: float | None
    left_out: int

    @property
    def contradicted(self) -> bool:
        """Whether its own verdict no longer stands alone: a pass beside a fault, earlier or later."""
        return bool(self.outlived_by or self.not_cleared)


def corrections(run: RunSummary, same: Sequence[RunSummary]) -> Corrections | None:
    """Of ``run`` among the runs with the same settings; None where none of them says otherwise."""
    counted = [one for one in same if one.counted and one.exposure is not None and one.faults is not None]
    if not run.counted:
        return None
    others = [one for one in counted if one.id != run.id and not (run.campaign and one.campaign == run.campaign)]
    passed = run.verdict == "pass" and not run.faulted
    earlier = [one for one in others if (one.created, one.id) < (run.created, run.id)]
    later = [one for one in others if (one.created, one.id) > (run.created, run.id)]
    outlived_by = tuple(one for one in later if one.faulted) if passed else ()
    not_cleared = tuple(one for one in earlier if one.faulted) if passed else ()
    corrects = tuple(one for one in earlier if _passed(one)) if run.faulted else ()
    not_clearing = tuple(one for one in later if _passed(one)) if run.faulted else ()
    if not (outlived_by or not_cleared or corrects or not_clearing):
        return None
    # an engine that dies before its first turn is over, and a finding, are faults that no turn has
    faults = sum(max(one.faults or 0, int(one.faulted)) for one in counted)
    exposure = sum(one.exposure or 0 for one in counted)
    left_out = sum(not one.counted and not one.running for one in same)
    return Corrections(
        run, outlived_by, corrects, not_cleared, not_clearing,
        len(counted), faults, exposure, upper_95(faults, exposure), left_out,
    )  # fmt: skip


def corrections_of(index: RunIndex, name: str) -> Corrections | None:
    """Of the run of that id, from an index that is up to date."""
    run = index.get(name)
    return None if run is None else corrections(run, index.with_settings(run.settings))


def outlived_launches(index: RunIndex, campaign: str) -> list[Corrections]:
    """Of the clean launches of a campaign those that a later run outside of it speaks against."""
    found = (corrections(row, index.with_settings(row.settings)) for row in index.launches(campaign))
    return [one for one in found if one is not None and one.outlived_by]


def corrections_beside(folder: Path, campaigns: CampaignReader | None = None) -> Corrections | None:
    """Of a run folder, from the runs folder that it stands in: by the index that is there, else by reading what stands
    beside it, which writes nothing. Raises ``RecordError`` where that folder cannot be read."""
    place = folder.resolve()
    runs_dir = place.parent
    if runs_dir.name == LAUNCHES and is_campaign(runs_dir.parent):
        runs_dir = runs_dir.parent.parent
    with RunIndex(runs_dir, keep=False, campaigns=campaigns) as index:
        index.refresh()
        return corrections_of(index, place.relative_to(runs_dir).as_posix())


def _passed(one: RunSummary) -> bool:
    return one.verdict == "pass" and not one.faulted
