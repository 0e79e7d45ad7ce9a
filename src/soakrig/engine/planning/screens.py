"""Candidates beside each other on one trace: policies and maps of equal bytes, and predictors of the next experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soakrig.engine.offload.settings import POLICIES
from soakrig.errors import UsageError

from .predict import Prediction
from .quantity import Figure
from .replay import ReplayPolicy, replay_arena, replay_trace
from .steptime import StepModel
from .trace import PlannedTrace

ARENA = "arena"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy with its slots by layer; ``slots`` under -1 alone: one arena for all layers."""

    name: str
    policy: ReplayPolicy
    slots: Mapping[int, int]

    @property
    def total(self) -> int:
        return sum(self.slots.values())


@dataclass(frozen=True, slots=True)
class Screened:
    """What a candidate missed; changes are against the first candidate, as shares (below 0: better). ``step`` is
    modelled, None where no step model was given."""

    candidate: Candidate
    misses: int
    misses_per_step_per_layer: float
    misses_change: float
    step: Figure | None
    step_change: float | None

    def to_json(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {
            "name": self.candidate.name,
            "policy": self.candidate.policy,
            "slots": self.candidate.total,
            "misses": self.misses,
            "misses_per_step_per_layer": self.misses_per_step_per_layer,
            "misses_change": self.misses_change,
            "step": None if self.step is None else self.step.to_json(),
            "step_change": self.step_change,
        }


def screen(planned: PlannedTrace, candidates: Sequence[Candidate], model: StepModel | None = None) -> list[Screened]:
    """Replay every candidate, the first being what the others are compared with.

    Raises UsageError, naming both, for candidates of unequal slots: more memory always misses less, and would pass for
    a better policy.
    """
    first = candidates[0]
    for one in candidates[1:]:
        if one.total != first.total:
            raise UsageError(
                f"candidate {one.name} has {one.total} slots and {first.name} {first.total}: equal bytes were expected",
                remedy="give maps of the same total; what more slots are worth, `soak plan curve` says",
            )
    found: list[Screened] = []
    for one in candidates:
        if set(one.slots) == {-1}:
            if one.policy == "opt":
                raise UsageError("an arena under opt cannot be replayed", remedy=f"give one of {', '.join(POLICIES)}")
            replayed = replay_arena(planned, one.slots[-1], one.policy)
        else:
            replayed = replay_trace(planned, one.slots, one.policy)
        per_step = replayed.misses_per_step_per_layer or 0.0
        step = None
        if model is not None:
            step = model.step(Figure.of(per_step * len(replayed.layers), "row/step", "derived"))
        base = found[0] if found else None
        found.append(
            Screened(
                one,
                replayed.misses,
                per_step,
                replayed.misses / base.misses - 1 if base and base.misses else 0.0,
                step,
                None if step is None else step.share(base.step) - 1 if base and base.step else 0.0,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Headroom:
    """What the link has left in a step: ``spare`` B/step after the misses, ``extra`` B/step that a predictor would add
    (issued, less what it saves). A step is modelled; a prefetch that does not fit makes it longer."""

    spare: Figure
    extra: Figure

    @property
    def fits(self) -> bool:
        """Whether the extra bytes find room between the misses."""
        return self.extra.value <= self.spare.value


def headroom(prediction: Prediction, layers: int, row: Figure, link: Figure, step: Figure) -> Headroom:
    """``row`` B/row, ``link`` B/s, ``step`` s/step: the predictor's bytes against what the link has left."""
    steps = max(prediction.layer_steps, 1) / layers
    missed = Figure.of(prediction.misses / steps, "row/step", "modelled") * row
    issued, saved = prediction.bytes(row, layers)
    return Headroom(link * step - missed, issued - saved)
