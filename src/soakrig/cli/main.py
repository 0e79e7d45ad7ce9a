"""The two console scripts, and what every verb shares: errors, exit codes, versions."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

import soakrig
from soakrig.cli import bisect as bisect_verb
from soakrig.cli import compare, doctor, engine, measure, plan, report, repro, run, watch
from soakrig.cli.output import emit_json, forget_stdout, open_closed_streams
from soakrig.errors import SoakrigError
from soakrig.reports.terminal import LastingConsole

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
app.command("compare")(compare.compare)
app.command("doctor")(doctor.doctor)
app.add_typer(bisect_verb.app, name="bisect", help="Find the one variable that causes a fault, unattended.")
app.add_typer(repro.app, name="repro")
app.add_typer(measure.app, name="measure")
app.add_typer(engine.app, name="engine")
app.add_typer(plan.app, name="plan")


def soak(argv: Sequence[str] | None = None) -> NoReturn:
    """The ``soak`` command: runs it and exits with the contract's code."""
    open_closed_streams()
    sys.exit(invoke(list(sys.argv[1:] if argv is None else argv)))


def bisect(argv: Sequence[str] | None = None) -> NoReturn:
    """The ``bisect`` command, equal to ``soak bisect``."""
    open_closed_streams()
    sys.exit(invoke(["bisect", *(sys.argv[1:] if argv is None else argv)]))


def invoke(argv: list[str]) -> int:
    """Run one command line; the exit code. Every way to fail is said on standard error, and with ``--json`` as one
    object ``{error, remedy, exit_code}`` on standard output too."""
    command = typer.main.get_command(app)
    try:
        outcome = command.main(args=argv, prog_name="soak", standalone_mode=False)
    except CommandLineError as error:
        path = error.ctx.command_path if error.ctx is not None else "soak"
        return _failed(argv, EXIT_USAGE, error.format_message(), f"`{path} --help` lists what there is.")
    except (typer.Abort, KeyboardInterrupt):
        return _failed(argv, EXIT_INTERRUPTED, "interrupted before there was a run to judge")
    except SoakrigError as error:
        return _failed(argv, error.exit_code, error.message, error.remedy)
    except BrokenPipeError:  # whoever read this has seen enough
        forget_stdout()
        return 0
    except Exception as error:
        text = "this is a bug of soakrig, not of your engine. Please report what follows."
        code = _failed(argv, EXIT_BUG, f"{text} ({type(error).__name__}: {error})")
        traceback.print_exc()
        return code
    return outcome if isinstance(outcome, int) else 0


def _failed(argv: list[str], code: int, message: str, remedy: str = "") -> int:
    notes = LastingConsole(stderr=True, highlight=False, soft_wrap=True)
    if message:
        notes.print(f"soak: {message}", markup=False)
    if remedy:
        notes.print(f"  {remedy}", markup=False)
    if "--json" in argv:
        emit_json({"error": message, "remedy": remedy, "exit_code": code})
    return code
