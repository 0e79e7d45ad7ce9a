"""A run or a campaign in one row: what an index keeps of a folder, finished, running, cut off or broken."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson

from soakrig.errors import SoakrigError
from soakrig.record.campaign import CAMPAIGN_RESULT, CampaignResult
from soakrig.record.finding import finding_signature
from soakrig.record.result import Result
from soakrig.record.same_settings import settings_hash, settings_known
from soakrig.record.store import EVENTS, LOCK, MANIFEST, RESULT, RunReader

CAMPAIGN_JOURNAL = "journal.sqlite"
"""Its presence makes a folder a campaign's."""
LAUNCHES = "runs"
"""Folder of a campaign's launches, each a run folder, below the campaign's."""
OTHERS = {
    "measure.json": "a measurement: `soak measure` makes and reads it",
    "search/journal.sqlite": "a minimisation: `soak repro minimize` makes it and goes on with it",
}
"""What else this tool leaves in a runs folder, by a file that it has."""
Kind = Literal["run", "launch", "campaign", "other", "unreadable"]
CampaignReader = Callable[[Path], CampaignResult]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """``id``: the folder below the runs folder. ``campaign``: id of the campaign that a launch belongs to, else empty.

    ``created``: seconds since the epoch (of an unreadable folder: its last change). ``settings``: see
    ``record.same_settings``. ``settings_known``: whether the record knows what the engine ran with. ``verdict``: pass,
    fail, inconclusive, empty where there is none (yet); of a campaign its conclusion's kind. ``faults`` in ``exposure``
    turns, and ``signatures`` with their counts; None where nothing was judged. ``counted``: whether its figures may be
    pooled with those of other runs. ``said``: its first reason or conclusion. ``unread``: what could not be read.
    ``launch_results``: of a campaign, by the launch's folder.
    """

    id: str
    kind: Kind
    campaign: str = ""
    created: float = 0.0
    reproducer: str = ""
    engine: str = ""
    model: str = ""
    settings: str = ""
    settings_known: bool = True
    verdict: str = ""
    faults: int | None = None
    exposure: int | None = None
    signatures: dict[str, int] = field(default_factory=dict[str, int])
    counted: bool = False
    simulated: bool = False
    ended: str = ""
    running: bool = False
    said: str = ""
    unread: str = ""
    launch_results: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def faulted(self) -> bool:
        """Whether a fault, a dead engine or a bad turn stands against it."""
        return bool(self.faults or self.signatures)


def stamp(folder: Path, names: Sequence[str] = (MANIFEST, RESULT, EVENTS, CAMPAIGN_JOURNAL, CAMPAIGN_RESULT)) -> str:
    """Size and time of change of the files that a row is made of: the same stamp, the same row."""
    parts: list[str] = []
    for name in (*names, f"{CAMPAIGN_JOURNAL}-wal"):
        try:
            found = os.stat(folder / name)  # noqa: PTH116  (a thousand folders: Path.stat costs as much again)
        except OSError:
            parts.append("-")
        else:
            parts.append(f"{found.st_size}.{found.st_mtime_ns}")
    return " ".join(parts)


def is_campaign(folder: Path) -> bool:
    """Whether a bisect keeps its journal or result there."""
    return (folder / CAMPAIGN_JOURNAL).exists() or (folder / CAMPAIGN_RESULT).exists()


def summarize_run(folder: Path, name: str, *, campaign: str = "", launch_result: str | None = None) -> RunSummary:
    """The row of a run folder; never raises for what the folder holds. ``launch_result``: what the campaign made of it
    (only faulted and clean ones are counted); None where that is not known."""
    try:
        reader = RunReader(folder)
    except SoakrigError as error:
        return unreadable(folder, name, error.message, campaign=campaign)
    manifest = reader.manifest
    engine: Any = manifest.settings.get("engine")
    told = str(engine.get("engine", "")) if isinstance(engine, dict) else ""
    row = RunSummary(
        id=name, kind="launch" if campaign else "run", campaign=campaign, created=manifest.created,
        reproducer=manifest.reproducer, engine=manifest.launched or told or "attached", model=manifest.model,
        settings=settings_hash(manifest), settings_known=settings_known(manifest), simulated=manifest.simulated,
    )  # fmt: skip
    try:
        result = reader.stored_result()
    except SoakrigError as error:
        if not isinstance(error.__cause__, orjson.JSONDecodeError):
            return replace(row, unread=error.message)  # whole, and no result of ours: nothing is made of it
        row, result = replace(row, unread=f"{RESULT} was cut: judged from the events"), None
    if result is None:
        if (folder / LOCK).exists() and reader.running():
            return replace(row, running=True)
        try:
            result = reader.judge().result()
        except SoakrigError as error:
            return replace(row, unread=error.message)
    return _judged(row, result, launch_result)


def _judged(row: RunSummary, result: Result, launch_result: str | None) -> RunSummary:
    valid = launch_result in ("faulted", "clean") if row.kind == "launch" else True
    signatures = Counter(fault.signature for fault in result.faults)
    signatures.update(finding_signature(one.name) for one in result.findings if one.says == "fault")
    if result.first_bad is not None and not signatures:
        signatures[result.first_bad.outcome] = result.hazard.faults
    return replace(
        row,
        verdict=result.verdict,
        faults=result.hazard.faults,
        exposure=result.hazard.exposure,
        signatures=dict(signatures),
        counted=result.verdict != "inconclusive" and valid,
        simulated=row.simulated or result.simulated,
        ended=result.ended,
        said=result.reasons[0] if result.reasons else "",
    )


def summarize_campaign(folder: Path, name: str, read: CampaignReader | None = None) -> RunSummary:
    """The row of a campaign. ``read``: makes its result from the journal; without it, or where that fails, what the
    campaign left in ``campaign.json`` counts."""
    try:
        result = read(folder) if read is not None and (folder / CAMPAIGN_JOURNAL).exists() else _campaign_json(folder)
    except (SoakrigError, OSError, ValueError) as error:
        what = error.message if isinstance(error, SoakrigError) else f"{CAMPAIGN_RESULT} cannot be read ({error})"
        return unreadable(folder, name, f"campaign: {what.splitlines()[0]}")
    began = [launch.began for launch in result.launches]
    spec = result.spec
    return RunSummary(
        id=name,
        kind="campaign",
        created=min(began, default=_changed(folder)),
        reproducer=str(spec.get("reproducer", "")),
        engine=str(spec.get("engine", "")),
        model=str(spec.get("model", "") or ""),
        verdict=result.conclusion_kind,
        faults=sum(arm.faults for arm in result.arms),
        exposure=round(sum(arm.exposure for arm in result.arms)) if result.unit == "turns" else None,
        signatures=result.signatures,
        simulated=result.simulated,
        ended=result.ended or result.state,
        running=result.state == "running",
        said=result.conclusion,
        launch_results={Path(launch.folder).name: launch.result or "" for launch in result.launches if launch.folder},
    )


def summarize_other(folder: Path, name: str) -> RunSummary | None:
    """The row of something else that belongs here (``OTHERS``), None where it is none of that."""
    said = next((said for marker, said in OTHERS.items() if (folder / marker).exists()), "")
    return RunSummary(id=name, kind="other", created=_changed(folder), said=said) if said else None


def unreadable(folder: Path, name: str, why: str, *, campaign: str = "") -> RunSummary:
    """The row of a folder of which nothing can be said but that it is there."""
    return RunSummary(id=name, kind="unreadable", campaign=campaign, created=_changed(folder), unread=why)


def _campaign_json(folder: Path) -> CampaignResult:
    return CampaignResult.from_json(orjson.loads((folder / CAMPAIGN_RESULT).read_bytes()))


def _changed(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
