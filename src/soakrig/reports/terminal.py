"""The report that a run ends in, for a terminal of 100 columns; plain text where it is not one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from soakrig.record.corrections import Corrections
from soakrig.record.hazard import turns_for
from soakrig.record.outcome import MARKS, OUTCOMES
from soakrig.record.result import Fault, Offload, Result
from soakrig.reports.campaign_text import inert
from soakrig.reports.corrections import correction_lines
from soakrig.reports.series import Series, sparkline

STYLES = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}
WIDTH = 100
RARE = 1 / 300
TRACKS = [
    ("turn.context_tokens", "context", "tokens", 1.0),
    ("turn.ttft_s", "TTFT", "s", 1.0),
    ("process.rss_mib", "engine memory", "MiB", 1.0),
    ("process.cpu_percent", "engine CPU", "%", 1.0),
    ("metrics.kv_cache_usage", "KV cache in use", "%", 100.0),
    ("nvml.vram_used_mib", "GPU memory", "MiB", 1.0),
    ("nvml.gpu_util_percent", "GPU utilisation", "%", 1.0),
    ("nvml.temperature_c", "GPU temperature", "C", 1.0),
    ("nvml.power_w", "GPU power", "W", 1.0),
]
"""Track, label, unit, factor; a track that was not sampled is left out."""


class LastingConsole(Console):
    """A console whose reader may go away (``| head``, a dead ``tee``) without ending the run that writes to it."""

    def on_broken_pipe(self) -> None:
        """Be silent from now on; rich would end the process with status 1, which means fail here."""
        self.quiet = True


def report_console(*, stderr: bool = False) -> Console:
    """A console of 100 columns; no colour where the stream is no terminal."""
    console = LastingConsole(stderr=stderr, highlight=False)
    if not console.is_terminal or console.width > WIDTH:
        console = LastingConsole(stderr=stderr, highlight=False, width=WIDTH)
    return console


def print_report(
    console: Console,
    result: Result,
    series: Series,
    folder: Path | None,
    *,
    resend: str | None = None,
    corrections: Corrections | None = None,
) -> None:
    """Print the whole report. ``resend``: what `--transcript` takes to send the run again (default: its folder).
    ``corrections``: what runs with the same settings say against it."""
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    for part in report_parts(result, series, folder, ascii_only=ascii_only, resend=resend, corrections=corrections):
        console.print(part)


def report_parts(
    result: Result,
    series: Series,
    folder: Path | None,
    *,
    ascii_only: bool = False,
    resend: str | None = None,
    corrections: Corrections | None = None,
) -> Iterator[RenderableType]:
    """The report's parts in their order: verdict and reasons, what other runs say to it, gates, findings, faults,
    outcomes, exposure, latency, the expert cache, tracks, sources, and where to go on."""
    yield _verdict(result)
    if corrections is not None:
        yield _corrections(corrections)
    if result.gates:
        yield _gates(result)
    if result.findings:
        yield _findings(result)
    if result.faults:
        faults = [_fault(n, fault) for n, fault in enumerate(result.faults, 1)]
        yield Group(_head("faults"), *_timelines(result), *faults)
    yield _outcomes(result, series)
    yield _exposure(result, series)
    yield _latency(result)
    if result.offload is not None:
        yield _offload(result.offload)
    tracks = _tracks(series, ascii_only=ascii_only)
    if tracks is not None:
        yield tracks
    yield _sources(result)
    yield _next(result, folder, resend or str(folder))


def _head(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _verdict(result: Result) -> RenderableType:
    lines = Text()
    lines.append(f"{result.verdict.upper()}", style=STYLES[result.verdict])
    lines.append(f"  exit {result.exit_code}  {result.run_id}")
    if result.simulated:
        lines.append("  SIMULATED", style="bold magenta")
    for reason in result.reasons:
        lines.append(f"\n  - {reason}")
    return lines


def _corrections(found: Corrections) -> RenderableType:
    lines = Text("\nother runs with the same settings", style="bold yellow")
    for text in correction_lines(found):
        lines.append(f"\n  - {inert(text, 1000)}", style="default")
    return lines


def _gates(result: Result) -> RenderableType:
    table = _table("gates", "", "gate", "measured")
    for gate in result.gates:
        mark = {True: Text("ok", "green"), False: Text("BROKEN", "bold red"), None: Text("unknown", "yellow")}[
            gate.held
        ]
        table.add_row(mark, gate.gate, "not measured" if gate.value is None else f"{gate.value:.4g}")
    return Group(_head("gates"), table)


def _findings(result: Result) -> RenderableType:
    marks = {
        "fault": Text("FAULT", "bold red"), "unknown": Text("unknown", "yellow"), "clean": Text("ok", "green"),
        "note": Text("note", "dim"),
    }  # fmt: skip
    table = _table("", "finding", "figure", "held against")
    for one in result.findings:
        unit = f" {one.unit}" if one.unit else ""
        figure = "not measured" if one.value is None else f"{_num(one.value)}{unit} ({one.kind})"
        table.add_row(marks[one.says], one.text, figure, one.bound or "-")
    return Group(_head("findings"), table)


def timeline(marks: list[float], end: float, width: int = 60) -> str:
    """A line from 0 to ``end`` with an X at each mark."""
    line = ["-"] * width
    for mark in marks:
        line[min(width - 1, max(0, int(width * mark / end)))] = "X"
    return "".join(line)


def _timelines(result: Result) -> list[RenderableType]:
    """The faults by turn, by context and by seconds under load."""
    turns = max([sum(result.outcomes.values()), *[fault.turn or 0 for fault in result.faults]])
    context = max([fault.context_tokens or 0 for fault in result.faults])
    rows = [
        ("by turn", [float(f.turn) for f in result.faults if f.turn is not None], float(turns), f"{turns} turns"),
        ("by context", [float(f.context_tokens or 0) for f in result.faults], float(context), f"{context:,} tokens"),
        (
            "under load",
            [f.seconds_under_load for f in result.faults],
            max(result.exposure.busy_seconds, 1e-9),
            f"{result.exposure.busy_seconds:,.1f} s",
        ),
    ]
    return [
        Text(f"  {label:11} |{timeline(marks, end)}| {text}") for label, marks, end, text in rows if marks and end > 0
    ]


def _fault(number: int, fault: Fault) -> RenderableType:
    text = Text(f"  {number}. ", style="bold red")
    text.append(fault.signature, style="bold red")
    if fault.injected:
        text.append("  (injected: written by userspace)", style="magenta")
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fault.time))
    where = "no turn in flight"
    if fault.turn is not None:
        where = f"turn {fault.turn} of conversation {fault.conversation}"
        if fault.attribution != "exact":
            where += f" ({fault.attribution})"
        if fault.context_tokens:
            where += f", {fault.context_tokens:,} context tokens"
    load = f"{fault.seconds_under_load:,.1f} s under load"
    text.append(f"\n     {where}; {load}; {at}; seen by {fault.source}", style="default")
    if fault.process or fault.pid:
        text.append(f"\n     named in the line: pid {fault.pid}, {fault.process}", style="default")
    if fault.signals > 1:
        text.append(f"\n     {fault.signals} signals belong to it", style="default")
    text.append(f"\n     {fault.raw[:400]}", style="dim")
    if fault.advice:
        text.append(f"\n     {fault.advice}", style="default")
    return text


def _outcomes(result: Result, series: Series) -> RenderableType:
    marks = Text("  " + "".join(series.marks[-480:]))
    counts = [f"{MARKS[name]} {name} {result.outcomes[name]}" for name in OUTCOMES if result.outcomes.get(name)]
    parts: list[RenderableType] = [_head("turns"), marks, Text("  " + "   ".join(counts))]
    if len(series.marks) > 480 or series.marks_dropped:
        parts[1] = Text(f"  (the last 480 of {sum(result.outcomes.values())})\n").append_text(marks)
    bad = result.first_bad
    if bad is not None:
        parts.append(Text(f"  first bad: turn {bad.turn} of conversation {bad.conversation}, {bad.outcome}: {bad.why}"))
    return Group(*parts)


def _exposure(result: Result, series: Series) -> RenderableType:
    exposure = result.exposure
    wall = series.last_time - (series.first_time or series.last_time)
    text = (
        f"  {exposure.turns:,} turns, {exposure.prompt_tokens:,} prompt and {exposure.output_tokens:,} output tokens, "
        f"{exposure.busy_seconds:,.1f} s busy of {wall:,.1f} s"
    )
    hazard = result.hazard
    bound = ""
    if hazard.upper_95 is not None:
        bound = (
            f"\n  bound: {hazard.faults} faults in {hazard.exposure} turns; "
            f"at 95 % the chance of a fault is at most {100 * hazard.upper_95:.3g} % per turn (derived)"
        )
    return Group(_head("exposure"), Text(text + bound))


def _latency(result: Result) -> RenderableType:
    table = _table("", "p50", "p90", "p99", "of ok turns, measured")
    latency = result.latency
    for name, q in (("time to first token, s", latency.ttft_s), ("first answer, s", latency.first_answer_s)):
        table.add_row(name, _num(q.p50), _num(q.p90), _num(q.p99))
    rates = _table("", "p10", "p50", "p90", "")
    d = latency.decode_tokens_per_s
    counted = {"usage": "", "none": "", "deltas": "counted by deltas", "mixed": "partly counted by deltas"}
    rates.add_row("decode, tokens/s", _num(d.p10), _num(d.p50), _num(d.p90), counted[latency.counted])
    left_out = f", {latency.left_out} turns left out" if latency.left_out else ""
    total = latency.throughput_tokens_per_s
    foot = f"  {latency.turns} turns{left_out}; throughput {_num(total)} tokens/s over wall time"
    if result.tool.lags:
        foot += f"; this tool lagged {result.tool.lags} times, at most {result.tool.lag_max_s:.2f} s"
    return Group(_head("latency: first token"), table, _head("latency: decode"), rates, Text(foot))


def _offload(offload: Offload) -> RenderableType:
    rate, misses = offload.hit_rate, offload.misses_per_step_per_layer
    rates = ", ".join(
        f"{_percent(value)} {name}"
        for value, name in (
            (rate.per_access, "per access"), (rate.per_unique, "per unique expert"), (rate.per_step, "per step"),
        )
    )  # fmt: skip
    kind = offload.kind if offload.kind == "measured" else f"{offload.kind}, cold start included"
    text = (
        f"  hits {rates}; {_num(misses)} misses per step and layer; {offload.bytes_moved / 2**20:,.1f} MiB moved "
        f"({kind}; engine steps {offload.first_step:,} to {offload.last_step:,})"
    )
    if offload.bad_ids:
        text += f"; {offload.bad_ids} bad expert ids"
    return Group(_head("expert offload"), Text(text))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _tracks(series: Series, *, ascii_only: bool) -> RenderableType | None:
    table = Table.grid(padding=(0, 2))
    for name, label, unit, factor in TRACKS:
        track = series.tracks.get(name)
        values = [value * factor for value in track.all()] if track else []
        if not values:
            continue
        span = f"{_num(min(values))} .. {_num(max(values))} {unit}"
        table.add_row(f"  {label}", sparkline(values, ascii_only=ascii_only), span)
    return Group(_head("over the run"), table) if table.row_count else None


def _sources(result: Result) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    styles = {"live": "green", "partial": "yellow", "absent": "yellow"}
    for name, source in result.sources.items():
        lost = f"{source.lost} lost" if source.lost else ""
        table.add_row(f"  {name}", Text(source.state, styles[source.state]), lost, Text(source.detail))
    return Group(_head("what was watched"), table)


def _next(result: Result, folder: Path | None, resend: str) -> RenderableType:
    if folder is None:
        return Text("")
    text = Text(f"\n  {folder}\n", style="dim")
    if result.verdict == "pass":
        more = turns_for(RARE)
        text.append(f"  next: {more} clean turns exclude one fault in 300 at 95 %, `soak run --turns {more}`", "dim")
    elif result.faults or result.first_bad:
        text.append(f"  next: look into {folder}/evidence; send it again with `soak run --transcript {resend}`", "dim")
    else:
        text.append("  next: `soak doctor` says what this host can watch and how to allow the rest", style="dim")
    return text


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2), show_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _num(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
