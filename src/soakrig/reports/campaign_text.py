"""What every face of a campaign's report says alike: the order of its arms, figures as text, values made inert."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size

from soakrig.record.campaign import ArmLaunch, ArmResult, ArmRole, CampaignResult, Span

ROLES: tuple[ArmRole, ...] = ("control", "all_off", "one", "add_back", "pair")
"""In the order in which people read them."""
NOT_JUDGED = "not judged"
UNKNOWN = "-"
MOST = 400
"""Characters of a value that a report shows; the run folder has the rest."""
_UNSET = {"unset": True}


@dataclass(frozen=True)
class Unit:
    """Exposure in words. ``per``: what a rate is told in, ``scale`` times the rate of one unit."""

    one: str
    many: str
    per: str
    scale: float

    def amount(self, exposure: float) -> str:
        """``7 turns``"""
        return f"{quantity(exposure)} {self.one if exposure == 1 else self.many}"


UNITS: Mapping[str, Unit] = {
    "turns": Unit("turn", "turns", "turn", 1.0),
    "output_tokens": Unit("output token", "output tokens", "1,000 output tokens", 1000.0),
}


class ArmRow(NamedTuple):
    """An arm's figures as text, alike in all faces."""

    name: str
    claim: str
    runs: str
    exposure: str
    faults: str
    expected: str
    void: str
    rate: str
    ratio: str
    p: str
    posterior: str
    why: str


class VoidGroup(NamedTuple):
    """Void launches of one reason: how many, why, and of which arms (``control 2, all-off``)."""

    launches: int
    reason: str
    arms: str


def inert(text: str, most: int = MOST) -> str:
    """``text`` on one line, with what a terminal or a browser would obey (escapes, newlines, marks of direction) shown
    as a backslash escape, and cut to ``most`` characters."""
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def ordered(arms: Sequence[ArmResult]) -> list[ArmResult]:
    """The control first, then all off, the one-variable arms, add-backs, pairs; within a role as given."""
    return sorted(arms, key=lambda arm: ROLES.index(arm.role))


def short_names(names: Sequence[str], width: int, show: Callable[[str], str] = inert) -> dict[str, str]:
    """Each name as ``show`` gives it, in at most ``width`` cells, cut in the middle; no two become alike."""
    found: dict[str, str] = {}
    for full in names:
        name, n = show(full), 1
        short = _middle(name, width)
        while short in found.values():
            n += 1
            mark = f"~{n}"
            short = _middle(name, width - len(mark)) + mark
        found[full] = short
    return found


def _middle(name: str, width: int) -> str:
    if cell_len(name) <= width:
        return name
    tail = (width - 3) // 2
    end = next(at for at in range(len(name) + 1) if cell_len(name[at:]) <= tail)
    return f"{set_cell_size(name, width - 3 - tail)}...{name[end:]}"


def quantity(value: float | None) -> str:
    """A count or an amount: thousands parted, three digits behind the point at most."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def figure(value: float | None) -> str:
    """A measured figure in three digits."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if value == 0 or abs(value) >= 1000 else f"{value:.3g}"


def span(value: Span | None, *, scale: float = 1.0, none: str = UNKNOWN) -> str:
    """``0.0276 (0.009..0.0644)``; ``none`` where there is nothing to tell."""
    if value is None:
        return none
    high = value.high if value.high is not None and math.isfinite(value.high) else None
    top = figure(high * scale) if high is not None else "unbounded"
    return f"{figure(value.estimate * scale)} ({figure(value.low * scale)}..{top})"


def chance(value: float | None) -> str:
    """A posterior probability, never rounded to certainty."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if 0.9995 <= value < 1:
        return ">0.999"
    return "<0.001" if 0 < value < 0.0005 else f"{value:.3f}"


def p_value(value: float | None) -> str:
    """A p-value in two digits."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2g}"


def arm_row(arm: ArmResult, unit: Unit) -> ArmRow:
    """The figures of ``arm``. What is not known is told so, and never as 0."""
    return ArmRow(
        name=arm.name, claim=inert(arm.claim), runs=f"{arm.runs:,}", exposure=quantity(arm.exposure),
        faults=f"{arm.faults:,}", expected=figure(arm.expected), void=f"{arm.void:,}",
        rate=span(arm.rate, scale=unit.scale), ratio=ratio_text(arm), p=p_value(arm.p),
        posterior=chance(arm.posterior), why=inert(arm.why),
    )  # fmt: skip


def ratio_text(arm: ArmResult) -> str:
    """Its ratio to the control. An arm may be judged (it has a p) and have none, where its controls had no fault."""
    return span(arm.ratio, none=UNKNOWN if arm.role == "control" or arm.p is not None else NOT_JUDGED)


def void_groups(arms: Sequence[ArmResult]) -> list[VoidGroup]:
    """The void launches by reason, the commonest first. Those without a recorded reason are a group too."""
    found: dict[str, dict[str, int]] = {}
    for arm in ordered(arms):
        reasons = dict(arm.void_reasons)
        untold = arm.void - sum(reasons.values())
        if untold > 0:
            reasons["no reason recorded"] = reasons.get("no reason recorded", 0) + untold
        for reason, count in reasons.items():
            found.setdefault(reason, {})[arm.name] = count
    groups = [
        VoidGroup(
            sum(by_arm.values()),
            inert(reason, 200),
            inert(", ".join(name if n == 1 else f"{name} {n}" for name, n in by_arm.items()), 200),
        )
        for reason, by_arm in found.items()
    ]
    return sorted(groups, key=lambda group: -group.launches)


def launch_line(launch: ArmLaunch, unit: Unit) -> str:
    """How a launch ended, in a few words; how far it is where it goes on."""
    amount, said = unit.amount(launch.exposure), inert(launch.reason, 200)
    more = f": {said}" if said else ""
    match launch.result:
        case "faulted":
            return f"faulted after {amount}: {inert(launch.signature or '', 200) or said or 'signature unknown'}"
        case "clean":
            return f"clean, {amount}"
        case "void":
            return f"VOID: {said or 'no reason recorded'}"
        case "host_lost":
            return f"host lost after {amount}{more}"
        case None:
            return f"{inert(launch.state)}, {quantity(launch.exposure)} of {unit.amount(launch.cap)}"
        case other:
            return f"{inert(other)} after {amount}{more}"


def began(launch: ArmLaunch) -> str:
    """When it began, in UTC: a report is read elsewhere."""
    try:
        return datetime.fromtimestamp(launch.began, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def value_text(value: Any) -> str:
    """A value of a variable, or any part of the campaign's spec."""
    if value is None or value == _UNSET:
        return "(unset)"
    if value == "":
        return "(empty)"
    return inert(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def variables(result: CampaignResult) -> dict[str, list[Any]]:
    """Values of each variable, the control's first, as the spec has them; empty where it does not say."""
    asked = result.spec.get("variables")
    if not isinstance(asked, dict):
        return {}
    return {str(name): list(values) for name, values in asked.items() if isinstance(values, list)}


def proofs(result: CampaignResult) -> dict[str, str]:
    """How each variable was shown to be in effect; one of which nothing is known is told so."""
    names = dict.fromkeys([*variables(result), *result.proofs])
    return {name: result.proofs.get(name) or "not shown yet" for name in names}


def summary(result: CampaignResult) -> str:
    """Hours, launches and what was asked."""
    unit = UNITS[result.unit]
    void = sum(arm.void for arm in result.arms)
    return (
        f"{quantity(result.hours)} of {quantity(result.budget_hours)} h, {len(result.launches):,} launches"
        f"{f', {void:,} void' if void else ''}; cap {unit.amount(result.cap)}; "
        f"{100 * result.confidence:g} % confidence, CLEARED asks for at least {result.at_least:g} times"
    )


def drift(result: CampaignResult) -> str:
    """Whether the control stood still."""
    if result.drift_p is None:
        return f"drift of the control: {NOT_JUDGED}"
    return f"drift of the control between its first and second half: p = {p_value(result.drift_p)} (derived)"
