"""``soak repro``: the reproducers by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from soakrig.cli.output import emit, emit_json
from soakrig.reports.terminal import report_console
from soakrig.reproducers.registry import REPRODUCERS, find_reproducer

app = typer.Typer(no_args_is_help=True, help="List and explain the reproducers (named load shapes).")


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Name every reproducer with one line on its shape."""
    if as_json:
        emit_json({name: r.summary for name, r in REPRODUCERS.items()})
        return
    for name, reproducer in REPRODUCERS.items():
        emit(f"{name:16} {reproducer.summary}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name of the reproducer.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a reproducer provokes, where it was seen, what it costs and what a clean run means."""
    reproducer = find_reproducer(name)
    facts = {key: value for key, value in asdict(reproducer).items() if key != "load"}
    if as_json:
        emit_json(facts)
        return
    console = report_console()
    for key, value in facts.items():
        text = ", ".join(value) if isinstance(value, (list, tuple)) else str(value)
        console.print(f"[bold]{key.replace('_', ' ')}[/bold]: {text}")
