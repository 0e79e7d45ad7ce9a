"""The report of a bisect campaign, for a terminal of 100 columns; plain text where it is not one."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from soakrig.record.campaign import CampaignResult
from soakrig.reports.campaign_text import (
    UNITS,
    ArmRow,
    VoidGroup,
    arm_row,
    drift,
    inert,
    ordered,
    proofs,
    short_names,
    summary,
    void_groups,
)

VERDICT_STYLES = {
    "CLEARED": "green", "REDUCED": "cyan", "FAULTS": "red", "UNDECIDED": "yellow", "VOID": "magenta", "CONTROL": "bold",
}  # fmt: skip
NAME_WIDTH = 26
MOST_GROUPS = 8
"""Reasons and signatures that are told one by one."""


class Writer:
    """Makes ``Text`` of text: inert, never read as markup, and in what the console's encoding has."""

    def __init__(self, console: Console) -> None:
        try:
            self._encoding = codecs.lookup(console.encoding or "ascii").name
        except LookupError:
            self._encoding = "ascii"

    def shown(self, text: str, most: int = 4000) -> str:
        """``text`` as this console can show it."""
        return inert(text, most).encode(self._encoding, "backslashreplace").decode(self._encoding)

    def __call__(self, text: str, style: str = "") -> Text:
        return Text(self.shown(text), style=style)


def print_campaign(console: Console, result: CampaignResult) -> None:
    """Print the whole report. Its length goes with the number of arms, not of launches."""
    for part in campaign_parts(result, Writer(console)):
        console.print(part)


def campaign_parts(result: CampaignResult, write: Writer) -> Iterator[RenderableType]:
    """The report's parts in their order: head, arms, conclusion and what it does not say, void launches, signatures,
    what more hours would buy, proofs, where to go on."""
    arms = ordered(result.arms)
    unit = UNITS[result.unit]
    short = short_names([arm.name for arm in arms], NAME_WIDTH, write.shown)
    rows = [(arm_row(arm, unit), VERDICT_STYLES[arm.verdict]) for arm in arms]
    yield _head_line(result, write)
    if rows:
        yield _counts(rows, short, unit.many, write)
        yield _figures([row for row, _ in rows], short, unit.per, result.at_least, write)
        yield Padding(write(drift(result), "dim"), (0, 0, 0, 2))
    cut = {short[arm.name]: arm.name for arm in arms if short[arm.name] != write.shown(arm.name)}
    if cut:
        yield _section("names in full", _pairs(cut.items(), write))
    yield _section("conclusion", Padding(write(result.conclusion), (0, 0, 0, 2)))
    if result.not_said:
        yield _section("what this does not say", _list(result.not_said, write))
    groups = void_groups(result.arms)
    if groups:
        yield _section("void launches", _voids(groups, write))
    if result.signatures:
        yield _section("signatures seen", _signatures(result, write))
    if result.outlook:
        outlook = (f"{sentence} (modelled)" for sentence in result.outlook)
        yield _section("what the next night would buy", _list(outlook, write))
    shown = proofs(result)
    if shown:
        yield _section("shown to be in effect by", _pairs(shown.items(), write))
    yield _where(result, write)


def _section(head: str, *parts: RenderableType) -> Group:
    return Group(Text(f"\n{head}", style="bold"), *parts)


def _head_line(result: CampaignResult, write: Writer) -> RenderableType:
    line = write(f"bisect {inert(result.campaign, 60)}", "bold")
    line.append(f"  {result.state}" + ("" if result.state == "running" else f", exit {result.exit_code}"))
    if result.simulated:
        line.append("  SIMULATED", style="bold magenta")
    lines: list[RenderableType] = [line, Padding(write(summary(result)), (0, 0, 0, 2))]
    if result.simulated:
        lines.append(Padding(write("a planted fault took part: nothing of this is about real hardware"), (0, 0, 0, 2)))
    if result.ended:
        lines.append(Padding(write(f"ended: {result.ended}"), (0, 0, 0, 2)))
    return Group(*lines)


def _counts(rows: Iterable[tuple[ArmRow, str]], short: dict[str, str], many: str, write: Writer) -> RenderableType:
    numbers = ("runs", "void", many, "faults", "expected")
    table = _table("arm", *numbers, "verdict", numbers=numbers)
    for row, style in rows:
        counts = (row.runs, row.void, row.exposure, row.faults, row.expected)
        table.add_row(write(short[row.name]), *map(write, counts), write(row.claim, style))
    return _section("arms (counts measured, expected derived from the control)", table)


def _figures(rows: Iterable[ArmRow], short: dict[str, str], per: str, at_least: float, write: Writer) -> RenderableType:
    numbers = ("p", f"P(>={at_least:g}x)")
    table = _table("arm", f"faults per {per}", "ratio to the control", *numbers, numbers=numbers)
    for row in rows:
        table.add_row(*map(write, (short[row.name], row.rate, row.ratio, row.p, row.posterior)))
    kinds = f"measured: rate; derived: ratio, p; modelled: P(>={at_least:g}x), hazard at least {at_least:g} times lower"
    return _section("rates and ratios, 95 % intervals in brackets", table, Padding(write(kinds, "dim"), (0, 0, 0, 2)))


def _voids(groups: Sequence[VoidGroup], write: Writer) -> RenderableType:
    return _counted([(group.launches, f"{group.reason} [{group.arms}]") for group in groups], "reasons", write)


def _signatures(result: CampaignResult, write: Writer) -> RenderableType:
    seen = sorted(result.signatures.items(), key=lambda item: -item[1])
    pooled = {result.signature: "  (the fault that is counted)"}
    return _counted([(n, inert(name) + pooled.get(name, "")) for name, n in seen], "signatures", write)


def _counted(groups: Sequence[tuple[int, str]], what: str, write: Writer) -> Table:
    """The first few with their counts, the rest in one line."""
    told = [(f"{count:,} x", text) for count, text in groups[:MOST_GROUPS]]
    rest = groups[MOST_GROUPS:]
    if rest:
        told.append((f"{sum(count for count, _ in rest):,} x", f"{len(rest):,} other {what}"))
    return _pairs(told, write)


def _where(result: CampaignResult, write: Writer) -> RenderableType:
    folder = shlex.quote(inert(result.folder, 2000))
    match result.state:
        case "paused":
            text = f"go on with it: soak bisect resume {folder}"
        case "running":
            text = f"how it stands: soak bisect status {folder}"
        case _:
            text = f"read it again: soak report {folder}; as a page: --html FILE or --md FILE"
    return Group(
        Text(""), Padding(write(result.folder, "dim"), (0, 0, 0, 2)), Padding(write(text, "dim"), (0, 0, 0, 2))
    )


def _list(sentences: Iterable[str], write: Writer) -> Table:
    return _pairs((("-", sentence) for sentence in sentences), write)


def _pairs(pairs: Iterable[tuple[str, str]], write: Writer) -> Table:
    table = Table(box=None, show_header=False, show_edge=False, padding=(0, 0, 0, 2))
    table.add_column(max_width=NAME_WIDTH + 14, overflow="fold")
    table.add_column(overflow="fold")
    for name, text in pairs:
        table.add_row(write(name), write(text))
    return table


def _table(*columns: str, numbers: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), show_edge=False, header_style="dim")
    for at, name in enumerate(columns):
        right = "right" if name in numbers else "left"
        table.add_column(name, overflow="fold", justify=right, no_wrap=at == 0)
    return table
