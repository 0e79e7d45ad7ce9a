"""What an earlier process of a campaign left: its engines are ended, its unfinished runs settled."""

from __future__ import annotations

from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.evidence import Evidence
from soakrig.bisect.executors import Executor, Stratum
from soakrig.bisect.journal import Journal
from soakrig.bisect.journal_rows import RunRow
from soakrig.bisect.launch_result import read_result, told_by_device
from soakrig.bisect.ledger import WEDGED
from soakrig.errors import SoakrigError
from soakrig.record.judge import Judge
from soakrig.record.store import RunReader

_FOUND = {"found": "by resume"}
"""In the details of what is written for an earlier process (``Journal.spans``)."""


def launch_mark(journal: Journal, run: RunRow) -> str:
    """What marks the processes of a run's engine: no other launch on this host has it."""
    return f"{journal.folder.resolve()}#{run.id}"


def settle_leftovers(journal: Journal, campaign: Campaign, executor: Executor) -> str:
    """Put every unfinished run in order; what could not be ended, in words (empty as a rule).

    A host that is no more in the cluster cannot be asked: its run is void.
    """
    strata = {one.name: one for one in executor.strata}
    for stratum in strata.values():
        if stratum.name:
            journal.recover(stratum.name, stratum.boot_id)
    for run in journal.runs():
        if run.state in ("planned", "settled"):
            continue
        stratum = strata.get(run.stratum)
        if stratum is None:
            _give_up(journal, run)
            continue
        left = _settle(journal, campaign, executor, run, stratum)
        if left:
            journal.note(WEDGED, run, left=left)
            return f"run {run.id} of {run.arm} left {'; '.join(left)}, and it is there still"
    for run in journal.planned():
        if run.stratum not in strata:
            journal.move(run, "void", reason=f"{run.stratum} is no more among the hosts", detail=_FOUND)
            journal.move(run, "settled", detail=_FOUND)
    return ""


def _settle(journal: Journal, campaign: Campaign, executor: Executor, run: RunRow, stratum: Stratum) -> list[str]:
    left = executor.clear(launch_mark(journal, run), stratum)
    if run.state == "interrupted":
        run = _with_its_fault(journal, campaign, run)
    if run.state not in ("teardown", "host_lost"):
        run = journal.move(run, "teardown", detail=_FOUND)
    if not left:
        journal.move(run, "settled", detail=_FOUND)
    return left


def _with_its_fault(journal: Journal, campaign: Campaign, run: RunRow) -> RunRow:
    """The run as faulted where its folder shows the fault; clean it never becomes."""
    if not run.folder or run.stratum:
        return run
    try:
        reader = RunReader(journal.folder / "runs" / run.folder)
        judge = Judge(reader.manifest)
        for event in reader.events():
            judge.feed(event)
        result = judge.result()
        found = read_result(result, campaign.unit, campaign.cap, campaign.tolerated)
    except SoakrigError:
        return run  # cut off before it had anything to show
    if found.result != "faulted":
        return run
    wanted = Evidence(journal.arm_runs(), signature=campaign.signature).pooled_signature
    if wanted not in (None, found.signature) and not told_by_device(result):
        return run  # cut off before the watchers said what ended its turn: the fault perhaps, under another name
    return journal.move(
        run, "faulted", exposure=found.exposure, signature=found.signature, reason=run.reason, detail=_FOUND
    )


def _give_up(journal: Journal, run: RunRow) -> None:
    if run.state not in ("void", "host_lost", "teardown", "interrupted", "faulted", "clean"):
        run = journal.move(run, "void", reason=f"{run.stratum} is no more among the hosts", detail=_FOUND)
    if run.state not in ("teardown", "host_lost"):
        run = journal.move(run, "teardown", detail=_FOUND)
    journal.move(run, "settled", detail=_FOUND)
