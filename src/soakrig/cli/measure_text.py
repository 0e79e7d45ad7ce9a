"""A measurement for people: its verdict, its reasons, its figures with their kinds."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

STYLES = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}
MEANS = {
    "equivalence": "A pass says that no difference beyond the control's own was seen on these prompts, and no more.",
    "speed": "Ratios are B's time over A's: above 1 is slower.",
    "backends": "Accepted: it started, answered, and finds plain English as likely as the best of the values does.",
    "profile": "On a device kinds may overlap: what is busy can exceed the wall time of a step.",
}


def print_measurement(console: Console, result: dict[str, Any]) -> None:
    """Print any measurement's result."""
    kind = result["measures"]
    console.print(f"{kind}: {result['verdict'].upper()}", style=STYLES[result["verdict"]])
    for name, text in result["sides"].items():
        console.print(f"  {name}: {text}", markup=False)
    if result.get("simulated"):
        console.print("  SIMULATED: a fault is planted in one of the engines", style="bold yellow")
    for reason in [*result["reasons"], *result.get("notes", ())]:
        console.print(f"  {reason}", markup=False)
    {"equivalence": _equivalence, "speed": _speed, "backends": _backends, "profile": _profile}[kind](console, result)
    console.print(MEANS[kind], style="dim")
    console.print(result["folder"], markup=False)


def _equivalence(console: Console, result: dict[str, Any]) -> None:
    table = Table("drift, nats (measured)", "places", "mean", "largest", "same first choice", box=None, pad_edge=False)
    control = result["control"]
    for name, figures in (
        ("A against B, fresh", result["change"]),
        ("A fresh against A cached", control["cached"]),
        ("A against A, another launch", control["again"]),
    ):
        places, mean = figures["places"], figures["mean_abs_difference"]
        if places and mean is not None:
            table.add_row(
                name, f"{places}", f"{mean:.3g}", f"{figures['largest']:.3g}", f"{figures['top1_agreement']:.3%}"
            )
        else:
            table.add_row(name, f"{places}", "-", "-", "-")
    console.print(table)
    if ratio := result["ratio"]:
        console.print(
            f"  drift of the change over the control's: {ratio['estimate']:.3g} "
            f"({ratio['low']:.3g} to {ratio['high']:.3g}, 95 %, derived)"
        )
    for question in result["questions"]:
        console.print(
            f"  {'WORSE' if question['worse'] else 'no'}  {question['name']}: {question['text']}", markup=False
        )


def _speed(console: Console, result: dict[str, Any]) -> None:
    table = Table("median, ms (measured)", "A", "B", "B/A (derived)", "answer", box=None, pad_edge=False)
    for name, figure in result["figures"].items():
        medians = ["-" if figure[s]["median_s"] is None else f"{figure[s]['median_s'] * 1000:.2f}" for s in ("A", "B")]
        ratio = figure["ratio"]
        text = f"{ratio['estimate']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if ratio else "-"
        table.add_row(
            {"ttft_s": "time to first token", "decode_s": "decode, a token"}[name], *medians, text, figure["answer"]
        )
    console.print(table)


def _backends(console: Console, result: dict[str, Any]) -> None:
    table = Table(result["name"], "state", "perplexity", "same first choice", "TTFT, ms", "decode, ms", "why",
                  box=None, pad_edge=False)  # fmt: skip
    for row in result["rows"]:
        agreement = row["top1_agreement"]
        table.add_row(
            row["value"], row["state"], _figure(row["perplexity"]), "-" if agreement is None else f"{agreement:.1%}",
            _figure(row["ttft_s"], 1000), _figure(row["decode_s"], 1000), row["why"].partition("\n")[0][:60],
        )  # fmt: skip
    console.print(table)


def _profile(console: Console, result: dict[str, Any]) -> None:
    table = Table("median of a decode step", "ms (measured)", "of busy", box=None, pad_edge=False)
    for row in result["rows"]:
        table.add_row(row["what"], f"{row['ms']:.3f}", "-" if row["share"] is None else f"{row['share']:.1%}")
    table.add_row("busy", f"{result['busy_ms']:.3f}", "")
    table.add_row("wall", f"{result['wall_ms']:.3f}", "")
    console.print(table)
    console.print(f"  {result['steps']} decode steps on the {result['device']}, from {result['trace']}", markup=False)


def _figure(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.4g}"
