"""What the verbs of ``soak plan`` that read a trace have in common: options, and how the trace is opened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soakrig.errors import UsageError
from soakrig.reports.terminal import LastingConsole

if TYPE_CHECKING:
    from soakrig.engine.planning.trace import PlannedTrace

TraceFile = Annotated[
    Path, typer.Argument(help="Routing trace: of an engine, or raw int16 ids (.i16).", metavar="TRACE")
]
Layers = Annotated[int | None, typer.Option(help="Layers of a raw trace.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Routed experts of a token in a raw trace.")]
Experts = Annotated[int | None, typer.Option(help="Experts of a layer in a raw trace.")]
RowsPerStep = Annotated[int, typer.Option(help="Tokens of an engine step in a raw trace.")]
OnlyLayers = Annotated[str | None, typer.Option(help="Keep these layers alone: 3-77 or 0,2,5.")]
AllowTorn = Annotated[bool, typer.Option("--allow-torn", help="Leave a last step that is cut off out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write the plots and their figures as one HTML file.")]
_RANGE = re.compile(r"^(\d{1,6})(?:-(\d{1,6}))?$")


def load_trace(
    path: Path,
    layers: int | None,
    top_k: int | None,
    experts: int | None,
    rows_per_step: int,
    only: str | None,
    allow_torn: bool,
) -> PlannedTrace:
    """Open a trace as the options say, and tell on standard error what was used and what looks odd."""
    from soakrig.engine.planning.trace import TraceShape, only_layers, open_trace

    planned = open_trace(str(path), TraceShape(layers, top_k, experts, rows_per_step), allow_torn=allow_torn)
    if only is not None:
        planned = only_layers(planned, parse_numbers("--only-layers", only, 10**6))
    notes = LastingConsole(stderr=True, highlight=False, soft_wrap=True)
    rows = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in planned.rows.items() if count)
    header = planned.trace.header
    text = f"{path}: {rows or 'no'} rows, {len(header.layers)} layers, top-{header.top_k} of {header.experts}"
    for line in (text, *planned.notes):
        notes.print(line, markup=False)
    return planned


def parse_numbers(option: str, text: str, most: int) -> list[int]:
    """``3-77`` or ``0,2,5`` as rising numbers up to ``most``. Raises UsageError for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        first = int(match[1]) if match else -1
        last = int(match[2] or first) if match else -1
        if not 0 <= first <= last <= most:
            raise UsageError(
                f"{option} {text!r}: {part.strip()!r} is no number or range from 0 to {most}",
                remedy=f"write {option} 3-77, or {option} 0,2,5",
            )
        found |= set(range(first, last + 1))
    return sorted(found)
