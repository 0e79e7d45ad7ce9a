"""Where the marks of a plan's plots stand: curves over a number of slots, and bars that begin anywhere on an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from soakrig.reports.campaign_text import short_names

WIDTH = 810
_TICKS = 5
_NAME_CHARACTERS = 30
Style = Literal["solid", "dashed"]
Look = Literal["filled", "open", "plain"]


@dataclass(frozen=True)
class Series:
    """A line through ``points`` (x, y), x rising. ``steps``: y holds up to the next x. ``dots``: points are marked."""

    name: str
    points: Sequence[tuple[float, float]]
    style: Style = "solid"
    steps: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Tick:
    """A place on an axis, in units of the drawing, with its label."""

    at: float
    label: str


@dataclass(frozen=True)
class DrawnLine:
    """A series as an SVG path, with the places of its dots; ``label_y``: where its name stands at the right."""

    name: str
    path: str
    style: Style
    label_y: float
    dots: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


@dataclass(frozen=True)
class LinePlot:
    """Lines over two linear axes from 0 up. ``mark``: a place on the x axis that is pointed out, with its words."""

    kind: Literal["lines"]
    lines: list[DrawnLine]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    x_label: str
    y_label: str
    mark: Tick | None
    width: int = WIDTH
    height: int = 330
    left: int = 70
    right: int = 690
    top: int = 30
    bottom: int = 274


@dataclass(frozen=True)
class Bar:
    """From ``start`` to ``end`` on the axis; ``text``: its figure. ``look``: open bars are what nobody owns or what is
    free, plain ones sums. ``tick``: another value on the same line, told by ``tick_text`` in the row's title."""

    name: str
    start: float
    end: float
    text: str
    look: Look = "filled"
    tick: float | None = None
    tick_text: str = ""


@dataclass(frozen=True)
class DrawnBar:
    """A bar's line in units of the drawing."""

    name: str
    full_name: str
    text: str
    look: Look
    x: float
    width: float
    y: float
    tick: float | None
    tick_text: str


@dataclass(frozen=True)
class BarPlot:
    """Bars below each other over one axis. ``base``: a place that is pointed out, with its words."""

    kind: Literal["bars"]
    bars: list[DrawnBar]
    ticks: list[Tick]
    x_label: str
    base: Tick | None
    height: float
    bottom: float
    width: int = WIDTH
    left: int = 250
    right: int = 640
    top: int = 34


Plot = LinePlot | BarPlot


def line_plot(
    series: Sequence[Series], x_label: str, y_label: str, mark: tuple[float, str] | None = None
) -> LinePlot | None:
    """The plot; None without two points on any line."""
    shown = [one for one in series if len(one.points) > 1]
    if not shown:
        return None
    frame = LinePlot("lines", [], [], [], x_label, y_label, None)
    most_x = max(one.points[-1][0] for one in shown)
    least_x = min(one.points[0][0] for one in shown)
    least_x = 0.0 if least_x <= most_x / 2 else math.floor(least_x)
    ys = ticks(0.0, max(y for one in shown for _, y in one.points))

    def x_of(value: float) -> float:
        return round(frame.left + (frame.right - frame.left) * (value - least_x) / ((most_x - least_x) or 1), 1)

    def y_of(value: float) -> float:
        return round(frame.bottom - (frame.bottom - frame.top) * value / (ys[-1] or 1), 1)

    lines = [
        DrawnLine(
            one.name,
            _path([(x_of(x), y_of(y)) for x, y in one.points], one.steps),
            one.style,
            y_of(one.points[-1][1]),
            [(x_of(x), y_of(y)) for x, y in one.points] if one.dots else [],
        )
        for one in shown
    ]
    xs = [value for value in ticks(least_x, most_x) if least_x <= value <= most_x]
    return LinePlot(
        "lines",
        _apart(lines, frame.top, frame.bottom),
        [Tick(x_of(value), number(value)) for value in xs],
        [Tick(y_of(value), number(value)) for value in ys],
        x_label,
        y_label,
        None if mark is None else Tick(x_of(mark[0]), mark[1]),
    )


def bar_plot(bars: Sequence[Bar], x_label: str, base: tuple[float, str] | None = None) -> BarPlot | None:
    """The plot; None without a bar."""
    if not bars:
        return None
    frame = BarPlot("bars", [], [], x_label, None, 0, 0)
    ends = [value for bar in bars for value in (bar.start, bar.end, bar.tick or 0.0)]
    marks = ticks(min(0.0, *ends), max(ends))
    low, high = marks[0], marks[-1]

    def x_of(value: float) -> float:
        return round(frame.left + (frame.right - frame.left) * (value - low) / ((high - low) or 1), 1)

    short = short_names([bar.name for bar in bars], _NAME_CHARACTERS)
    drawn = [
        DrawnBar(
            short[bar.name], bar.name, bar.text, bar.look, min(x_of(bar.start), x_of(bar.end)),
            max(abs(x_of(bar.end) - x_of(bar.start)), 1.0), frame.top + n * 28,
            None if bar.tick is None else x_of(bar.tick), bar.tick_text,
        )
        for n, bar in enumerate(bars)
    ]  # fmt: skip
    bottom = frame.top + len(bars) * 28
    return BarPlot(
        "bars",
        drawn,
        [Tick(x_of(value), number(value)) for value in marks],
        x_label,
        None if base is None else Tick(x_of(base[0]), base[1]),
        bottom + 44,
        bottom,
    )


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, evenly apart, from at most ``low`` to at least ``high``."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low if math.isfinite(low) else 0.0]
    rough = (high - low) / _TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def number(value: float) -> str:
    """Without digits that say nothing: ``0.05``, ``1.5``, ``12,000``."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"


def _path(places: Sequence[tuple[float, float]], steps: bool) -> str:
    first, *rest = places
    parts = [f"M{first[0]} {first[1]}"]
    for x, y in rest:
        parts.append(f"H{x} V{y}" if steps else f"L{x} {y}")
    return " ".join(parts)


def _apart(lines: Sequence[DrawnLine], top: float, bottom: float) -> list[DrawnLine]:
    """The names at the right kept 15 units apart, within the frame."""
    order = sorted(range(len(lines)), key=lambda n: lines[n].label_y)
    places = dict[int, float]()
    free = top
    for n in order:
        places[n] = max(lines[n].label_y, free)
        free = places[n] + 15
    over = max(0.0, free - 15 - bottom)
    return [
        DrawnLine(one.name, one.path, one.style, round(places[n] - over, 1), one.dots) for n, one in enumerate(lines)
    ]
