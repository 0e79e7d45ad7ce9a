"""The report of a run as a page: one HTML file that needs no network, or Markdown for a pull request."""

from __future__ import annotations

from typing import Any

import orjson
from markupsafe import Markup

from soakrig.record.latency import decode_rate
from soakrig.record.outcome import OUTCOMES
from soakrig.reports.campaign_text import inert
from soakrig.reports.corrections import correction_lines
from soakrig.reports.pages import environment, policy, script
from soakrig.reports.run_chart import run_chart, short
from soakrig.reports.run_settings import differences, effective, launch_facts, shown
from soakrig.reports.run_view import RunView, flat
from soakrig.reports.series import sparkline

WHY = 300
"""Characters of a turn's reason that its row has; the run folder has the whole."""
MOST_STATIC = 50
"""Bad turns that the page shows without its script."""


def run_html(view: RunView, against: RunView | None = None, *, served: str = "") -> str:
    """The page, whole: styles, drawing, figures and script are in it, addresses are not. ``against``: the run whose
    settings it is compared with. ``served``: the run's name in the addresses of ``soak report --serve``; the page then
    has a way back to the list and follows a run that goes on."""
    live = [script("live.js")] if served and view.running else []
    content = _content(view, against) | {
        "chart": run_chart(view),
        "data": Markup(_data(view)),  # noqa: S704  (_data leaves no < in it)
        "scripts": [one.text for one in (script("run.js"), *live)],
        "policy": Markup(policy(script("run.js"), *live, served=bool(served))),  # noqa: S704  (our own words)
        "served": served,
        "live": bool(live),
    }
    return environment("html").get_template("run.html.jinja").render(content)


def run_markdown(view: RunView, against: RunView | None = None) -> str:
    """The same in GitHub's Markdown, without the turns that were ok."""
    return environment("md").get_template("run.md.jinja").render(_content(view, against))


def _content(view: RunView, against: RunView | None) -> dict[str, Any]:
    """What both templates are filled with: text and plain values, for them to escape."""
    result, manifest = view.result, view.manifest
    bad = [turn for turn in view.turns if turn.outcome != "ok"]
    counts = [(name, result.outcomes[name]) for name in OUTCOMES if result.outcomes.get(name)]
    latency = result.latency
    ttft, answer, decode = latency.ttft_s, latency.first_answer_s, latency.decode_tokens_per_s
    return {
        "view": view,
        "word": "running" if view.running else result.verdict,
        "corrections": correction_lines(view.corrections) if view.corrections is not None else [],
        "result": result,
        "manifest": manifest,
        "turns": len(view.turns),
        "counts": counts,
        "outcomes": ", ".join(f"{name} {count}" for name, count in counts) or "none",
        "bad": bad[:MOST_STATIC],
        "bad_left": len(bad[MOST_STATIC:]),
        "quantiles": [
            ("time to first token, s", _all(ttft.p50, ttft.p90, ttft.p99)),
            ("first answer, s", _all(answer.p50, answer.p90, answer.p99)),
        ],
        "rates": _all(decode.p10, decode.p50, decode.p90),
        "throughput": figure(latency.throughput_tokens_per_s),
        "effective": effective(manifest),
        "launch": launch_facts(manifest),
        "differences": differences(against.manifest, manifest) if against is not None else [],
        "against": against,
        "fingerprint": [(name, shown(name, value)) for name, value in flat(manifest.fingerprint)],
        "host": [(name, shown(name, value)) for name, value in flat(manifest.host)],
        "figure": figure,
        "spark": _spark,
        "utc": utc,
    }


def figure(value: float | None) -> str:
    """Three significant digits; a dash where there is no value."""
    return "-" if value is None else short(value)


def utc(seconds: float) -> str:
    """A moment as ``2026-11-30 02:07:02 UTC``."""
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "-"


def _spark(values: list[float]) -> str:
    return sparkline(values, 32)


def _all(*values: float | None) -> list[str]:
    return [figure(value) for value in values]


def _data(view: RunView) -> str:
    """Every turn in columns, as JSON that cannot end a script element: the page's table is made of it."""
    turns = view.turns
    names = [name for name in OUTCOMES if any(turn.outcome == name for turn in turns)]
    index = {name: n for n, name in enumerate(names)}

    def ms(value: float | None) -> int | None:
        return None if value is None else round(value * 1000)

    columns: dict[str, Any] = {
        "outcomes": names,
        "conversation": [turn.conversation for turn in turns],
        "turn": [turn.turn for turn in turns],
        "outcome": [index[turn.outcome] for turn in turns],
        "at": [round(at, 1) for at in view.at],
        "ttft_ms": [ms(turn.ttft_s) for turn in turns],
        "ms": [ms(turn.duration_s) for turn in turns],
        "rate": [None if (rate := decode_rate(turn)) is None else float(f"{rate:.3g}") for turn in turns],
        "context": [turn.context_tokens for turn in turns],
        "output": [turn.output_tokens for turn in turns],
        "why": {str(n): inert(turn.why[:WHY], WHY) for n, turn in enumerate(turns) if turn.outcome != "ok"},
    }
    return orjson.dumps(columns).decode().replace("<", "\\u003c").replace("&", "\\u0026")
