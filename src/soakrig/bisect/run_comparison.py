"""Two runs side by side: may they be compared, how do their hazards differ, and what did their turns take?

Each run is one launch, so what that launch was dealt (memory layout, clock, neighbours) is in its times: latency is
``uncontrolled``. ``soak measure speed`` alternates launches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from soakrig.bisect.statistics import Cell, Interval, rate_interval, ratio_interval
from soakrig.record.campaign import Span
from soakrig.record.comparison import Answer, Comparison, Difference, HazardChange, LatencyChange, Side
from soakrig.record.events import TurnDone
from soakrig.record.latency import decode_rate
from soakrig.record.manifest import Manifest
from soakrig.record.outcome import OUTCOMES
from soakrig.record.result import Result

LEAST_PAIRS = 8
MOST_PAIRS = 1500
"""More are thinned evenly: the estimate looks at every two of them."""
Z = 1.959964
CONTEXT_SLACK = 0.02
"""Turn 1 of one load differs by less than this share between two runs of it."""
_MACHINE = ("cpu", "cores", "machine", "nvidia_driver")
"""Facts of host and fingerprint in which another machine, or another driver on it, shows."""


@dataclass(frozen=True)
class RunFacts:
    """What of a run is compared."""

    folder: str
    manifest: Manifest
    result: Result
    turns: Sequence[TurnDone]


def compare_runs(a: RunFacts, b: RunFacts, differences: Sequence[tuple[str, str, str]]) -> Comparison:
    """The comparison. ``differences``: name and both values of what is set otherwise."""
    why_not = reasons_against(a, b)
    outcomes = {
        name: (a.result.outcomes.get(name, 0), b.result.outcomes.get(name, 0))
        for name in OUTCOMES
        if a.result.outcomes.get(name) or b.result.outcomes.get(name)
    }
    return Comparison(
        comparable=not why_not,
        exit_code=2 if why_not else 0,
        why_not=why_not,
        simulated=a.result.simulated or b.result.simulated,
        a=_side(a),
        b=_side(b),
        outcomes=outcomes,
        hazard=_hazard(a.result, b.result),
        latency=[
            _latency("ttft_s", a.turns, b.turns, lambda turn: turn.ttft_s),
            _latency("decode_tokens_per_s", a.turns, b.turns, decode_rate),
        ],
        differences=[Difference(name=name, a=left, b=right) for name, left, right in differences],
    )


def reasons_against(a: RunFacts, b: RunFacts) -> list[str]:
    """Why the figures of two runs may not stand beside one another, each in a sentence; none: they may."""
    one, other = a.manifest, b.manifest
    pairs: list[tuple[str, Any, Any]] = [
        ("the reproducer", one.reproducer, other.reproducer),
        ("the planned exposure (the cap)", one.plan.text(), other.plan.text()),
        ("the seed of the load", one.seed, other.seed),
        ("the engine", _engine(one), _engine(other)),
        ("the model", one.model, other.model),
    ]
    found = [f"{what} differs: {left} and {right}" for what, left, right in pairs if left != right]
    left, right = _machine(one), _machine(other)
    found += [
        f"the machine differs, {name}: {left.get(name, 'not known')} and {right.get(name, 'not known')}"
        for name in dict.fromkeys([*left, *right])
        if left.get(name) != right.get(name)
    ]
    if a.result.simulated != b.result.simulated:
        found.append(f"a planted fault took part in {'A' if a.result.simulated else 'B'} alone")
    first, second = _first_context(a.turns), _first_context(b.turns)
    if first and second and abs(first - second) > CONTEXT_SLACK * max(first, second):
        found.append(f"the load differs: the first turn has {first:,} context tokens in A, {second:,} in B")
    for name, run in (("A", a), ("B", b)):
        if not run.turns:
            found.append(f"{name} has no finished turn")
        if run.result.ended == "cut_off":
            found.append(f"{name} was cut off, or has not ended")
    seen = {name: run.result.sources["kernel_log"].state for name, run in (("A", a), ("B", b))}
    if seen["A"] != seen["B"]:
        found.append(f"the kernel log was {seen['A']} in A and {seen['B']} in B: faults may have gone unseen in one")
    return found


def _engine(manifest: Manifest) -> str:
    told: Any = manifest.settings.get("engine")
    named = told.get("engine") if isinstance(told, dict) else None
    return f"{manifest.launched or 'attached'} {named or ''}".strip()


def _machine(manifest: Manifest) -> dict[str, Any]:
    facts = {**manifest.fingerprint, **manifest.host}
    found = {name: facts[name] for name in _MACHINE if facts.get(name) not in (None, "")}
    if isinstance(memory := facts.get("memory_mib"), int):
        found["memory, GiB"] = round(memory / 1024)  # a kernel keeps a few MiB more or less for itself
    return found


def _first_context(turns: Sequence[TurnDone]) -> int:
    return next((turn.context_tokens for turn in turns if turn.turn == 1), 0)


def _side(run: RunFacts) -> Side:
    result = run.result
    hazard = result.hazard
    return Side(
        run_id=result.run_id,
        folder=run.folder,
        verdict=result.verdict,
        exit_code=result.exit_code,
        ended=result.ended,
        simulated=result.simulated,
        exposure=hazard.exposure,
        faults=hazard.faults,
        rate=_span(rate_interval(hazard.faults, hazard.exposure)),
        signatures=dict(Counter(fault.signature for fault in result.faults)),
    )


def _hazard(a: Result, b: Result) -> HazardChange:
    one, other = a.hazard, b.hazard
    if not one.exposure or not other.exposure:
        return HazardChange(answer="cannot tell", ratio=None, why="one of the two has no exposure")
    if not one.faults and not other.faults:
        return HazardChange(
            answer="cannot tell", ratio=None,
            why=f"no fault in {one.exposure} and {other.exposure} turns: each bounds its own hazard, not their ratio",
        )  # fmt: skip
    interval = ratio_interval([Cell(one.faults, one.exposure, other.faults, other.exposure)])
    answer = _answer(interval.low, interval.high)
    why = f"{one.faults} faults in {one.exposure} turns, and {other.faults} in {other.exposure}"
    return HazardChange(answer=answer, ratio=_span(interval), why=why)


def _answer(low: float, high: float) -> Answer:
    return "lower" if high < 1 else "higher" if low > 1 else "no difference shown"


def _latency(
    figure: Literal["ttft_s", "decode_tokens_per_s"],
    a: Sequence[TurnDone],
    b: Sequence[TurnDone],
    of: Callable[[TurnDone], float | None],
) -> LatencyChange:
    left = {(turn.conversation, turn.turn): value for turn in a if turn.outcome == "ok" and (value := of(turn))}
    right = {(turn.conversation, turn.turn): value for turn in b if turn.outcome == "ok" and (value := of(turn))}
    shared = [key for key in left if key in right]
    left_out = len(left) + len(right) - 2 * len(shared)
    if not shared:
        return LatencyChange(
            figure=figure, answer="cannot tell", pairs=0, left_out=left_out, a=None, b=None, ratio=None
        )
    span = paired_ratio([left[key] for key in shared], [right[key] for key in shared])
    return LatencyChange(
        figure=figure,
        answer="cannot tell" if span is None else _answer(span.low, math.inf if span.high is None else span.high),
        pairs=len(shared),
        left_out=left_out,
        a=float(np.median([left[key] for key in shared])),
        b=float(np.median([right[key] for key in shared])),
        ratio=span,
    )


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Span | None:
    """B over A of positive pairs: Hodges and Lehmann's estimate on the logarithm (Annals of Mathematical Statistics 34,
    1963) with the 95 % interval of Wilcoxon's signed-rank test, normal approximation. None below ``LEAST_PAIRS``."""
    if len(a) < LEAST_PAIRS:
        return None
    logs = np.log(np.asarray(b)) - np.log(np.asarray(a))
    if len(logs) > MOST_PAIRS:
        logs = logs[np.linspace(0, len(logs) - 1, MOST_PAIRS).astype(int)]
    n = len(logs)
    upper = np.triu_indices(n)
    walsh = np.sort((logs[upper[0]] + logs[upper[1]]) / 2)
    below = n * (n + 1) / 4 - Z * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    k = max(0, math.floor(below))
    low, middle, high = walsh[k], float(np.median(walsh)), walsh[len(walsh) - 1 - k]
    return Span(low=float(np.exp(low)), estimate=float(np.exp(middle)), high=float(np.exp(high)))


def _span(interval: Interval) -> Span:
    high = None if math.isinf(interval.high) else interval.high
    estimate = interval.estimate if math.isfinite(interval.estimate) else interval.low
    return Span(low=interval.low, estimate=estimate, high=high)
