"""Two runs side by side, for a terminal of 100 columns, as a page and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from soakrig.record.campaign import Span
from soakrig.record.comparison import Comparison, LatencyChange, Side
from soakrig.reports.campaign_text import inert
from soakrig.reports.pages import environment
from soakrig.reports.run_chart import short

FIGURES = {"ttft_s": ("time to first token", "s"), "decode_tokens_per_s": ("decode", "tokens/s")}
STYLES = {"pass": "green", "fail": "red", "inconclusive": "yellow"}
WHAT_IT_IS = (
    "Each run is one launch: what that launch was dealt is in its times (uncontrolled). `soak measure speed` "
    "alternates launches; `soak bisect` judges hazards."
)


def comparison_html(comparison: Comparison) -> str:
    """The page, whole: it asks for nothing."""
    return environment("html").get_template("compare.html.jinja").render(_content(comparison))


def comparison_markdown(comparison: Comparison) -> str:
    """The same in GitHub's Markdown."""
    return environment("md").get_template("compare.md.jinja").render(_content(comparison))


def comparison_parts(comparison: Comparison) -> Iterator[RenderableType]:
    """For the terminal: may they be compared, verdicts, outcomes, hazard, latency, differences."""
    head = Text(
        "comparable" if comparison.comparable else "NOT COMPARABLE", "bold" if comparison.comparable else "bold red"
    )
    if comparison.simulated:
        head.append("  SIMULATED", style="bold magenta")
    for text in comparison.why_not:
        head.append(f"\n  - {inert(text)}", style="default")
    yield head
    yield _sides(comparison)
    yield _latencies(comparison)
    yield _differences(comparison)
    yield Text(f"\n  {WHAT_IT_IS}", style="dim")


def _sides(comparison: Comparison) -> RenderableType:
    table = _table("", "A", "B")
    a, b = comparison.a, comparison.b
    table.add_row("run", inert(a.run_id), inert(b.run_id))
    table.add_row("verdict", Text(a.verdict, STYLES.get(a.verdict, "")), Text(b.verdict, STYLES.get(b.verdict, "")))
    table.add_row("ended", a.ended, b.ended)
    for name, (left, right) in comparison.outcomes.items():
        table.add_row(f"turns {name}", f"{left:,}", f"{right:,}")
    table.add_row("faults", faults_text(a), faults_text(b))
    text = Text(f"\n  hazard of B: {comparison.hazard.answer}", style="bold")
    if comparison.hazard.ratio is not None:
        text.append(f", {ratio_text(comparison.hazard.ratio)} times A's (derived, 95 %)", style="default")
    text.append(f"\n  {comparison.hazard.why}", style="default")
    return Group(Text("\nruns", style="bold"), table, text)


def _latencies(comparison: Comparison) -> RenderableType:
    table = _table("", "A, median", "B, median", "B over A, 95 %", "pairs", "B is")
    for row in latency_rows(comparison):
        table.add_row(*row[:-1])
    return Group(Text("\nlatency of turns that both have, ok in both", style="bold"), table)


def _differences(comparison: Comparison) -> RenderableType:
    if not comparison.differences:
        return Text("\nset otherwise: nothing", style="bold")
    table = _table("set otherwise", "A", "B")
    for one in comparison.differences:
        table.add_row(inert(one.name, 60), inert(one.a, 120), inert(one.b, 120))
    return Group(Text(""), table)


def faults_text(side: Side) -> str:
    """``2 in 60 turns, 3.33 % a turn (0.4 to 12)``"""
    high = "-" if side.rate.high is None else short(100 * side.rate.high)
    rate = f"{short(100 * side.rate.estimate)} % a turn ({short(100 * side.rate.low)} to {high})"
    names = ", ".join(f"{count} x {inert(name, 80)}" for name, count in side.signatures.items())
    return (
        f"{side.faults} in {side.exposure:,} turns"
        + (f", {rate}" if side.exposure else "")
        + (f": {names}" if names else "")
    )


def ratio_text(span: Span) -> str:
    """``0.31 (0.02 to 2.1)``; ``at least 1.4`` where nothing bounds it above and no estimate is finite."""
    if span.high is None and span.estimate == span.low:
        return f"at least {short(span.low)}"
    return f"{short(span.estimate)} ({short(span.low)} to {'infinite' if span.high is None else short(span.high)})"


def latency_rows(comparison: Comparison) -> list[tuple[str, str, str, str, str, str, str]]:
    """Figure, both medians, the ratio, pairs, what is said, and a word for its colour."""
    return [_latency_row(one) for one in comparison.latency]


def _latency_row(one: LatencyChange) -> tuple[str, str, str, str, str, str, str]:
    name, unit = FIGURES[one.figure]
    better = {"ttft_s": "lower", "decode_tokens_per_s": "higher"}[one.figure]
    word = "pass" if one.answer == better else "fail" if one.answer in ("lower", "higher") else "inconclusive"
    left_out = f", {one.left_out} left out" if one.left_out else ""
    return (
        f"{name}, {unit}",
        "-" if one.a is None else short(one.a),
        "-" if one.b is None else short(one.b),
        "-" if one.ratio is None else ratio_text(one.ratio),
        f"{one.pairs:,}{left_out}",
        one.answer,
        word,
    )


def _content(comparison: Comparison) -> dict[str, Any]:
    return {
        "comparison": comparison,
        "a": comparison.a,
        "b": comparison.b,
        "outcomes": [(name, left, right) for name, (left, right) in comparison.outcomes.items()],
        "faults": (faults_text(comparison.a), faults_text(comparison.b)),
        "ratio": "" if comparison.hazard.ratio is None else ratio_text(comparison.hazard.ratio),
        "latency": latency_rows(comparison),
        "what_it_is": WHAT_IT_IS.replace("`", ""),
    }


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2), show_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
