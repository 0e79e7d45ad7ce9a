"""Where the marks of a forest plot stand: the ratio of each arm to the control on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from soakrig.record.campaign import ArmResult, Span
from soakrig.reports.campaign_text import figure, ordered, ratio_text, short_names

WIDTH = 810
LEFT, RIGHT = 250, 580
"""The axis; names stand left of it, figures right."""
ROW, TOP = 28, 34
_NAME_CHARACTERS = 30
_DECADES = (-3.0, 2.0)
"""Never wider: a ratio of a thousandth is as good as none."""


@dataclass(frozen=True)
class ForestRow:
    """An arm's line, in units of the drawing. ``low`` to ``high``: the interval, cut to the axis; None where nothing
    is judged. ``at``: the estimate, None where it is off the axis. ``open_left``, ``open_right``: it goes on there."""

    name: str
    full_name: str
    text: str
    verdict: str
    y: float
    low: float | None = None
    high: float | None = None
    at: float | None = None
    open_left: bool = False
    open_right: bool = False


@dataclass(frozen=True)
class Forest:
    """``ticks``: place and label. ``control``: place of 1. ``asked``: place of 1 / ``at_least``, what CLEARED asks."""

    rows: list[ForestRow]
    ticks: list[tuple[float, str]]
    control: float
    asked: float
    height: float
    axis: str
    width: int = WIDTH
    left: int = LEFT
    right: int = RIGHT
    bottom: float = 0.0


def forest(arms: Sequence[ArmResult], at_least: float) -> Forest | None:
    """The plot of all arms but the control; None where no arm has a ratio."""
    shown = [arm for arm in ordered(arms) if arm.role != "control"]
    ratios = [arm.ratio for arm in shown if arm.ratio is not None]
    if not ratios:
        return None
    low, high = _decades([end for ratio in ratios for end in (ratio.low, ratio.estimate, ratio.high)], 1 / at_least)

    def place(value: float) -> float:
        log = math.log10(value) if value > 0 else low
        return round(LEFT + (RIGHT - LEFT) * (min(max(log, low), high) - low) / (high - low), 1)

    short = short_names([arm.name for arm in shown], _NAME_CHARACTERS)
    rows: list[ForestRow] = []
    for n, arm in enumerate(shown):
        row = ForestRow(short[arm.name], arm.name, ratio_text(arm), arm.verdict, TOP + n * ROW + 14)
        rows.append(row if arm.ratio is None else _marked(row, arm.ratio, 10**low, 10**high, place))
    bottom = TOP + len(shown) * ROW
    return Forest(
        rows=rows,
        ticks=[(place(10.0**n), figure(10.0**n)) for n in range(math.ceil(low), math.floor(high) + 1)],
        control=place(1.0),
        asked=place(1 / at_least),
        height=bottom + 44,
        axis=f"{figure(10**low)} to {figure(10**high)}",
        bottom=bottom,
    )


def _marked(row: ForestRow, ratio: Span, least: float, most: float, place: Callable[[float], float]) -> ForestRow:
    high = math.inf if ratio.high is None or math.isnan(ratio.high) else ratio.high
    return replace(
        row,
        low=place(ratio.low),
        high=place(high) if math.isfinite(high) else place(most),
        at=place(ratio.estimate) if least <= ratio.estimate <= most else None,
        open_left=not ratio.low >= least,
        open_right=high > most,
    )


def _decades(values: Iterable[float | None], asked: float) -> tuple[float, float]:
    """Ends of the axis as powers of ten, in steps of a half, with everything on it that is finite and above 0."""
    logs = [math.log10(value) for value in (*values, asked) if value and value > 0 and math.isfinite(value)]
    low = math.floor(2 * min([*logs, -1.0])) / 2
    high = math.ceil(2 * max([*logs, 0.3])) / 2
    return max(low, _DECADES[0]), min(high, _DECADES[1])
