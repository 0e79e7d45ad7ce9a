"""What every HTML page of ours is made with: whole in one file, with nothing in it that a browser would obey."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from soakrig.reports.campaign_text import inert

MOST_TEXT = 4000


@cache
def html_templates() -> Environment:
    """The templates of ``reports/templates``: what they print is escaped unless it is markup already."""
    return Environment(
        loader=PackageLoader("soakrig.reports", "templates"),
        autoescape=True,
        finalize=_inert,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _inert(value: object) -> object:
    return inert(value, MOST_TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value
