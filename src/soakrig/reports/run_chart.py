"""Where the marks of a run's timeline stand: panels over one axis of time, turns that were not ok, and faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from soakrig.record.outcome import OutcomeName
from soakrig.reports.run_view import Points, RunView
from soakrig.reports.terminal import TRACKS

WIDTH, LEFT, RIGHT = 960, 128, 944
"""The drawing, and where the axis begins and ends in it; names stand left of it."""
PANEL, GAP, TOP = 64, 14, 46
NAME = 30
"""Room for a fault's number."""
BINS = 320
STRIP_BINS = 408
_TTFT = "turn.ttft_s"
_FIRST = [(_TTFT, "TTFT", "s", 1.0), ("turn.decode", "decode", "tokens/s", 1.0)]
_PANELS = [*_FIRST, *(track for track in TRACKS if track[0] != _TTFT)]
"""The two figures of latency, then what the terminal shows over the run; one that was not seen has no panel."""


@dataclass(frozen=True, slots=True)
class Panel:
    """``band``: polygon from the least to the largest of each bin; ``line``: its medians; both as SVG paths.
    ``low``, ``high``: the axis in words; ``told``: the panel in words, for who cannot see it."""

    label: str
    unit: str
    y: float
    band: str
    line: str
    low: str
    high: str
    told: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A fault on the timeline: its number, place, and words. ``named``: its number has room above its line."""

    number: int
    x: float
    told: str
    named: bool


@dataclass(frozen=True, slots=True)
class Strip:
    """Turns of one outcome within one bin of the strip above the panels."""

    outcome: OutcomeName
    x: float
    width: float
    told: str


@dataclass(frozen=True, slots=True)
class Chart:
    """``ticks``: place and label of the time axis."""

    panels: list[Panel]
    marks: list[Mark]
    strip: list[Strip]
    ticks: list[tuple[float, str]]
    bottom: float
    height: float
    seconds: float
    width: int = WIDTH
    left: int = LEFT
    right: int = RIGHT


def run_chart(view: RunView) -> Chart | None:
    """The timeline; None for a run without a turn or a sample."""
    if not view.turns and not view.points:
        return None
    seconds = max(view.wall_s, *(told.at for told in view.faults), 1e-3)

    def place(at: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, at / seconds)), 1)

    panels: list[Panel] = []
    for name, label, unit, factor in _PANELS:
        points = view.points.get(name)
        if points is not None and len(points.times):
            panels.append(_panel(points, label, unit, factor, TOP + len(panels) * (PANEL + GAP), seconds))
    bottom = TOP + len(panels) * (PANEL + GAP)
    marks: list[Mark] = []
    free = 0.0
    for told in view.faults:
        x = place(told.at)
        marks.append(Mark(told.number, x, f"fault {told.number}: {told.fault.signature}", named=x >= free))
        free = x + NAME if x >= free else free
    return Chart(
        panels=panels,
        marks=marks,
        strip=_strip(view, seconds),
        ticks=[(place(at), time_text(at)) for at in _ticks(seconds)],
        bottom=bottom,
        height=bottom + 22,
        seconds=seconds,
    )


def time_text(seconds: float) -> str:
    """``45 s``, ``12 min``, ``1 h 30 min``."""
    if seconds < 120:
        return f"{seconds:g} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


def short(value: float) -> str:
    """Three significant digits, thousands in groups."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _panel(points: Points, label: str, unit: str, factor: float, y: float, seconds: float) -> Panel:
    bins: dict[int, list[float]] = {}
    for at, value in zip(points.times, points.values, strict=True):
        bins.setdefault(min(BINS - 1, int(BINS * at / seconds)), []).append(value * factor)
    low = min(min(values) for values in bins.values())
    high = max(max(values) for values in bins.values())
    base = 0.0 if 0 <= low < 0.6 * high else low
    span = (high - base) or 1.0

    def up(value: float) -> float:
        return round(y + PANEL - PANEL * (value - base) / span, 1)

    width = (RIGHT - LEFT) / BINS
    across = [(round(LEFT + width * (n + 0.5), 1), sorted(bins[n])) for n in sorted(bins)]
    upper = " ".join(f"{x},{up(values[-1])}" for x, values in across)
    lower = " ".join(f"{x},{up(values[0])}" for x, values in reversed(across))
    line = " ".join(f"{x},{up(values[len(values) // 2])}" for x, values in across)
    only = len(across) == 1
    dot = f"M{across[0][0] - 2} {up(across[0][1][-1])}h4" if only else ""
    everything = sorted(value for values in bins.values() for value in values)
    middle = everything[len(everything) // 2]
    return Panel(
        label=label,
        unit=unit,
        y=y,
        band="" if only else f"M{upper} L{lower} Z",
        line=dot or f"M{line}",
        low=short(base),
        high=short(high),
        told=f"{label}: {short(low)} to {short(high)} {unit}, median {short(middle)}, {len(points.times)} values",
    )


def _strip(view: RunView, seconds: float) -> list[Strip]:
    """A block for each outcome of a bin that is not ok, on the ground of those that are."""
    counts: dict[tuple[int, OutcomeName], int] = {}
    for turn, at in zip(view.turns, view.at, strict=True):
        key = (min(STRIP_BINS - 1, int(STRIP_BINS * at / seconds)), turn.outcome)
        counts[key] = counts.get(key, 0) + 1
    width = (RIGHT - LEFT) / STRIP_BINS
    ordered = sorted(counts.items(), key=lambda item: (item[0][1] != "ok", item[0][0]))
    return [
        Strip(name, round(LEFT + width * n, 1), round(max(width, 1.6 if name == "ok" else 2.4), 1), f"{name}: {count}")
        for (n, name), count in ordered
    ]


def _ticks(seconds: float) -> Sequence[float]:
    """Round moments, five to ten of them."""
    steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400]
    step = next((one for one in steps if seconds / one <= 8), 86400 * math.ceil(seconds / 86400 / 8))
    if seconds < 2:
        step = seconds / 4
        return [round(n * step, 3) for n in range(5)]
    return [n * step for n in range(int(seconds // step) + 1)]
