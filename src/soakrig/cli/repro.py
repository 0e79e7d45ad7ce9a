"""``soak repro``: the reproducers by name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from soakrig.cli.minimize import minimize
from soakrig.cli.output import emit, emit_json
from soakrig.reports.terminal import report_console
from soakrig.reproducers.registry import REPRODUCERS, find_reproducer

app = typer.Typer(no_args_is_help=True, help="List and explain the reproducers (named load shapes), and make new ones.")
app.command("minimize")(minimize)


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
    facts = reproducer.shown()
    if as_json:
        emit_json(facts)
        return
    console = report_console()
    for key, value in facts.items():
        label = Text(f"{key.replace('_', ' ')}: ", "bold")
        if key == "parameters":
            console.print(label + Text("" if value else "none", ""))
            for one in value:
                console.print(Text(f"  --param {one['name']}={_plain(one['default'])}", "cyan"))
                console.print(Text(f"      {one['help']}; {one['expected']}"))
            continue
        if key == "options":
            value = [f"--{name.replace('_', '-')} {_plain(usual)}" for name, usual in value.items()]
        text = ", ".join(value) or "none" if isinstance(value, list) else str(value)
        if key == "cap" and isinstance(value, int):
            text += " turns of each conversation"
        console.print(label + Text(text, ""))


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
