"""The two console scripts, and what every verb shares: errors, exit codes, versions."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import click
import typer
from rich.console import Console

import soakrig
from soakrig.cli import doctor, report, repro, run, watch
from soakrig.errors import SoakrigError, UsageError

EXIT_USAGE, EXIT_BUG, EXIT_INTERRUPTED = 64, 70, 130

app = typer.Typer(
    name="soak",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reproduce and pin down rare faults of LLM serving, and prove stability in numbers.\n\n"
    "Exit codes: 0 pass, 1 fail, 2 inconclusive, 3 refused by a preflight, 64 usage error, 70 a bug of soakrig.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"soakrig {soakrig.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the verb."""


app.command("run")(run.run)
app.command("watch")(watch.watch)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.add_typer(repro.app, name="repro")


def soak(argv: Sequence[str] | None = None) -> NoReturn:
    """The ``soak`` command: runs it and exits with the contract's code."""
    sys.exit(invoke(list(sys.argv[1:] if argv is None else argv)))


def bisect(argv: Sequence[str] | None = None) -> NoReturn:
    """The ``bisect`` command, equal to ``soak bisect``."""
    sys.exit(invoke(["bisect", *(sys.argv[1:] if argv is None else argv)]))


def invoke(argv: list[str]) -> int:
    """Run one command line; the exit code. Every way to fail is said on standard error."""
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    command = typer.main.get_command(app)
    try:
        outcome = command.main(args=argv, prog_name="soak", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        notes.print(error.format_message(), markup=False)
        return EXIT_USAGE
    except click.UsageError as error:
        notes.print(f"soak: {error.format_message()}{_meant(error)}", markup=False)
        if error.ctx is not None:
            notes.print(f"  `{error.ctx.command_path} --help` lists what there is.", markup=False)
        return EXIT_USAGE
    except click.exceptions.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SoakrigError as error:
        notes.print(f"soak: {error}", markup=False)
        return error.exit_code
    except Exception:
        notes.print("soak: this is a bug of soakrig, not of your engine. Please report what follows.", markup=False)
        traceback.print_exc()
        return EXIT_BUG
    return outcome if isinstance(outcome, int) else 0


def _meant(error: click.UsageError) -> str:
    """The nearest verb to one that does not exist; click finds near options itself."""
    text = error.format_message()
    if "No such command" not in text or error.ctx is None or not isinstance(error.ctx.command, click.Group):
        return ""
    name = text.split("'")[1] if "'" in text else ""
    near = difflib.get_close_matches(name, error.ctx.command.list_commands(error.ctx), n=1)
    return f" Did you mean '{near[0]}'?" if near and "Did you mean" not in text else ""


__all__ = ["UsageError", "app", "bisect", "invoke", "soak"]
