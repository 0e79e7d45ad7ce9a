"""Is a change's drift more than the control's own? Four questions, each against what the control shows by itself.

Level: is the drift of a prompt larger in the mean, but for its rarest places? Prompt: does one prompt drift far at more
of its places than any prompt of the control? Tail: is there a place that drifts further than the control's tail
reaches? First choice: does the likeliest token differ more often?

"Far" is the drift that one place in a hundred of the control exceeds. Rounding alone makes rare, large jumps where a
router's choice was close, so that a mean of everything says little. No number here is a tolerance: all of them come
from the control's drift. The error allowed is divided among the questions (Bonferroni).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SEED = 0
RESAMPLES = 4000
LEAST_PROMPTS = 10
"""With fewer no order of signs is rare enough: 2^-9 is the first below 0.01 / 4, and one prompt may tie."""
FAR_SHARE = 0.01
TAIL_SHARE = 0.1
LEAST_TAIL = 20
LIGHTEST, HEAVIEST = 0.01, 0.95
"""Shapes of a tail that are believed: nearly exponential, and the last with a mean."""
TAIL_RESAMPLES, TAIL_ERROR = 200, 0.05


@dataclass(frozen=True)
class Drifts:
    """Drift in nats, prompt by prompt, at each place that was compared; ``differ``: places whose first choice does."""

    by_prompt: Sequence[Floats]
    differ: int = 0

    @property
    def pooled(self) -> Floats:
        return np.concatenate(list(self.by_prompt)) if self.by_prompt else np.zeros(0)

    def clipped(self, far: float) -> Floats:
        """Means of the prompts with every drift beyond ``far`` taken for ``far``."""
        return np.array([np.minimum(values, far).mean() for values in self.by_prompt])

    @property
    def places(self) -> int:
        return sum(len(values) for values in self.by_prompt)

    def figures(self) -> dict[str, Any]:
        """What is shown of it."""
        pooled = self.pooled
        if not len(pooled):
            figures = dict.fromkeys(("mean_abs_difference", "largest", "top1_agreement"))
            return {"places": 0, **figures, "kind": "measured"}
        return {
            "places": self.places,
            "mean_abs_difference": _number(pooled.mean()),
            "largest": _number(pooled.max()),
            "top1_agreement": 1.0 - self.differ / self.places,
            "kind": "measured",
        }


@dataclass(frozen=True)
class Question:
    """One of the four. ``worse``: the change drifts more than the control. ``p``: chance of so much if it did not;
    None where the limit was found another way. ``text``: the answer in words."""

    name: str
    worse: bool
    text: str
    p: float | None = None
    limit: float | None = None
    value: float | None = None


@dataclass(frozen=True)
class Comparison:
    """``ratio``: mean drift of the change over the control's, drifts that are far taken for just far, with its 95 %
    interval (None where the control has none)."""

    questions: list[Question]
    ratio: tuple[float, float, float] | None = None
    notes: list[str] = field(default_factory=list[str])

    @property
    def worse(self) -> list[Question]:
        return [question for question in self.questions if question.worse]


def compare(change: Drifts, control: Drifts, more: Sequence[Drifts] = (), alpha: float = 0.01) -> Comparison:
    """``control``: the drift that sets the tolerance, of the same prompts in the same order. ``more``: other drifts of
    the control by itself, which its tail may reach to as well."""
    level = alpha / 4
    bad = int((~np.isfinite(change.pooled)).sum())
    if bad:
        text = f"{bad} of {change.places} places have no number (NaN or infinity) on one side"
        return Comparison([Question("finite", True, text, value=float(bad))])
    if not np.isfinite(control.pooled).all():
        return Comparison([], notes=["the control's own drift is not finite: it gives no tolerance"])
    if not control.pooled.any():
        return Comparison([against_nothing(change)])
    far = far_of(control.pooled)
    bodies = change.clipped(far), control.clipped(far)
    questions = [
        _level(*bodies, level),
        _prompt(change, control, far, level),
        _tail(change, control, more, level),
        _first(change, control, level),
    ]
    return Comparison(questions, _ratio(*bodies))


def far_of(own: Floats) -> float:
    """The drift that one place in a hundred exceeds; the least there is where fewer drift at all."""
    far = float(np.quantile(own, 1.0 - FAR_SHARE))
    return far if far > 0.0 else float(own[own > 0.0].min())


def against_nothing(change: Drifts) -> Question:
    """The control repeats itself to the bit, so that any drift is the change's."""
    moved = int((change.pooled > 0).sum())
    text = (
        f"{moved} of {change.places} places differ, where the control repeats itself to the bit"
        if moved
        else f"all {change.places} places are equal to the bit, as the control's own are"
    )
    return Question("bits", moved > 0, text, value=float(moved), limit=0.0)


def _level(change: Floats, control: Floats, level: float) -> Question:
    from scipy.stats import wilcoxon  # slow to import

    gaps = change - control
    p = float(wilcoxon(gaps, alternative="greater").pvalue) if gaps.any() else 1.0  # pyright: ignore
    count = int((gaps > 0).sum())
    text = (
        f"{count} of {len(gaps)} prompts drift more in the mean than in the control, {change.mean():.3g} against "
        f"{control.mean():.3g} nats without rare places (Wilcoxon, p = {p:.2g})"
    )
    return Question("level", p < level, text, p, float(control.mean()), float(change.mean()))


def _prompt(change: Drifts, control: Drifts, far: float, level: float) -> Question:
    """Each prompt against the control's worst one: places of a prompt depend on each other, prompts don't."""
    from scipy.stats import fisher_exact

    own = max(control.by_prompt, key=lambda values: float((values > far).mean()))
    own_far = int((own > far).sum())
    best: tuple[float, int, int, int] | None = None
    for number, values in enumerate(change.by_prompt, 1):
        beyond = int((values > far).sum())
        table = [[beyond, len(values) - beyond], [own_far, len(own) - own_far]]
        p = min(1.0, float(fisher_exact(table, alternative="greater").pvalue) * len(change.by_prompt))  # pyright: ignore
        if best is None or p < best[0]:
            best = (p, number, beyond, len(values))
    assert best is not None
    p, number, beyond, places = best
    text = (
        f"prompt {number} drifts by more than {far:.3g} nats at {beyond} of {places} places, in the control the worst "
        f"does at {own_far} of {len(own)} (Fisher, p = {p:.2g} over all prompts)"
    )
    return Question("prompt", p < level, text, p, own_far / len(own), beyond / places)


def _tail(change: Drifts, control: Drifts, more: Sequence[Drifts], level: float) -> Question:
    limits = [tail_limit(one.by_prompt, change.places, level) for one in (control, *more) if one.pooled.any()]
    limit, largest = max(limits), float(change.pooled.max())
    beyond = int((change.pooled > limit).sum())
    text = (
        f"{beyond} of {change.places} places drift further than the control's own tail reaches ({limit:.3g} nats); "
        f"the furthest by {largest:.3g}"
    )
    return Question("tail", beyond > 0, text, None, limit, largest)


def tail_limit(own: Sequence[Floats], places: int, level: float) -> float:
    """The drift that none of ``places`` more like ``own`` exceeds, but for an error of ``level``.

    Excesses over the upper tenth as a generalised Pareto tail (Pickands 1975). Its shape is the larger of two
    estimates, by probability-weighted moments (Hosking and Wallis, Technometrics 29, 1987) and by Hill's (1975), and
    the limit the upper end of a bootstrap over prompts: what is not known of a tail has to count against a finding.
    """
    rng = np.random.default_rng(SEED)
    limits: list[float] = []
    for _ in range(TAIL_RESAMPLES):
        values = np.concatenate([own[place] for place in rng.integers(len(own), size=len(own))])
        limits.append(_limit(values, places, level))
    return max(float(np.quantile(limits, 1.0 - TAIL_ERROR)), float(np.concatenate(list(own)).max()))


def _limit(own: Floats, places: int, level: float) -> float:
    values = np.sort(own)
    tail = max(min(LEAST_TAIL, len(values) - 1), int(TAIL_SHARE * len(values)))
    threshold, excess = float(values[-tail - 1]), values[-tail:] - values[-tail - 1]
    mean = float(excess.mean())
    if mean <= 0.0:
        return float(values[-1])
    weights = 1.0 - (np.arange(1, tail + 1) - 0.35) / tail
    second = float((weights * excess).mean())
    by_moments = 2.0 - mean / (mean - 2.0 * second) if mean > 2.0 * second else HEAVIEST
    above = values[-tail:][values[-tail:] > 0.0]
    hill = float(np.log(above / max(threshold, float(above[0]))).mean()) if len(above) else 0.0
    shape = min(max(by_moments, hill, LIGHTEST), HEAVIEST)
    scale = mean * (1.0 - shape)
    rarer = max(places * tail / len(values) / level, 1.0)
    return threshold + scale / shape * (rarer**shape - 1.0)


def _first(change: Drifts, control: Drifts, level: float) -> Question:
    from scipy.stats import fisher_exact

    table = [[change.differ, change.places - change.differ], [control.differ, control.places - control.differ]]
    p = float(fisher_exact(table, alternative="greater").pvalue)  # pyright: ignore
    text = (
        f"the likeliest token differs at {change.differ} of {change.places} places, in the control at "
        f"{control.differ} of {control.places} (Fisher, p = {p:.2g})"
    )
    rates = change.differ / change.places, control.differ / control.places
    return Question("first choice", p < level, text, p, rates[1], rates[0])


def _ratio(change: Floats, control: Floats) -> tuple[float, float, float] | None:
    """Mean of one over mean of the other, prompts resampled in pairs: low, estimate, high."""
    if not control.mean() > 0.0:
        return None
    estimate = float(change.mean() / control.mean())
    if not change.any() or len(change) < 2:
        return (estimate, estimate, estimate)
    from scipy.stats import bootstrap

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a resample without any drift divides by zero
        found = bootstrap(
            (change, control), _mean_ratio, paired=True,
            vectorized=True, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(SEED),
        ).confidence_interval  # fmt: skip
    return (float(found.low), estimate, float(found.high))


def _mean_ratio(one: Floats, other: Floats, axis: int = -1) -> Floats:
    return one.mean(axis=axis) / other.mean(axis=axis)


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(float(value)) else None
