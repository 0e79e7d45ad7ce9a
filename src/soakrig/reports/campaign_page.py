"""The report of a bisect campaign as a page: one HTML file that needs no network, or Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soakrig.record.campaign import ArmResult, CampaignResult
from soakrig.record.redaction import HIDDEN, is_secret
from soakrig.reports.campaign_forest import forest
from soakrig.reports.campaign_survival import survival
from soakrig.reports.campaign_text import (
    UNITS,
    arm_row,
    began,
    drift,
    launch_line,
    ordered,
    proofs,
    quantity,
    summary,
    value_text,
    variables,
    void_groups,
)
from soakrig.reports.pages import environment

MOST_LAUNCHES = 100
"""Launches in Markdown, the newest: a pull request takes 65,536 characters."""


def campaign_html(result: CampaignResult, corrections: Sequence[str] = ()) -> str:
    """The page, whole: styles and drawing are in it, scripts and addresses are not. ``corrections``: what later runs
    say against its clean launches, a sentence each."""
    return environment("html").get_template("campaign.html.jinja").render(_content(result, corrections))


def campaign_markdown(result: CampaignResult, corrections: Sequence[str] = ()) -> str:
    """The same in GitHub's Markdown. Values stand in code spans or are escaped: no tags, mentions, links or cells of
    their own come of them."""
    return environment("md").get_template("campaign.md.jinja").render(_content(result, corrections))


def _content(result: CampaignResult, corrections: Sequence[str]) -> dict[str, Any]:
    """What both templates are filled with: text only, for them to escape."""
    arms = ordered(result.arms)
    unit = UNITS[result.unit]
    asked = variables(result)
    spec = {key: value for key, value in result.spec.items() if key not in ("variables", "settings", "flags")}
    launches = [
        (str(one.id), one.arm, began(one), "-" if one.seconds is None else quantity(one.seconds),
         launch_line(one, unit), one.why, one.folder)
        for one in result.launches
    ]  # fmt: skip
    return {
        "result": result,
        "corrections": corrections,
        "unit": unit,
        "summary": summary(result),
        "drift": drift(result),
        "arms": [(arm.verdict.lower(), arm_row(arm, unit)) for arm in arms],
        "at_least": f"{result.at_least:g}",
        "forest": forest(result.arms, result.at_least),
        "survival": survival(result),
        "voids": void_groups(result.arms),
        "signatures": sorted(result.signatures.items(), key=lambda item: -item[1]),
        "launches": launches,
        "most_launches": MOST_LAUNCHES,
        "variables": list(asked),
        "matrix": [(arm.name, _cells(arm, asked)) for arm in arms],
        "proofs": proofs(result),
        "settings": _flat(result.spec.get("settings")),
        "flags": [value_text(flag) for flag in result.spec.get("flags") or []],
        "spec": _flat(spec),
        "fingerprint": _flat(result.fingerprint),
    }


def _cells(arm: ArmResult, asked: dict[str, list[Any]]) -> list[tuple[str, bool]]:
    """Value of each variable in ``arm``, and whether it differs from the control's."""
    cells: list[tuple[str, bool]] = []
    for name, values in asked.items():
        changed = name in arm.changes
        value = arm.changes[name] if changed else values[0] if values else None
        cells.append((HIDDEN if is_secret(name) and value is not None else value_text(value), changed))
    return cells


def _flat(data: Any) -> list[tuple[str, str]]:
    """Names and values, those of inner objects by their path."""
    if not isinstance(data, dict):
        return []
    found: list[tuple[str, str]] = []
    for name, value in data.items():
        inner = _flat(value) if isinstance(value, dict) else []
        found += [(f"{name}.{key}", text) for key, text in inner] or [(str(name), value_text(value))]
    return found
