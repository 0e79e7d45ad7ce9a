"""A campaign's result, read from its journal: the object of ``soak bisect --json``, running or not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from soakrig.bisect.arms import PlannedArm
from soakrig.bisect.campaign import ENDED, SESSION, budget_seconds
from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.conclusion import Conclusion, conclude
from soakrig.bisect.drift import drift_p
from soakrig.bisect.evidence import Evidence
from soakrig.bisect.journal import REBOOT, Journal
from soakrig.bisect.journal_rows import RunRow
from soakrig.bisect.outlook import outlook
from soakrig.bisect.statistics import Interval, rate_interval
from soakrig.bisect.verdicts import Verdict, judge
from soakrig.record.campaign import ArmLaunch, ArmResult, CampaignResult, CampaignState, Span
from soakrig.record.redaction import HIDDEN, is_secret
from soakrig.soak.fingerprint import fingerprint
from soakrig.soak.watch.proc import create_time

ANSWERS = ("single", "necessary", "both_needed", "either", "pair", "not_in_list")
"""Conclusions that a campaign was run for: exit code 0. Any other is inconclusive."""
_STRENGTH = ("settings", "log", "argv", "environment")


def campaign_result(journal: Journal, campaign: Campaign) -> CampaignResult:
    """What the journal has so far. ``RecordError`` where it holds an arm that the campaign has not."""
    runs, spans = journal.runs(), journal.spans()
    evidence = Evidence(journal.arm_runs(), signature=campaign.signature)
    rule = campaign.rule
    verdicts = judge(evidence, [planned.arm for planned in campaign.arms], rule)
    conclusion = conclude(evidence, verdicts, rule)
    seconds = {number: last - began for number, (began, last) in spans.items()}
    state, ended = _state(journal)
    proofs = _proofs(journal, campaign)
    answered = state == "finished" and conclusion.kind in ANSWERS
    return CampaignResult(
        campaign=journal.folder.resolve().name,
        folder=str(journal.folder),
        state=state,
        exit_code=0 if answered else 2,
        ended=ended,
        simulated="SOAKRIG_PLANT" in {*campaign.settings, *campaign.variables},
        unit=campaign.unit,
        cap=campaign.cap,
        confidence=campaign.confidence,
        at_least=campaign.at_least,
        signature=evidence.pooled_signature,
        signatures=dict(Counter(run.signature for run in runs if run.signature is not None)),
        arms=[_arm(one, campaign, evidence, verdicts.get(one.name), runs, seconds) for one in campaign.arms],
        conclusion=conclusion.text,
        conclusion_kind=conclusion.kind,
        cause=list(conclusion.variables),
        not_said=_not_said(conclusion, proofs),
        outlook=[] if answered else list(outlook(evidence, verdicts, rule, sum(seconds.values()), campaign.unit)),
        proofs=proofs,
        drift_p=drift_p(evidence),
        hours=round(sum(seconds.values()) / 3600.0, 4),
        budget_hours=budget_seconds(journal, campaign) / 3600.0,
        launches=[launch(run, spans) for run in runs],
        spec=campaign.shown(),
        fingerprint=fingerprint({"campaign": campaign.shown()}),
    )


def launch(run: RunRow, spans: Mapping[int, tuple[float, float]]) -> ArmLaunch:
    """One launch as reports show it."""
    began, last = spans.get(run.id, (run.planned_at, None))
    return ArmLaunch(
        id=run.id, arm=run.arm, stratum=run.stratum, state=run.state, result=run.result, exposure=run.exposure,
        cap=run.cap, signature=run.signature, reason=run.reason, folder=f"runs/{run.folder}" if run.folder else "",
        why=run.why, began=began, seconds=None if last is None else round(last - began, 3), boot_id=run.boot_id,
    )  # fmt: skip


def _state(journal: Journal) -> tuple[CampaignState, str]:
    """Running while the process of the newest session is there; finished where it came to an end of its own."""
    for note in reversed(journal.notes()):
        if note.what == ENDED:
            kind = note.detail.get("kind")
            return "finished" if kind in ("decided", "budget") else "paused", str(note.detail.get("why", ""))
        if note.what == REBOOT:
            return "paused", str(note.detail.get("why", "a reboot was ordered"))
        if note.what == SESSION:
            alive = create_time(note.detail["pid"]) == note.detail["since"]
            return ("running", "") if alive else ("paused", "the process that ran it has ended")
    return "paused", "not begun"


def _arm(
    planned: PlannedArm, campaign: Campaign, evidence: Evidence, verdict: Verdict | None,
    runs: tuple[RunRow, ...], seconds: Mapping[int, float],
) -> ArmResult:  # fmt: skip
    counted = evidence.counted(planned.name)
    faults = sum(run.signature is not None for run in counted)
    exposure = sum(run.exposure for run in counted)
    void = Counter(why for _, why in evidence.void(planned.name))
    mine = [run for run in runs if run.arm == planned.name]
    void.update(f"interrupted: {run.reason}" for run in mine if run.result == "interrupted" and run.state == "settled")
    control = campaign.arms[0]
    only = planned.arm.variables[0] if planned.role == "one" else None
    return ArmResult(
        name=planned.name,
        variable=only,
        value=_hidden(only, planned.value) if only is not None else None,
        role=planned.role,
        changes={name: _hidden(name, planned.values[name]) for name in planned.changed(control)},
        runs=len(counted),
        exposure=exposure,
        faults=faults,
        void=sum(void.values()),
        void_reasons=dict(void),
        expected=verdict.expected if verdict is not None and counted and evidence.clocks else None,
        rate=_span(rate_interval(faults, exposure)) if exposure > 0 else None,
        verdict=verdict.word if verdict is not None else "CONTROL",
        claim=verdict.claim if verdict is not None else "control",
        why=verdict.why if verdict is not None else "",
        ratio=_span(verdict.ratio) if verdict is not None else None,
        p=verdict.p if verdict is not None else None,
        posterior=verdict.posterior if verdict is not None and counted else None,
        settled=verdict.settled if verdict is not None else False,
        seconds=round(sum(seconds.get(run.id, 0.0) for run in mine), 3),
    )


def _span(interval: Interval | None) -> Span | None:
    """With None for a bound that is not there; an estimate that is infinite (no fault of the control) is left out."""
    if interval is None or not math.isfinite(interval.estimate):
        return None
    return Span(
        low=interval.low, estimate=interval.estimate, high=interval.high if math.isfinite(interval.high) else None
    )


def _hidden(name: str, value: str | None) -> str | None:
    return HIDDEN if value is not None and is_secret(name) else value


def _proofs(journal: Journal, campaign: Campaign) -> dict[str, str]:
    """The weakest proof of each variable over all launches that got ready."""
    found: dict[str, str] = {}
    for run in journal.runs():
        for note in journal.notes(run):
            if not note.is_state or note.what != "ready":
                continue
            told: Mapping[str, str] = note.detail.get("proofs", {})
            for name, proof in told.items():
                found[name] = max(found.get(name, proof), proof, key=_STRENGTH.index)
    return {name: found[name] for name in campaign.variables if name in found}


def _not_said(conclusion: Conclusion, proofs: Mapping[str, str]) -> list[str]:
    said = list(conclusion.not_said)
    weak = [name for name, proof in proofs.items() if proof not in ("settings", "log")]
    if weak:
        text = f"Not that anything in the engine obeys {', '.join(weak)}: it was started with the value, "
        said.append(text + "and does not say what it made of it.")
    return said
