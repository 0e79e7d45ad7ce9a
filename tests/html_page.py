"""A report's page as tests read it, and what holds for every one: whole in itself, and readable by everybody."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

EMPTY = {"input", "meta", "line", "path", "rect"}
TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "h1", "h2", "h3", "p",
    "ul", "li",
    "code", "strong", "small", "span", "div", "table", "caption", "thead", "tbody", "tr", "th", "td", "dl", "dt", "dd",
    "figure", "figcaption", "details", "summary", "svg", "desc", "g", "line", "path", "rect", "text",
}  # fmt: skip


class Page(HTMLParser):
    """A page as a list of tags, with attributes and the text below each. Refuses tags that do not close."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str], list[str]]] = []
        self.open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in EMPTY:
            self.open.append(self.found[-1])

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY:
            assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, texts in self.open:
            texts.append(data)

    def all(self, tag: str) -> list[str]:
        """Text of each such element."""
        return [" ".join("".join(texts).split()) for name, _, texts in self.found if name == tag]

    def attributes(self, name: str) -> list[str]:
        """Every value of an attribute."""
        return [values[name] for _, values, _ in self.found if name in values]


def assert_self_contained(html: str) -> None:
    """No script, no address, nothing fetched; tags and attributes of a known list."""
    page = Page(html)
    assert {tag for tag, _, _ in page.found} <= TAGS
    names = {name for _, attributes, _ in page.found for name in attributes}
    assert not [name for name in names if re.fullmatch(r"on.*|src|srcset|(xlink:)?href|style|action|data|poster", name)]
    assert not re.search(r"url\(|@import|https?://|javascript:", html)
    assert page.attributes("content")[-1].startswith("default-src 'none'")


def assert_marked_up(html: str) -> None:
    """Headings in order, ids once, labels that exist, captions and scopes, and every wide thing in a box to scroll."""
    page = Page(html)
    heads = [int(tag[1]) for tag, _, _ in page.found if tag in ("h1", "h2", "h3")]
    assert heads.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(heads))
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    for label in page.attributes("aria-labelledby"):
        assert set(label.split()) <= set(ids)
    tags = [tag for tag, _, _ in page.found]
    assert tags.count("table") == tags.count("caption")
    assert all(values.get("scope") in ("row", "col") for tag, values, _ in page.found if tag == "th")
    boxes = [values for _, values, _ in page.found if values.get("class") == "scroll"]
    assert len(boxes) == tags.count("table") + tags.count("svg")
    assert all(box["tabindex"] == "0" and box["role"] == "region" and box["aria-label"] for box in boxes)
