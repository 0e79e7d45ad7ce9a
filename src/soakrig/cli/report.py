"""``soak report``: a run's report again, from what it left on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from soakrig.bisect.journal import JOURNAL
from soakrig.cli.bisect import find_campaign, read_campaign_result, show
from soakrig.cli.output import emit_json, write_page
from soakrig.errors import SoakrigError, UsageError
from soakrig.record.corrections import corrections_beside
from soakrig.record.store import RESULT, RunReader, find_run, write_private
from soakrig.record.table import turns_table
from soakrig.reports.junit import junit_xml
from soakrig.reports.run_page import run_html, run_markdown
from soakrig.reports.run_view import RunView, read_run
from soakrig.reports.terminal import print_report, report_console

SITE = "As a site"
PORT = 8091


def report(
    run: Annotated[
        str, typer.Argument(help="Folder of a run or a campaign, its name or the start of it, or 'latest'.")
    ] = "latest",
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Where runs are kept.")] = Path("runs"),
    rejudge: Annotated[
        bool, typer.Option("--rejudge", help="Derive the verdict again from the events and replace result.json.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report as one HTML file that needs no network.")
    ] = None,
    md: Annotated[Path | None, typer.Option("--md", help="Write it as Markdown, for a pull request or a chat.")] = None,
    against: Annotated[
        str | None, typer.Option(help="In --html and --md of a run: what is set otherwise than in this run.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Write JUnit XML for CI: verdict, gates, faults, bad turns.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write one row a turn to this file, for a spreadsheet or pandas.")
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option(help="The same rows as parquet (needs pyarrow: pip install 'soakrig[parquet]').")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the runs folder as a site: list, reports, comparisons, live runs.",
                           rich_help_panel=SITE),
    ] = False,
    port: Annotated[
        int | None, typer.Option(help=f"Port of --serve; 0 takes a free one (default: {PORT}).", rich_help_panel=SITE)
    ] = None,
    bind: Annotated[
        str | None, typer.Option(metavar="ADDR", help="Address of --serve (default: 127.0.0.1); others than loopback "
                                 "need a token.", rich_help_panel=SITE),
    ] = None,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the token that readers have to show.",
                                 rich_help_panel=SITE),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print result.json's object; with --serve the url, once it listens.")
    ] = False,
) -> None:  # fmt: skip
    """Print the report of a run or a campaign, write it as files; exits with its code. A run cut off is judged from its
    events, and the report says what is missing.

    \b
    Examples:
      soak report                                    the newest run
      soak report --html run.html --md run.md
      soak report 20261130-02 --html run.html --against 20261129-23
      soak report latest --junit soak.xml            for CI
      soak report --serve                            all of them in a browser, until Ctrl-C
    """
    written = {"--html": html, "--md": md, "--rejudge": rejudge, "--csv": csv, "--parquet": parquet, "--junit": junit,
               "--against": against, "RUN": run != "latest"}  # fmt: skip
    site = {"--port": port, "--bind": bind, "--token-env": token_env}
    if named := [
        name for name, value in (written if serve else site).items() if value is not None and value is not False
    ]:
        where = "makes no sense with --serve, which shows all runs" if serve else "is for --serve"
        raise UsageError(f"{named[0]} {where}", remedy="Leave it out." if serve else "Leave it out, or add --serve.")
    if serve:
        from soakrig.cli.report_serve import serve_reports

        serve_reports(
            runs_dir, port=PORT if port is None else port, address=bind or "127.0.0.1", token_env=token_env or "",
            as_json=as_json,
        )  # fmt: skip
        return
    campaign = find_campaign(run, runs_dir) if run != "latest" else None
    if campaign is not None and (campaign / JOURNAL).exists():
        given = {"--rejudge": rejudge, "--csv": csv, "--parquet": parquet, "--junit": junit, "--against": against}
        if named := [name for name, value in given.items() if value]:
            raise UsageError(f"{named[0]} is for a run, and this is a campaign", remedy="Leave it out.")
        show(campaign, html=html, md=md, as_json=as_json)
    folder = find_run(runs_dir, run)
    if against is not None and html is None and md is None:
        raise UsageError("--against is for --html and --md", remedy="`soak compare A B` compares two runs.")
    view = read_run(folder, rejudge=rejudge)
    other = read_run(find_run(runs_dir, against)) if against is not None else None
    if rejudge:
        _replace(folder, view)
    look_beside(view)
    if html is not None:
        write_page(html, run_html(view, other), "--html")
    if md is not None:
        write_page(md, run_markdown(view, other), "--md")
    if junit is not None:
        write_page(junit, junit_xml(view.result, view.wall_s).decode(), "--junit")
    if csv is not None or parquet is not None:
        _write_tables(view, csv, parquet)
    if as_json:
        emit_json(view.result.to_json())
    else:
        console = report_console()
        if not view.stored and not rejudge:
            what = "goes on" if view.running else "was cut off: it left no result.json that can be read"
            console.print(f"This run {what}; judged from the events so far.\n", style="yellow")
        for text in view.missing:
            console.print(f"missing: {text}", style="yellow", markup=False)
        print_report(
            console, view.result, view.series, folder, resend=view.manifest.resend_from, corrections=view.corrections
        )
    raise typer.Exit(view.result.exit_code)


def look_beside(view: RunView) -> None:
    """What other runs with the same settings say to this one, where the folder beside can be read."""
    try:
        view.corrections = corrections_beside(view.folder, read_campaign_result)
    except SoakrigError as error:
        view.missing.append(f"whether other runs with the same settings contradict it: {error.message}")


def _replace(folder: Path, view: RunView) -> None:
    """Write the verdict that was derived again; a run that still goes on writes its own."""
    if view.running:
        return
    data = orjson.dumps(view.result.to_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    try:
        write_private(folder / RESULT, data)
    except OSError as error:
        report_console(stderr=True).print(
            f"soak: {folder / RESULT} was not replaced: {error.strerror or error}", markup=False
        )


def _write_tables(view: RunView, csv: Path | None, parquet: Path | None) -> None:
    table = turns_table(RunReader(view.folder).events())
    table["simulated"] = view.simulated
    try:
        if csv is not None:
            table.to_csv(csv, index=False)
        if parquet is not None:
            table.to_parquet(parquet, index=False)
    except ImportError as error:
        raise UsageError("--parquet needs pyarrow", remedy="pip install 'soakrig[parquet]', or use --csv.") from error
    except OSError as error:
        path, option = (csv, "--csv") if parquet is None else (parquet, "--parquet")
        raise UsageError(
            f"{option} {path} cannot be written: {error.strerror or error}", remedy="Give another path."
        ) from error
