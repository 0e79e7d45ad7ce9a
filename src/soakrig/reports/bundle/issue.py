"""``issue.md``, made to be pasted into an issue upstream, and ``redactions.md``, which says what was hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soakrig.record.campaign import CampaignResult, Span
from soakrig.record.outcome import OUTCOMES
from soakrig.record.private_things import KINDS
from soakrig.record.signal import Signal
from soakrig.reports.bundle.redacted_run import Cleaner
from soakrig.reports.bundle.reproducer import Payload
from soakrig.reports.campaign_text import UNITS, arm_row, drift, ordered, span, summary
from soakrig.reports.pages import environment
from soakrig.reports.run_page import figure, utc
from soakrig.reports.run_settings import effective, launch_facts, shown
from soakrig.reports.run_view import RunView, ToldFault, flat

_READ = ("engine", "client", "fault_type", "access", "address", "pci", "process")
"""Fields that were read out of a kernel line."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a bundle tells beside the run. ``signature``: the fault's name, empty for a run without one. ``meanings``:
    by Xid, what NVIDIA's catalogue says. ``interval``: faults a turn with the exact 95 % interval, None without a turn.
    ``campaign``: that the run belongs to."""

    signature: str = ""
    meanings: Mapping[int, str] = field(default_factory=dict[int, str])
    interval: Span | None = None
    campaign: CampaignResult | None = None


def issue_text(view: RunView, payload: Payload | None, told: Told, *, keep_text: bool) -> str:
    """The issue; everything that goes in has to be redacted already."""
    result, manifest = view.result, view.manifest
    campaign = told.campaign
    unit = UNITS[campaign.unit] if campaign is not None else None
    counts = [(name, result.outcomes[name]) for name in OUTCOMES if result.outcomes.get(name)]
    content: dict[str, Any] = {
        "view": view,
        "result": result,
        "manifest": manifest,
        "signature": told.signature,
        "title": _title(view, told.signature),
        "outcomes": ", ".join(f"{name} {count}" for name, count in counts) or "none",
        "faults": [(one, _decoded(one, told.meanings)) for one in view.faults],
        "interval": None if told.interval is None else span(told.interval),
        "effective": [row for row in effective(manifest) if row.source != "default"],
        "launch": launch_facts(manifest),
        "facts": [(n, shown(n, v)) for table in (manifest.fingerprint, manifest.host) for n, v in flat(table)],
        "watched": [(name, one) for name, one in result.sources.items() if one.state == "live"],
        "unwatched": [(name, one) for name, one in result.sources.items() if one.state != "live"],
        "campaign": campaign,
        "campaign_summary": summary(campaign) if campaign is not None else "",
        "campaign_drift": drift(campaign) if campaign is not None else "",
        "arms": [arm_row(arm, unit) for arm in ordered(campaign.arms)] if campaign is not None and unit else [],
        "payload": payload,
        "keep_text": keep_text,
        "figure": figure,
        "utc": utc,
    }
    return environment("md").get_template("bundle_issue.md.jinja").render(content)


def redactions_text(cleaner: Cleaner, payload: Payload | None, *, simulated: bool, names: Sequence[str]) -> str:
    """What was hidden: kinds and how often, no values. ``names``: of the archive's files."""
    redactor, quotes = cleaner.redactor, cleaner.quotes
    different = {kind: len({told for (one, _), told in redactor.values.items() if one == kind}) for kind in KINDS}
    rows = [(kind, words, redactor.counts[kind], different[kind]) for kind, words in KINDS.items()]
    content = {
        "rows": rows,
        "payload": payload,
        "keep_text": quotes is None,
        "quoted": 0 if quotes is None else quotes.hidden,
        "ambiguous": sorted({kind for kind, _ in redactor.ambiguous}),
        "simulated": simulated,
        "names": names,
    }
    return environment("md").get_template("bundle_redactions.md.jinja").render(content)


def _title(view: RunView, signature: str) -> str:
    """``Xid 31 ...: turn 9, 14,200 context tokens``."""
    if not signature:
        return f"A run without a fault: {view.result.verdict}"
    for told in view.faults:
        if told.fault.turn is not None:
            context = told.fault.context_tokens
            return f"{signature}: turn {told.fault.turn}" + (f", {context:,} context tokens" if context else "")
    first = view.result.first_bad
    return signature if first is None else f"{signature}: turn {first.turn}"


def _decoded(told: ToldFault, meanings: Mapping[int, str]) -> dict[str, Any]:
    """What a fault's kernel line says, field by field, and what its number means."""
    fault = told.fault
    own: Signal | None = next((one for one in told.signals if one.raw == fault.raw), None)
    fields = [(name.replace("_", " "), str(value)) for name in _READ if (value := getattr(own or fault, name, None))]
    return {
        "fields": fields,
        "meaning": meanings.get(fault.xid, "") if fault.xid is not None else "",
        "lines": [one for one in told.signals if one.source == "kernel_log"],
    }
