"""``soak report``: a run's report again, from what it left on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from soakrig.bisect.journal import JOURNAL
from soakrig.cli.bisect import find_campaign, show
from soakrig.cli.output import emit_json
from soakrig.errors import UsageError
from soakrig.record.judge import Judge
from soakrig.record.result import Result
from soakrig.record.store import RESULT, RunReader, find_run, write_private
from soakrig.record.table import turns_table
from soakrig.reports.series import Series
from soakrig.reports.terminal import print_report, report_console


def report(
    run: Annotated[
        str, typer.Argument(help="Folder of a run or a campaign, its name or the start of it, or 'latest'.")
    ] = "latest",
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Where runs are kept.")] = Path("runs"),
    rejudge: Annotated[
        bool, typer.Option("--rejudge", help="Derive the verdict again from the events and replace result.json.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Also write one row a turn to this file, for a spreadsheet or pandas.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Of a campaign: write the report as one HTML file.")
    ] = None,
    md: Annotated[Path | None, typer.Option("--md", help="Of a campaign: write the report as Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json's object on standard output.")] = False,
) -> None:
    """Print the report of a run or a campaign; exits with its code. A run cut off is judged from its events."""
    campaign = find_campaign(run, runs_dir) if run != "latest" else None
    if campaign is not None and (campaign / JOURNAL).exists():
        if rejudge or csv is not None:
            raise UsageError("--rejudge and --csv are for a run, and this is a campaign", remedy="Leave them out.")
        show(campaign, html=html, md=md, as_json=as_json)
    if html is not None or md is not None:
        raise UsageError(
            "--html and --md are for a campaign in this version", remedy="--json or --csv give a run's figures."
        )
    reader = RunReader(find_run(runs_dir, run))
    judge, series = Judge(reader.manifest), Series()
    for event in reader.events():
        judge.feed(event)
        series.feed(event)
    stored = None if rejudge else reader.stored_result()
    result: Result = judge.result() if stored is None else stored
    if rejudge:
        _replace(reader, result)
    if csv is not None:
        _write_csv(reader, csv)
    if as_json:
        emit_json(result.to_json())
    else:
        console = report_console()
        if stored is None and not rejudge:
            what = "goes on" if reader.running() else "was cut off: it left no result.json"
            console.print(f"This run {what}; judged from the events so far.\n", style="yellow")
        print_report(console, result, series, reader.folder, resend=reader.manifest.resend_from)
    raise typer.Exit(result.exit_code)


def _replace(reader: RunReader, result: Result) -> None:
    """Write the verdict that was derived again; a run that still goes on writes its own."""
    if reader.running():
        return
    data = orjson.dumps(result.to_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    try:
        write_private(reader.folder / RESULT, data)
    except OSError as error:
        report_console(stderr=True).print(
            f"soak: {reader.folder / RESULT} was not replaced: {error.strerror or error}", markup=False
        )


def _write_csv(reader: RunReader, path: Path) -> None:
    try:
        turns_table(reader.events()).to_csv(path, index=False)
    except OSError as error:
        raise UsageError(f"--csv {path} cannot be written: {error.strerror or error}") from error
