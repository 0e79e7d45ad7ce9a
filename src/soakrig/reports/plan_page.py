"""The page of a plan: plots with the figures that they are drawn from, in one HTML file that needs no network.

It is handed plain data: whoever plans says what is shown, and nothing here knows what a slot is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from soakrig.reports.pages import environment
from soakrig.reports.plan_charts import Plot


@dataclass(frozen=True)
class PlanTable:
    """``columns`` and ``rows`` of text; the first column names the row. ``caption``: what the figures are, and of which
    kind (measured, derived, modelled, uncontrolled)."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class PlanPart:
    """A section. ``key``: a name for its id, letters and dashes. ``summary``: one sentence that says what the plot
    shows, for those who cannot see it too. ``plot`` None: there is nothing to draw."""

    key: str
    heading: str
    summary: str
    table: PlanTable
    plot: Plot | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class PlanPage:
    """``said``: the sentences above everything; ``facts``: names and values of what it rests on."""

    title: str
    subject: str
    said: Sequence[str]
    parts: Sequence[PlanPart]
    facts: Sequence[tuple[str, str]] = field(default_factory=tuple[tuple[str, str], ...])


def plan_html(page: PlanPage) -> str:
    """The page, whole: styles and drawings are in it, scripts and addresses are not."""
    return environment("html").get_template("plan.html.jinja").render(page=page)
