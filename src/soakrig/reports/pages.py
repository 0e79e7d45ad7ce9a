"""What every page is made with: templates that are safe by default, and Markdown that stays what it says."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from soakrig.reports.campaign_text import UNKNOWN, inert

_BRIEF = 160
"""Characters of a value in a cell of Markdown."""


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


@dataclass(frozen=True, slots=True)
class Script:
    """A script of ours for a page, and the source by which a Content-Security-Policy lets it and no other run."""

    text: Markup
    source: str


@cache
def script(name: str) -> Script:
    """A file of ``reports/templates/``."""
    text = resources.files("soakrig.reports").joinpath("templates", name).read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Script(Markup(text), f"'sha256-{digest}'")  # noqa: S704  (our own file)


def policy(*scripts: Script, served: bool = False) -> str:
    """The Content-Security-Policy of a page with these scripts: nothing from anywhere; of its own server what a poll
    and a filter need, where it is ``served``."""
    parts = ["default-src 'none'", "style-src 'unsafe-inline'"]
    if scripts:
        parts.append(" ".join(["script-src", *(one.source for one in scripts)]))
    return "; ".join([*parts, *(["connect-src 'self'", "img-src 'self'", "form-action 'self'"] if served else [])])


@cache
def environment(kind: str) -> Environment:
    """The templates of a kind, ``html`` or ``md``. Both are safe by default: what a template prints is escaped unless
    it is markup already."""
    html = kind == "html"
    made = Environment(
        loader=PackageLoader("soakrig.reports", "templates"),
        autoescape=html,  # noqa: S701  (Markdown is escaped by finalize)
        finalize=_inert_html if html else _inert_markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"code": code, "cell": cell}
    return made


def _inert_html(value: object) -> object:
    return inert(value, 4000) if isinstance(value, str) and not isinstance(value, Markup) else value


def _inert_markdown(value: object) -> object:
    known = not isinstance(value, str) or isinstance(value, Ready) or value == UNKNOWN
    return value if known else prose(value)
