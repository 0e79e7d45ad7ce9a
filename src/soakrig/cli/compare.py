"""``soak compare A B``: two runs side by side, and whether they may stand there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soakrig.bisect.run_comparison import RunFacts, compare_runs
from soakrig.cli.output import emit_json, write_page
from soakrig.record.store import find_run
from soakrig.reports.comparison import comparison_html, comparison_markdown, comparison_parts
from soakrig.reports.run_settings import differences
from soakrig.reports.run_view import RunView, read_run
from soakrig.reports.terminal import report_console


def compare(
    a: Annotated[str, typer.Argument(help="Folder of a run, its name or the start of it.", metavar="A")],
    b: Annotated[str, typer.Argument(help="The other; 'latest' is the newest.", metavar="[B]")] = "latest",
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Where runs are kept.")] = Path("runs"),
    html: Annotated[Path | None, typer.Option("--html", help="Write it as one HTML file.")] = None,
    md: Annotated[Path | None, typer.Option("--md", help="Write it as Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as one object.")] = False,
) -> None:
    """Two runs side by side: outcomes, hazard with its interval, TTFT and decode apart in pairs of turns, settings.

    \b
    Examples:
      soak compare 20261129-23 latest
      soak compare runs/before runs/after --html compare.html

    Exit codes: 0 compared, 2 they may not be compared (it says why), 64 usage error.
    """
    left, right = read_run(find_run(runs_dir, a)), read_run(find_run(runs_dir, b))
    comparison = compare_runs(_facts(left), _facts(right), differences(left.manifest, right.manifest))
    if html is not None:
        write_page(html, comparison_html(comparison), "--html")
    if md is not None:
        write_page(md, comparison_markdown(comparison), "--md")
    if as_json:
        emit_json(comparison.to_json())
    else:
        console = report_console()
        for part in comparison_parts(comparison):
            console.print(part)
    raise typer.Exit(comparison.exit_code)


def comparison_page(a: Path, b: Path) -> str:
    """The HTML of two run folders side by side. Raises ``RecordError``."""
    left, right = read_run(a), read_run(b)
    return comparison_html(compare_runs(_facts(left), _facts(right), differences(left.manifest, right.manifest)))


def _facts(view: RunView) -> RunFacts:
    return RunFacts(str(view.folder), view.manifest, view.result, view.turns)
