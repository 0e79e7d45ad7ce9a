"""``soak bundle``: one archive of a run that may leave the house."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Annotated

import typer

from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.campaign_result import campaign_result
from soakrig.bisect.journal import JOURNAL, Journal
from soakrig.bisect.launch_result import signature_of
from soakrig.bisect.statistics import rate_interval
from soakrig.cli.bundle_payload import bundle_payload
from soakrig.cli.output import emit, emit_json
from soakrig.errors import TargetError, UsageError
from soakrig.record.campaign import CampaignResult, Span
from soakrig.record.leaks import known_values
from soakrig.record.store import find_run, write_private
from soakrig.reports.bundle.archive import archive
from soakrig.reports.bundle.bundle import Bundle
from soakrig.reports.bundle.issue import Told
from soakrig.reports.run_view import RunView, read_run
from soakrig.reports.terminal import report_console
from soakrig.soak.target import Target, parse_url
from soakrig.soak.transcripts.token_counts import EngineCounts
from soakrig.soak.watch.xid_catalogue import catalogue


def bundle(
    run: Annotated[str, typer.Argument(help="Folder of a run, its name or the start of it, or 'latest'.")] = "latest",
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the archive is written (default: RUN-bundle.tar.gz here).")
    ] = None,
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Where runs are kept.")] = Path("runs"),
    campaign: Annotated[
        Path | None, typer.Option(help="Folder of the campaign whose arms are told (default: that of the run).")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="An engine with the same tokenizer: filler then has exactly as many tokens as the text."),
    ] = None,
    keep_text: Annotated[
        bool, typer.Option("--keep-text", help="KEEP THE PROMPTS in the archive. Secrets are hidden all the same.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Write one archive for an issue upstream: its text, a reproducer that needs Python and httpx only, the run's
    record, excerpts of the logs. Hosts, users, paths, serials, keys and prompts are taken out; it is not written where
    a last look finds one left.

    \b
    Examples:
      soak bundle                              the newest run
      soak bundle 20261130-02 --out xid31.tar.gz
      soak bundle latest --url http://127.0.0.1:8000
    """
    folder = find_run(runs_dir, run)
    target = out if out is not None else Path(f"{folder.name}-bundle.tar.gz")
    _writable(target)
    view = read_run(folder)
    told = _told(view, _campaign(folder, campaign))
    made = Bundle(view, known_values(os.environ, view.manifest.settings), told, keep_text=keep_text)
    with _counts(url) as counts:
        payload = bundle_payload(made, counts)
    name = made.cleaner.redactor.text(folder.name)
    files = made.files(payload)
    data = archive(f"{name}-bundle", files)
    try:
        write_private(target, data)
    except OSError as error:
        raise _unwritable(target, error) from error
    notes = report_console(stderr=True)
    if keep_text:
        notes.print("PROMPTS ARE IN THIS ARCHIVE as they were sent (--keep-text).", style="bold yellow")
    if view.running:
        notes.print("This run goes on: the archive has what there was.", style="yellow")
    for text in view.missing:
        notes.print(f"missing: {text}", style="yellow", markup=False)
    hidden = {kind: count for kind, count in made.cleaner.redactor.counts.items() if count}
    if as_json:
        emit_json(
            {
                "archive": str(target), "bytes": len(data), "files": sorted(files), "redacted": hidden,
                "simulated": view.simulated, "kept_text": keep_text,
            }
        )  # fmt: skip
        return
    mark = " SIMULATED: a planted fault took part." if view.simulated else ""
    emit(f"{target}  {len(data):,} bytes, {len(files)} files.{mark}")
    said = ", ".join(f"{kind} {count}" for kind, count in sorted(hidden.items())) or "nothing to hide"
    emit(f"redacted: {said}. Read issue.md and redactions.md in it before you send it.")


def _told(view: RunView, campaign: CampaignResult | None) -> Told:
    hazard = view.result.hazard
    rate = rate_interval(hazard.faults, hazard.exposure) if hazard.exposure else None
    meanings = {n: f"{entry.name}: {entry.meaning}" for n, entry in catalogue().items()}
    interval = None if rate is None else Span(low=rate.low, estimate=rate.estimate, high=rate.high)
    return Told(signature_of(view.result) or "", meanings, interval, campaign)


def _campaign(folder: Path, given: Path | None) -> CampaignResult | None:
    """The campaign that was named, else the one whose folder the run lies in."""
    places = [given] if given is not None else list(folder.resolve().parents)[:3]
    for place in places:
        if (place / JOURNAL).exists():
            with Journal.read(place) as journal:
                return campaign_result(journal, Campaign.from_json(journal.campaign))
    if given is not None:
        raise UsageError(f"--campaign {given} is no folder of a campaign: it has no {JOURNAL}", remedy="Leave it out.")
    return None


@contextlib.contextmanager
def _counts(url: str | None) -> Generator[EngineCounts | None]:
    if url is None:
        yield None
        return
    with EngineCounts(Target(parse_url(url))) as counts:
        if not counts.available():
            raise TargetError(
                f"--url {url} does not count tokens", remedy="Leave --url out: lengths are then estimated."
            )
        yield counts


def _writable(target: Path) -> None:
    """Refuse before the work what cannot be written after it."""
    if target.is_dir():
        raise UsageError(f"--out {target} cannot be written: it is a folder", remedy="Give the name of a file.")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        what = "its folder is not writable" if target.parent.is_dir() else "its folder does not exist"
        raise UsageError(f"--out {target} cannot be written: {what}", remedy="Give another path.")


def _unwritable(target: Path, error: OSError) -> UsageError:
    with contextlib.suppress(OSError):
        target.with_name(f".{target.name}.part").unlink()
    return UsageError(f"--out {target} cannot be written: {error.strerror or error}", remedy="Give another path.")
