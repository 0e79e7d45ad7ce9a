"""Prefetch on a trace: how often a predicted expert is one that would have been missed, and what fetching it costs.

Each predictor ranks experts of a layer-step from what is known before it, and issues the best that are not in slots.
All are fitted on the first part of the trace and judged on the rest, beside the same cache: none of them changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from soakrig.engine.offload.bookkeeping import FETCHES, assign_numba
from soakrig.engine.offload.counters import COUNTERS
from soakrig.engine.offload.jit import compiled
from soakrig.engine.offload.policy import Policy
from soakrig.engine.offload.slots import SlotPool
from soakrig.engine.offload.trace import Trace
from soakrig.errors import UsageError

from .quantity import Figure
from .trace import small_steps

PREDICTORS = ("previous token", "adjacent layer", "frequency")
"""``previous token``: the experts that came after those of the last step, in the same layer; ``adjacent layer``: that
went with those of this step in the layer before; ``frequency``: that the layer routes to most."""
MOST_ISSUED = 8


@dataclass(frozen=True, slots=True)
class Prediction:
    """One predictor at ``issued_per_step`` rows a layer-step, over the judged part: counts of rows, over all layers."""

    predictor: str
    issued_per_step: int
    issued: int
    useful: int
    misses: int
    layer_steps: int

    @property
    def precision(self) -> float | None:
        """Useful rows of those issued."""
        return self.useful / self.issued if self.issued else None

    @property
    def recall(self) -> float | None:
        """Misses that were foreseen."""
        return self.useful / self.misses if self.misses else None

    def bytes(self, row: Figure, layers: int) -> tuple[Figure, Figure]:
        """Bytes issued and bytes saved a step (B/step) with rows of ``row`` (B/row)."""
        steps = max(self.layer_steps, 1) / layers
        per_step = [Figure.of(count / steps, "row/step", "modelled") * row for count in (self.issued, self.useful)]
        return per_step[0], per_step[1]

    def to_json(self) -> dict[str, Any]:
        """Counts and rates."""
        return {
            "predictor": self.predictor, "issued_per_step": self.issued_per_step, "issued": self.issued,
            "useful": self.useful, "misses": self.misses, "precision": self.precision, "recall": self.recall,
        }  # fmt: skip


@compiled
def _score(
    which: int, now: Any, before: Any, beside: Any, experts: int, after: Any, along: Any, often: Any, scores: Any
) -> None:
    scores[:] = 0
    if which == 2:
        scores[:] = often
        return
    table = after if which == 0 else along
    for expert in before if which == 0 else beside:
        if 0 <= expert < experts:
            scores += table[expert]


@compiled
def _learn(now: Any, before: Any, beside: Any, experts: int, after: Any, along: Any, often: Any) -> None:
    for expert in now:
        if not 0 <= expert < experts:
            continue
        often[expert] += 1
        for other in before:
            if 0 <= other < experts:
                after[other, expert] += 1
        for other in beside:
            if 0 <= other < experts:
                along[other, expert] += 1


@compiled
def _one_layer(
    ids: Any, layer_before: Any, starts: Any, judged_from: int, experts: int, policy: int, most: int, slot_key: Any,
    key_slot: Any, last: Any, uses: Any, ref: Any, clock: Any, issued: Any, useful: Any, found: Any,
) -> None:  # fmt: skip
    """``issued``, ``useful`` [predictors, most]: by rank of the prediction; ``found``: misses, layer-steps."""
    after = np.zeros((experts, experts), dtype=np.int32)
    along = np.zeros((experts, experts), dtype=np.int32)
    often, scores = np.zeros(experts, dtype=np.int32), np.zeros(experts, dtype=np.int32)
    rows, bank_rows = np.zeros(FETCHES, dtype=np.int64), np.zeros(FETCHES, dtype=np.int64)
    src, dst = np.zeros(FETCHES, dtype=np.int32), np.zeros(FETCHES, dtype=np.int32)
    counts, skew = np.zeros(len(COUNTERS), dtype=np.int64), np.zeros(experts, dtype=np.int64)
    bad = np.zeros(FETCHES, dtype=np.uint8)
    guesses = np.full((issued.shape[0], most), -1, dtype=np.int64)
    before = ids[:0]
    for step in range(starts.size - 1):
        now, beside = ids[starts[step] : starts[step + 1]], layer_before[starts[step] : starts[step + 1]]
        judged = step >= judged_from
        if judged:
            for which in range(issued.shape[0]):
                _score(which, now, before, beside, experts, after, along, often, scores)
                for expert in range(experts):
                    if key_slot[expert] >= 0:
                        scores[expert] = 0
                for rank in range(most):
                    best = np.argmax(scores)
                    guesses[which, rank] = best if scores[best] > 0 else -1
                    scores[best] = 0
        missing = assign_numba(
            now, now.size, experts, 0, slot_key, key_slot, last, uses, ref, clock, policy, 0, slot_key.size, rows,
            bank_rows, src, dst, counts, skew, bad,
        )  # fmt: skip
        if judged:
            found[0] += missing
            found[1] += 1
            for which in range(issued.shape[0]):
                for rank in range(most):
                    if guesses[which, rank] < 0:
                        continue
                    issued[which, rank] += 1
                    for one in range(missing):
                        if src[one] == guesses[which, rank]:
                            useful[which, rank] += 1
        else:
            _learn(now, before, beside, experts, after, along, often)
        before = now


def predict(trace: Trace, slots: Mapping[int, int], share: float = 0.5, policy: str = "lru") -> list[Prediction]:
    """Every predictor at 1, 2, 4 and 8 rows a layer-step, fitted on the first ``share`` of the small steps.

    The first of the layers has none before it and is left out of ``adjacent layer`` by having nothing to go by. Raises
    UsageError where nothing would be left to judge.
    """
    small = small_steps(trace)
    top_k = trace.header.top_k
    starts = np.append(np.flatnonzero(small.first), len(small.first)).astype(np.int64) * top_k
    judged_from = round(share * (len(starts) - 1))
    if not 0 < judged_from < len(starts) - 1:
        raise UsageError(
            f"{share:g} of {len(starts) - 1} small steps leaves nothing to fit on or to judge by",
            remedy="give a share between 0 and 1, and a longer trace",
        )
    if policy == "static":
        raise UsageError("predictors beside a static hot set: its slots never change", remedy="give lru, lfru or clock")
    experts = trace.header.experts

    def one(layer: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        at = trace.header.layers.index(layer)
        ids = small.ids[:, at].astype(np.int64).reshape(-1)
        before = small.ids[:, at - 1].astype(np.int64).reshape(-1) if at else np.full_like(ids, -1)
        issued, useful = (np.zeros((len(PREDICTORS), MOST_ISSUED), dtype=np.int64) for _ in range(2))
        found = np.zeros(2, dtype=np.int64)
        pool = SlotPool(slots[layer], experts, 0, Policy.named(policy), torch.device("cpu"))
        state: list[Any] = [one.numpy() for one in pool.state.values()]
        arguments: list[Any] = [ids, before, starts, judged_from, experts, int(pool.policy), MOST_ISSUED, *state]
        arguments += [issued, useful, found]
        _one_layer(*arguments)
        return issued, useful, found

    with ThreadPoolExecutor() as workers:
        parts = list(workers.map(one, slots))
    issued, useful, found = (np.sum([part[at] for part in parts], axis=0) for at in range(3))
    return [
        Prediction(
            name, count, int(issued[at, :count].sum()), int(useful[at, :count].sum()), int(found[0]), int(found[1])
        )
        for at, name in enumerate(PREDICTORS)
        for count in (1, 2, 4, MOST_ISSUED)
    ]
