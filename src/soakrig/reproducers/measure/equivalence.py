"""``soak measure equivalence``: does a change alter what the model computes by more than the control alters it itself?

Each launch scores the same fresh prompts, alone, one at a time. Change: A against B at every place. Control: A's fresh
places against what A says at places whose prefix it has in its cache by then (``cached``), and against another launch
of A (``again``). A is the control.

Where A repeats itself to the bit on fresh prompts, nothing but the change can be why B says something else, and any
difference is one; the cached drift then only tells its size. Where A does not, its cached drift is the yardstick.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

from soakrig.clock import RealClock
from soakrig.errors import EngineStartError, PreflightRefusedError
from soakrig.reproducers.measure.drift_judge import LEAST_PROMPTS, Drifts, Question, against_nothing, compare
from soakrig.reproducers.measure.folder import MeasureFolder
from soakrig.reproducers.measure.scoring import (
    WHY_NO_TEXT,
    EngineGoneError,
    Scored,
    Scorer,
    drift,
    fresh_prompts,
    same_first,
)
from soakrig.reproducers.measure.sides import Bench, Side, running
from soakrig.soak.client import ChatClient, Timeouts
from soakrig.soak.probe import probe

Basis = Literal["auto", "cached", "again"]
BASES: tuple[Basis, ...] = ("auto", "cached", "again")
SHORTEST = 48
"""Tokens; a cached place needs a block or two before it."""


@dataclass(frozen=True)
class EquivalencePlan:
    """``launches`` of each side, ``prompts`` in each, the longest of ``tokens``; ``cuts``: cached places asked for in
    each prompt. ``basis``: which drift of the control is the tolerance; ``auto``: none where it repeats itself to the
    bit, else the cached one. ``alpha``: error allowed in all; ``precision``: how far the ratio's interval may reach
    before a comparison without a finding says that it cannot tell."""

    launches: int = 2
    prompts: int = 24
    tokens: int = 1200
    cuts: int = 48
    seed: str = "0"
    basis: Basis = "auto"
    alpha: float = 0.01
    precision: float = 3.0

    @property
    def lengths(self) -> list[int]:
        """From the longest down to half of it, over and over."""
        return [max(SHORTEST, self.tokens * share // 4) for share in (4, 2, 3)] * (-(-self.prompts // 3))


@dataclass
class _Launch:
    """What one launch said: by prompt, its fresh places; and of the control the places after a cached prefix."""

    side: str
    number: int
    fresh: list[Scored] = field(default_factory=list[Scored])
    simulated: bool = False


def measure_equivalence(
    bench: Bench, control: Side, change: Side, plan: EquivalencePlan, folder: MeasureFolder,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Launch, score, judge; the result as ``judge_equivalence``. An engine that dies or does not start is a finding of
    its side. Raises ``PreflightRefusedError`` where an engine gives no prompt logprobs."""
    kept: dict[str, _Launch] = {}
    for number in range(1, plan.launches + 1):
        pair = (control, change) if number % 2 else (change, control)  # ABBA: a slow drift of the machine cancels
        for side in pair:
            tell(f"launch {number} of {plan.launches}, {side.name}: {side.text()}")
            try:
                launch = _score(bench, side, number, plan, folder)
            except (EngineStartError, EngineGoneError) as error:
                folder.observe({"what": "dead", "side": side.name, "launch": number, "why": error.message})
                return judge_equivalence(_read(folder.path), plan)
            _compare_launches(launch, kept, folder)
    return judge_equivalence(_read(folder.path), plan)


def _read(path: Path) -> list[dict[str, Any]]:
    from soakrig.reproducers.measure.folder import read_observations

    return list(read_observations(path))


def _score(bench: Bench, side: Side, number: int, plan: EquivalencePlan, folder: MeasureFolder) -> _Launch:
    with running(bench, side, folder.path / f"{side.name}{number}") as target:
        return asyncio.run(_ask(ChatClient(target, RealClock(), Timeouts()), side, number, plan, folder))


async def _ask(client: ChatClient, side: Side, number: int, plan: EquivalencePlan, folder: MeasureFolder) -> _Launch:
    launch = _Launch(side.name, number)
    async with client:
        probed = await probe(client)
        scorer = Scorer(client, probed.model)
        launch.simulated = probed.simulated
        folder.observe({"what": "launch", "side": side.name, "launch": number, "simulated": probed.simulated,
                        "version": probed.version, "settings": probed.settings.get("settings")})  # fmt: skip
        lengths = plan.lengths[: plan.prompts]
        limit = probed.context_limit
        if limit is not None and max(lengths) + 2 > limit:
            raise PreflightRefusedError(
                f"prompts of {max(lengths)} tokens do not fit the engine's context of {limit}", remedy="Lower --tokens."
            )
        prompts = await fresh_prompts(scorer, plan.seed, lengths)
        for place, ids in enumerate(prompts):
            scored = await scorer.fresh(ids)
            launch.fresh.append(scored)
            if side.name == "A":
                await _cached(scorer, place, ids, scored, number, plan, folder)
    return launch


async def _cached(
    scorer: Scorer,
    place: int,
    ids: list[int],
    scored: Scored,
    number: int,
    plan: EquivalencePlan,
    folder: MeasureFolder,
) -> None:
    """Places of a prompt that the engine has just seen: their prefix comes from the cache now."""
    rng = Random(f"{plan.seed}/cuts/{number}/{place}")
    cuts = sorted(rng.sample(range(len(ids) // 3, len(ids)), k=min(plan.cuts, len(ids) - len(ids) // 3)))
    drifts: list[float] = []
    differ = hits = told = 0
    for cut in cuts:
        top, cached = await scorer.next(ids[:cut])
        fresh = scored.texts[cut - 1]
        drifts.append(drift(fresh, top))
        differ += not same_first(fresh, top)
        told += cached is not None
        hits += bool(cached)
    _observe(folder, "cached", place, [number], drifts, differ, hits=hits, told=told)


def _compare_launches(launch: _Launch, kept: dict[str, _Launch], folder: MeasureFolder) -> None:
    """A's launch against the A before it (``again``) and against B's of the same number (``change``)."""
    before = kept.get(launch.side)
    if before is not None:
        _pairs(folder, "again" if launch.side == "A" else "again_b", before, launch)
    other = kept.get("B" if launch.side == "A" else "A")
    if other is not None and other.number == launch.number:
        _pairs(folder, "change", other, launch)
    kept[launch.side] = launch


def _pairs(folder: MeasureFolder, what: str, one: _Launch, other: _Launch) -> None:
    for place, (a, b) in enumerate(zip(one.fresh, other.fresh, strict=True)):
        if len(a.rows) != len(b.rows):
            raise PreflightRefusedError(
                f"prompt {place + 1} has {len(a.rows) + 1} tokens on one side and {len(b.rows) + 1} on the other",
                remedy="Two models with different tokenizers cannot be compared place by place.",
            )
        drifts = [drift(x, y) for x, y in zip(a.rows, b.rows, strict=True)]
        differ = sum(not same_first(x, y) for x, y in zip(a.rows, b.rows, strict=True))
        warm = [s.cached_tokens for s in (a, b) if s.cached_tokens]
        _observe(folder, what, place, [one.number, other.number], drifts, differ, not_fresh=len(warm))


def _observe(
    folder: MeasureFolder, what: str, prompt: int, launches: list[int], drifts: list[float], differ: int, **more: Any
) -> None:
    # A number that is none has no JSON: infinity is written as -1, and a place where nothing was comparable left out.
    known = [-1.0 if math.isinf(value) else float(f"{value:.6g}") for value in drifts if not math.isnan(value)]
    folder.observe({"what": what, "prompt": prompt, "launches": launches, "drift": known, "differ": differ, **more})


def judge_equivalence(observations: Iterable[dict[str, Any]], plan: EquivalencePlan) -> dict[str, Any]:
    """The result from the observations alone: ``verdict``, ``exit_code``, ``reasons``, the questions, ``size`` (of a
    change that differs, against the control's cached drift), and the figures with their kinds."""
    seen = list(observations)
    change, cached, again, again_b = (_drifts(seen, what) for what in ("change", "cached", "again", "again_b"))
    dead = next((one for one in seen if one["what"] == "dead"), None)
    found = _Judged("inconclusive")
    if dead is not None:
        found.verdict = "fail" if dead["side"] == "B" else "inconclusive"
        found.reasons.append(f"{dead['side']} died or did not start: {dead['why']}")
    elif len(change.by_prompt) < LEAST_PROMPTS:
        found.reasons.append(
            f"{len(change.by_prompt)} prompts were compared; {LEAST_PROMPTS} are the least that say anything"
        )
    elif plan.basis == "again" and not again.by_prompt:
        found.reasons.append("one launch of the control says nothing about how it repeats itself: use --launches 2")
    elif plan.basis == "auto" and again.by_prompt and not again.pooled.any():
        found = _to_the_bit(change, cached, again_b, plan)
    else:
        found = _by_drift(change, cached, again, plan)
    hits = sum(one.get("hits", 0) for one in seen if one["what"] == "cached")
    told = sum(one.get("told", 0) for one in seen if one["what"] == "cached")
    if cached.places and not hits:
        found.notes.append(
            "no place of the control is known to have come from its cache: its drift is that of computing again "
            + ("(prefix caching is off?)" if told else "(the engine does not report cached tokens)")
        )
    if any(one.get("not_fresh") for one in seen if one["what"] == "change"):
        found.notes.append("some prompts were not fresh: an engine had seen them before")
    identical = bool(change.places) and not change.pooled.any()
    if found.verdict == "pass" and not identical and again.places and not again.pooled.any():
        moved = int((change.pooled > 0).sum())
        found.notes.append(
            f"A repeats itself to the bit and B differs from it at {moved} of {change.places} places: no more than A's "
            "cached places do, but B does not compute the same"
        )
    return {
        "schema": 1,
        "measures": "equivalence",
        "verdict": found.verdict,
        "exit_code": {"pass": 0, "fail": 1, "inconclusive": 2}[found.verdict],
        "reasons": found.reasons,
        "notes": found.notes,
        "simulated": any(one.get("simulated") for one in seen if one["what"] == "launch"),
        "equal_bits": identical,
        "size": found.size,
        "change": change.figures(),
        "control": {"cached": {**cached.figures(), "from_cache": hits}, "again": again.figures(), "basis": plan.basis},
        "ratio": None if found.ratio is None else {**dict(zip(("low", "estimate", "high"), found.ratio, strict=True)),
                                                   "confidence": 0.95, "kind": "derived"},
        "questions": [asdict(question) for question in found.questions],
        "alpha": plan.alpha,
        "not_evidence": {"greedy_text": WHY_NO_TEXT},
    }  # fmt: skip


@dataclass
class _Judged:
    """``size``: above, like or below the control's cached drift; None where nothing differs or it cannot be told."""

    verdict: Literal["pass", "fail", "inconclusive"]
    reasons: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    questions: list[Question] = field(default_factory=list[Question])
    ratio: tuple[float, float, float] | None = None
    size: Literal["above", "like", "below"] | None = None


def _to_the_bit(change: Drifts, cached: Drifts, again_b: Drifts, plan: EquivalencePlan) -> _Judged:
    """The control repeats itself: any difference is the change's. What it does from its cache only gives the size."""
    bits = against_nothing(change)
    found = _Judged("fail" if bits.worse else "pass", questions=[bits])
    if not bits.worse:
        return found
    found.reasons.append(bits.text)
    if again_b.pooled.any():
        moved = int((again_b.pooled > 0).sum())
        found.reasons.append(f"B does not even repeat itself: {moved} of {again_b.places} places differ by launch")
    if not cached.pooled.any():
        return found
    sized = compare(change, cached, [], plan.alpha)
    found.questions += sized.questions
    found.ratio = sized.ratio
    if sized.worse:
        found.size = "above"
        found.reasons += [question.text for question in sized.worse]
    elif sized.ratio is not None and sized.ratio[2] <= plan.precision:
        found.size = "below" if sized.ratio[2] < 1.0 else "like"
    if found.size in ("below", "like"):
        found.reasons.append(
            "the differences are no larger than A's own between fresh and cached places: as sums added up in another "
            "order make them, or a fault as small. Where that is known to be harmless, --against cached tolerates it"
        )
    return found


def _by_drift(change: Drifts, cached: Drifts, again: Drifts, plan: EquivalencePlan) -> _Judged:
    """The control's own drift is the tolerance."""
    own = again if plan.basis == "again" or (again.pooled.any() and not cached.pooled.any()) else cached
    compared = compare(change, own, [again] if plan.basis != "again" and again.by_prompt else [], plan.alpha)
    found = _Judged("pass", notes=list(compared.notes), questions=compared.questions, ratio=compared.ratio)
    if compared.worse:
        found.verdict, found.reasons = "fail", [question.text for question in compared.worse]
        found.size = "above" if own is cached and own.pooled.any() else None
    elif compared.notes:
        found.verdict, found.reasons = "inconclusive", list(compared.notes)
    elif compared.ratio is not None and compared.ratio[2] > plan.precision:
        found.verdict = "inconclusive"
        much = f"{compared.ratio[2]:.2g} times as much"
        found.reasons.append(f"the change may drift up to {much} as the control by itself: use more --prompts")
    elif plan.basis == "auto" and not again.by_prompt and change.pooled.any():
        found.verdict = "inconclusive"
        found.reasons.append(
            "B differs from A by no more than A's cached places do, but one launch of the control does not say whether "
            "A repeats itself to the bit, when this would be a difference: use --launches 2, or --against cached"
        )
    return found


def _drifts(observations: Sequence[dict[str, Any]], what: str) -> Drifts:
    """All of one kind by prompt, launches together."""
    by_prompt: dict[int, list[float]] = {}
    differ = 0
    for one in observations:
        if one["what"] == what and one["drift"]:
            by_prompt.setdefault(one["prompt"], []).extend(one["drift"])
            differ += one["differ"]
    values = [np.array(by_prompt[prompt], dtype=np.float64) for prompt in sorted(by_prompt)]
    return Drifts([np.where(array < 0, np.inf, array) for array in values], differ)
