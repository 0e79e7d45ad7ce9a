"""The list of runs and campaigns: which of an index's rows are shown, and how."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from urllib.parse import quote, urlencode

from soakrig.record.corrections import Corrections, corrections
from soakrig.record.hazard import upper_95
from soakrig.record.run_summary import RunSummary
from soakrig.reports.corrections import headline, joint, launch_lines
from soakrig.reports.pages import environment, policy, script

SIZE = 100
"""Rows of one page."""
VERDICTS = ("", "pass", "fail", "inconclusive", "running", "contradicted", "campaign", "unreadable")
COLOURS = {"pass": "pass", "fail": "fail", "inconclusive": "inconclusive"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What to list: ``verdict`` one of ``VERDICTS``, ``text`` anywhere in a row, ``order`` newest or oldest first,
    ``of``: a campaign, whose launches are listed; ``page`` from 1."""

    verdict: str = ""
    reproducer: str = ""
    text: str = ""
    order: str = "newest"
    of: str = ""
    page: int = 1

    @classmethod
    def of_query(cls, query: Mapping[str, str]) -> Asked:
        """From an address; what it cannot mean counts as not said."""
        page = query.get("page", "1")
        return cls(
            verdict=one if (one := query.get("verdict", "")) in VERDICTS else "",
            reproducer=query.get("reproducer", "")[:200],
            text=query.get("text", "")[:200],
            order="oldest" if query.get("order") == "oldest" else "newest",
            of=query.get("of", "")[:500],
            page=int(page) if page.isascii() and page.isdigit() and len(page) < 7 else 1,
        )

    def address(self, page: int) -> str:
        """Of another page of the same."""
        said = {name: value for name in ("verdict", "reproducer", "text", "of") if (value := getattr(self, name))}
        return "/?" + urlencode({**said, "order": self.order, "page": page})


@dataclass(frozen=True, slots=True)
class ListRow:
    """One line of the list. ``address``: of its report, empty where there is none."""

    summary: RunSummary
    name: str
    address: str
    launches: str
    began: str
    verdict: str
    colour: str
    what: str
    outlived: bool
    corrections: Sequence[str]
    comparable: bool


@dataclass(frozen=True, slots=True)
class ListPage:
    """What the template is filled with. ``mark``: changes with the rows."""

    runs_dir: str
    asked: Asked
    of: str
    rows: Sequence[ListRow]
    total: int
    found: int
    verdicts: Sequence[str]
    reproducers: Sequence[str]
    earlier: str
    later: str
    mark: str


def list_html(runs_dir: str, rows: Sequence[RunSummary], asked: Asked) -> str:
    """The page. ``rows``: all of the index, the newest first."""
    own = script("runs.js")
    content = {"page": list_page(runs_dir, rows, asked), "script": own.text, "policy": policy(own, served=True)}
    return environment("html").get_template("runs.html.jinja").render(content)


def list_page(runs_dir: str, rows: Sequence[RunSummary], asked: Asked) -> ListPage:
    """Filtered and cut to one page."""
    top = [row for row in rows if row.campaign == asked.of]
    same = _by_settings(rows)
    found = [row for row in top if _fits(row, asked, same)]
    if asked.order == "oldest":
        found.reverse()
    pages = max(1, -(-len(found) // SIZE))
    page = min(max(asked.page, 1), pages)
    shown = found[(page - 1) * SIZE : page * SIZE]
    return ListPage(
        runs_dir=runs_dir,
        asked=asked,
        of=asked.of,
        rows=[_row(row, same) for row in shown],
        total=len(top),
        found=len(found),
        verdicts=VERDICTS,
        reproducers=["", *sorted({row.reproducer for row in top if row.reproducer})],
        earlier=asked.address(page - 1) if page > 1 else "",
        later=asked.address(page + 1) if page < pages else "",
        mark=mark(rows),
    )


def mark(rows: Sequence[RunSummary]) -> str:
    """16 hex digits that change with any row, but for the figures of what still runs."""
    told = [repr(replace(row, faults=None, exposure=None) if row.running else row) for row in rows]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def address(name: str) -> str:
    """Of the report of the row with that id."""
    return f"/run/{quote(name)}"


def _by_settings(rows: Sequence[RunSummary]) -> dict[str, list[RunSummary]]:
    """Runs of the same settings, the oldest first, where some faulted and some passed."""
    groups: dict[str, list[RunSummary]] = {}
    for row in reversed(rows):
        if row.settings:
            groups.setdefault(row.settings, []).append(row)
    return {
        settings: group
        for settings, group in groups.items()
        if any(one.counted and one.faulted for one in group) and any(one.verdict == "pass" for one in group)
    }


def _fits(row: RunSummary, asked: Asked, same: Mapping[str, Sequence[RunSummary]]) -> bool:
    if asked.reproducer and row.reproducer != asked.reproducer:
        return False
    if asked.text and asked.text.lower() not in _words(row):
        return False
    match asked.verdict:
        case "":
            return True
        case "running":
            return row.running
        case "campaign" | "unreadable":
            return row.kind == asked.verdict or (asked.verdict == "unreadable" and bool(row.unread))
        case "contradicted":
            found = _corrections(row, same)
            if row.kind == "campaign":
                return bool(_outlived(row, same))
            return found is not None and found.contradicted
        case _:
            return row.verdict == asked.verdict


def _words(row: RunSummary) -> str:
    parts = (row.id, row.reproducer, row.engine, row.model, row.verdict, row.ended, row.said, row.unread)
    return " ".join([*parts, *row.signatures]).lower()


def _corrections(row: RunSummary, same: Mapping[str, Sequence[RunSummary]]) -> Corrections | None:
    return corrections(row, same[row.settings]) if row.settings in same else None


def _outlived(row: RunSummary, same: Mapping[str, Sequence[RunSummary]]) -> list[Corrections]:
    """Of a campaign: see ``record.corrections.outlived_launches``."""
    launches = [one for group in same.values() for one in group if one.campaign == row.id]
    found = (_corrections(one, same) for one in launches)
    return [one for one in found if one is not None and one.outlived_by]


def _row(row: RunSummary, same: Mapping[str, Sequence[RunSummary]]) -> ListRow:
    found = _corrections(row, same)
    said = [headline(found), joint(found)] if found is not None else []
    if row.kind == "campaign":
        said = launch_lines(_outlived(row, same))
    verdict = "running" if row.running else row.verdict.replace("_", " ") or ("-" if row.kind == "other" else "unread")
    signatures = ", ".join(f"{count} x {name}" for name, count in row.signatures.items())
    return ListRow(
        summary=row,
        name=row.id.rpartition("/")[2],
        address="" if row.kind in ("unreadable", "other") else address(row.id),
        launches="/?" + urlencode({"of": row.id}),
        began=_moment(row.created),
        verdict=verdict,
        colour=COLOURS.get(verdict, "inconclusive" if row.kind not in ("campaign", "other") else ""),
        what=signatures or _bound(row) or row.said,
        outlived=(found is not None and found.contradicted) or (row.kind == "campaign" and bool(said)),
        corrections=said,
        comparable=row.kind in ("run", "launch"),
    )


def _bound(row: RunSummary) -> str:
    """What a pass came to, shorter than it says it itself."""
    if row.verdict != "pass" or row.exposure is None or (bound := upper_95(row.faults or 0, row.exposure)) is None:
        return ""
    return f"at most {100 * bound:.3g} % a turn at 95 % (derived)"


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "-"
