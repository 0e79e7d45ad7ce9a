"""The report of a bisect campaign as a page: one HTML file that needs no network, or Markdown for a pull request."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from soakrig.record.campaign import ArmResult, CampaignResult
from soakrig.record.redaction import HIDDEN, is_secret
from soakrig.reports.campaign_forest import forest
from soakrig.reports.campaign_text import (
    UNITS,
    UNKNOWN,
    arm_row,
    began,
    drift,
    inert,
    launch_line,
    ordered,
    proofs,
    quantity,
    summary,
    value_text,
    variables,
    void_groups,
)
from soakrig.reports.html_page import html_templates

MOST_LAUNCHES = 100
"""Launches in Markdown, the newest: a pull request takes 65,536 characters."""
_BRIEF = 160
"""Characters of a value in a cell of Markdown."""


def campaign_html(result: CampaignResult) -> str:
    """The page, whole: styles and drawing are in it, scripts and addresses are not."""
    return html_templates().get_template("campaign.html.jinja").render(_content(result))


def campaign_markdown(result: CampaignResult) -> str:
    """The same in GitHub's Markdown. Values stand in code spans or are escaped: no tags, mentions, links or cells of
    their own come of them."""
    return _markdown_templates().get_template("campaign.md.jinja").render(_content(result))


class Ready(str):
    """Markdown that is escaped already."""

    __slots__ = ()


def code(value: object, most: int = _BRIEF) -> Ready:
    """A code span. An empty one cannot be written and is told so."""
    return _span(inert(str(value), most))


def cell(value: object, most: int = _BRIEF) -> Ready:
    """A code span in a cell of a table, where a bar needs a backslash."""
    # a bar after a backslash can be written in no way that all readers of tables agree on
    return _span(inert(str(value), most).replace("\\|", "\\\\x7c").replace("|", "\\|"))


def _span(text: str) -> Ready:
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if text[:1] in ("`", " ") or text[-1:] in ("`", " ") else ""
    return Ready(f"{fence}{pad}{text}{pad}{fence}") if text else Ready("(empty)")


def prose(value: object) -> Ready:
    """Running text. A comment, which no reader shows, parts what GitHub would make a mention or a link of."""
    text = inert(str(value), 2000).strip().replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*{}\[\]|~$!])", r"\\\1", text)
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    text = re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", text)
    text = re.sub(r"^([+-])(?=\s|$)|^([-=])(?=\2*$)|^(#)", r"\\\g<0>", text)
    return Ready(re.sub(r"(?<=[@#])(?=\w)|(?<=GH-)(?=\d)|(?<=:)(?=//)|(?<=www)(?=\.)", "<!-- -->", text, flags=re.I))


@cache
def _markdown_templates() -> Environment:
    """Safe by default: what a template prints is escaped unless it is Markdown already."""
    made = Environment(
        loader=PackageLoader("soakrig.reports", "templates"),
        autoescape=False,  # noqa: S701  (finalize escapes)
        finalize=_inert_markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"code": code, "cell": cell}
    return made


def _inert_markdown(value: object) -> object:
    known = not isinstance(value, str) or isinstance(value, Ready) or value == UNKNOWN
    return value if known else prose(value)


def _content(result: CampaignResult) -> dict[str, Any]:
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
        "unit": unit,
        "summary": summary(result),
        "drift": drift(result),
        "arms": [(arm.verdict.lower(), arm_row(arm, unit)) for arm in arms],
        "at_least": f"{result.at_least:g}",
        "forest": forest(result.arms, result.at_least),
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
