"""How long a step takes: a fixed part, and a price for each missed row. And what bandwidth alone would allow.

The model is a line, fitted from measured points or given; whatever is read off it is ``modelled``. A line whose slope
would need more of the link than the link has is refused: then the points, their units or the link's rate are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from soakrig.errors import UsageError

from .quantity import Figure, unit_text

LINK_TOLERANCE = 0.01
"""Rates and times are given to three digits or so; a link may be exceeded by their rounding."""
STEP_TIME, ROW_PRICE, RATE = "s/step", "s/row", "B/s"


def expect(figure: Figure, unit: str, what: str) -> Figure:
    """The figure, if it measures what ``unit`` does. Raises UsageError saying which units came and which had to."""
    try:
        figure.to(unit)
    except UsageError as error:
        raise UsageError(
            f"{what} came in {unit_text(figure.dimensions) or 'plain numbers'}; {unit} was expected",
            remedy=error.remedy,
        ) from error
    return figure


def link_rate(moved: Figure, steps: Figure) -> Figure:
    """Bytes a second over a link: ``moved`` a step, ``steps`` a second.

    Raises UsageError for tokens a second: with more than one token a step that gives a rate that nothing ever had.
    """
    return expect(moved, "B/step", "what a step moves") * expect(steps, "step/s", "the rate of steps")


@dataclass(frozen=True, slots=True)
class StepModel:
    """``fixed`` seconds a step, ``per_row`` seconds a missed row; ``worst_error`` of the points it was fitted to, as a
    share (None: it was given)."""

    fixed: Figure
    per_row: Figure
    worst_error: float | None = None

    def __post_init__(self) -> None:
        expect(self.fixed, STEP_TIME, "the fixed part of a step")
        expect(self.per_row, ROW_PRICE, "the price of a missed row")
        if self.fixed.value < 0 or self.per_row.value < 0:
            raise UsageError(
                f"a step of {self.fixed.to('ms/step'):.4g} ms and {self.per_row.to('ms/row'):.4g} ms a missed row: "
                "neither can be negative",
                remedy="check the points; rows and times may be of different runs",
            )

    @classmethod
    def fit(cls, points: Sequence[tuple[Figure, Figure]]) -> Self:
        """Least squares over (missed rows a step, seconds a step).

        Raises UsageError for fewer than two different numbers of rows, and where the line would have a negative part.
        """
        rows = [expect(row, "row/step", "missed rows").value for row, _ in points]
        times = [expect(time, STEP_TIME, "the time of a step").value for _, time in points]
        if len(set(rows)) < 2:
            raise UsageError(
                f"{len(points)} points with {len(set(rows))} different numbers of missed rows: two were expected",
                remedy="measure a step at two numbers of slots",
            )
        slope, start = (float(one) for one in np.polyfit(rows, times, 1))
        errors = [abs(start + slope * row - time) / time for row, time in zip(rows, times, strict=True)]
        return cls(
            Figure.of(start, STEP_TIME, "modelled", f"fitted to {len(points)} points"),
            Figure.of(slope, ROW_PRICE, "modelled", f"fitted to {len(points)} points"),
            max(errors),
        )

    def step(self, rows: Figure) -> Figure:
        """Seconds of a step with so many missed rows (row/step)."""
        return _modelled(self.fixed + self.per_row * expect(rows, "row/step", "missed rows"))

    def implied_link(self, row: Figure) -> Figure:
        """Bytes a second that the price of a row of ``row`` (B/row) comes to."""
        return expect(row, "B/row", "the size of a row") / self.per_row

    def check_link(self, row: Figure, link: Figure) -> None:
        """Raises UsageError where the line needs more than ``link`` (B/s) has: its inputs contradict each other."""
        if not self.per_row.value:
            return
        implied = self.implied_link(row)
        if implied.value > expect(link, RATE, "the link's rate").value * (1 + LINK_TOLERANCE):
            raise UsageError(
                f"{self.per_row.to('ms/row'):.4g} ms for a row of {row.to('B/row'):,.0f} B is "
                f"{implied.to('GB/s'):.1f} GB/s, and the link has {link.to('GB/s'):.1f} GB/s",
                remedy="check what the price of a row was measured on: rows in slots never cross the link, and a "
                "token's share of a step is no step",
            )


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step moves: ``dense`` B/step read whatever is routed (without what is only looked up), ``experts`` rows a
    step that are computed, ``missed`` rows a step of them that cross the link, ``kv`` B/step, ``row`` B/row."""

    dense: Figure
    experts: Figure
    missed: Figure
    kv: Figure
    row: Figure


@dataclass(frozen=True, slots=True)
class Floors:
    """Seconds a step that bandwidth alone needs: ``hbm`` all reads of device memory, ``link`` the misses; ``overlap``
    the larger, which no schedule beats; ``serial`` the two after each other, where nothing is known in advance."""

    hbm: Figure
    link: Figure
    overlap: Figure
    serial: Figure

    def distance(self, measured: Figure) -> float:
        """How many times the floor a measured step takes."""
        return expect(measured, STEP_TIME, "the time of a step").share(self.overlap)

    def to_json(self) -> dict[str, Any]:
        """Every floor as a figure."""
        return {name: getattr(self, name).to_json() for name in ("hbm", "link", "overlap", "serial")}


def floors(work: StepWork, hbm: Figure, link: Figure, host: Figure | None = None) -> Floors:
    """Floors of a step at device, link and host-memory bandwidth (B/s); the slower of link and host memory counts."""
    narrow = link if host is None else min(link, host, key=lambda rate: expect(rate, RATE, "a bandwidth").value)
    on_device = _modelled((work.dense + work.experts * work.row + work.kv) / expect(hbm, RATE, "device bandwidth"))
    over_link = _modelled(work.missed * work.row / expect(narrow, RATE, "the link's rate"))
    return Floors(on_device, over_link, max(on_device, over_link, key=lambda time: time.value), on_device + over_link)


def _modelled(figure: Figure) -> Figure:
    return figure.labelled("step model", "uncontrolled" if figure.kind == "uncontrolled" else "modelled")
