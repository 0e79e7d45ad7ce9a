"""How long launches of each arm lasted: Kaplan and Meier's curves over exposure (JASA 53, 1958)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soakrig.record.campaign import ArmLaunch, CampaignResult
from soakrig.reports.campaign_text import UNITS, figure, ordered, short_names
from soakrig.reports.plan_charts import LinePlot, Series, line_plot

MOST_ARMS = 6
"""Curves in one drawing; the table has every arm."""
_COUNT = ("clean", "faulted")


@dataclass(frozen=True, slots=True)
class Survived:
    """An arm's row: launches that count, those that faulted, and the share that the curve leaves at its end."""

    name: str
    launches: int
    faulted: int
    share: str
    until: str


@dataclass(frozen=True)
class Survival:
    """``plot``: in the shape of ``plan_lines.svg.jinja``; ``rows``: every arm that has a launch that counts."""

    key: str
    heading: str
    summary: str
    plot: LinePlot
    rows: list[Survived]
    left_out: int


def curve(launches: Sequence[ArmLaunch]) -> list[tuple[float, float]]:
    """Steps (exposure, share without a fault) of the launches that count, from (0, 1) on. A clean launch is censored
    where it ended: at one exposure faults come before it, as it had lived through that moment."""
    ends = sorted((one.exposure, one.result != "faulted") for one in launches if one.result in _COUNT)
    points, share = [(0.0, 1.0)], 1.0
    for n, (at, clean) in enumerate(ends):
        if not clean:
            share *= 1 - 1 / (len(ends) - n)
            points.append((at, share))
    if ends and ends[-1][0] > points[-1][0]:
        points.append((ends[-1][0], share))
    return points


def survival(result: CampaignResult) -> Survival | None:
    """The curves; None where no launch counts, or none was under load."""
    by_arm: dict[str, list[ArmLaunch]] = {}
    for one in result.launches:
        if one.result in _COUNT:
            by_arm.setdefault(one.arm, []).append(one)
    names = [arm.name for arm in ordered(result.arms) if arm.name in by_arm]
    unit = UNITS[result.unit]
    curves = {name: curve(by_arm[name]) for name in names}
    drawn = sorted(names, key=lambda name: (names.index(name) > 1, -len(by_arm[name])))[:MOST_ARMS]
    short = short_names(drawn, 14)
    control = names[0] if names else ""
    plot = line_plot(
        [Series(short[name], curves[name], "dashed" if name == control else "solid", steps=True) for name in drawn],
        f"{unit.many} under load",
        "share of launches without a fault",
    )
    if plot is None:
        return None
    rows = [
        Survived(
            name, len(by_arm[name]), sum(one.result == "faulted" for one in by_arm[name]),
            f"{100 * curves[name][-1][1]:.0f} %", figure(curves[name][-1][0]),
        )
        for name in names
    ]  # fmt: skip
    summary = "; ".join(f"{row.name}: {row.share} after {row.until} {unit.many}" for row in rows)
    return Survival("survival", "How long launches lasted", f"{summary}.", plot, rows, len(names) - len(drawn))
