"""The two console scripts, and what every verb shares: errors, exit codes, versions."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

import soakrig
from soakrig.cli import bisect as bisect_verb
from soakrig.cli import doctor, report, repro, run, watch
from soakrig.errors import SoakrigError

EXIT_USAGE, EXIT_BUG, EXIT_INTERRUPTED = 64, 70, 130
CommandLineError: Any = typer.BadParameter.__base__
"""The usage error of the parser that typer brings along: its own module for it is private and has moved before."""

app = typer.Typer(
    name="soak",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
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
app.command("bisect", context_settings={"ignore_unknown_options": True})(bisect_verb.bisect)
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
    except CommandLineError as error:
        text = error.format_message()
        notes.print(f"soak: {text}" if text else "", markup=False)
        if error.ctx is not None:
            notes.print(f"  `{error.ctx.command_path} --help` lists what there is.", markup=False)
        return EXIT_USAGE
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except SoakrigError as error:
        notes.print(f"soak: {error}", markup=False)
        return error.exit_code
    except Exception:
        notes.print("soak: this is a bug of soakrig, not of your engine. Please report what follows.", markup=False)
        traceback.print_exc()
        return EXIT_BUG
    return outcome if isinstance(outcome, int) else 0
