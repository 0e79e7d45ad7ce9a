"""Replays a routing trace through the slot cache's own books, without weights: what the engine would have counted."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .counters import COUNTERS, IN_PLACE, Counters
from .plan import STAGING_ROWS, LayerPlan, OffloadPlan
from .prefill import check_ids, groups_of, look_up
from .slots import StepBuffers, Tally, layer_slots
from .trace import Trace


def replay(trace: Trace, plan: OffloadPlan) -> Counters:
    """The counters of an engine that runs ``plan`` on the traffic of ``trace``: [plan's MoE layers][PATHS][COUNTERS].

    The figures of layers that the plan leaves on the device are zero. Steps, order and paths are those of the engine
    that wrote the trace, so that a replay with that engine's own plan gives that engine's own counters.

    Raises ValueError where the trace is of other layers, experts or choices a token than the plan's model.
    """
    numbers = [layer.layer for layer in plan.model.layers]
    if list(trace.header.layers) != numbers:
        raise ValueError(f"the trace has layers {list(trace.header.layers)}, the plan's model {numbers}")
    # Ids of other experts would be taken for sentinels and bad ones.
    most = max(layer.experts for layer in plan.model.layers)
    if (trace.header.experts, trace.header.top_k) != (most, plan.model.top_k):
        raise ValueError(
            f"the trace has top {trace.header.top_k} of {trace.header.experts} experts, the plan's model top "
            f"{plan.model.top_k} of {most}"
        )
    counts = torch.zeros((len(numbers), 2, len(COUNTERS)), dtype=torch.int64)
    starts = np.append(np.flatnonzero(trace.first), len(trace.first)).astype(np.int64)
    if plan.arena:
        _Books(plan, plan.layers, counts, trace, starts).steps_in_order()
        return counts.tolist()

    def one(layer: LayerPlan) -> None:
        _Books(plan, (layer,), counts, trace, starts).runs_of_small_steps()

    # Layers with slots of their own know nothing of each other, and the compiled books hold no interpreter lock.
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        deque(pool.map(one, plan.layers), maxlen=0)
    return counts.tolist()


class _Books:
    """The books of some layers of a plan, and what they count."""

    def __init__(
        self, plan: OffloadPlan, layers: Sequence[LayerPlan], counts: Tensor, trace: Trace, starts: NDArray[np.int64]
    ) -> None:
        numbers = [layer.layer for layer in plan.model.layers]
        self._plan, self._trace, self._starts = plan, trace, starts
        self._bad_tokens = torch.zeros(max(np.diff(starts), default=0), dtype=torch.uint8)
        self._places = [numbers.index(layer.layer) for layer in layers]
        self._counts = [counts[place] for place in self._places]
        self._tallies = [
            Tally(of_layer[0], torch.zeros(layer.experts, dtype=torch.int64), self._bad_tokens)
            for of_layer, layer in zip(self._counts, layers, strict=True)
        ]
        slots = plan.arena or sum(layer.slots for layer in plan.layers)
        staging_row = slots if plan.staging else -1
        self._books = layer_slots(layers, plan.arena, staging_row, StepBuffers(torch.device("cpu")), self._tallies)

    def steps_in_order(self) -> None:
        """Every step of every layer as the engine has them: one layer after the other within a step."""
        for _, step in self._trace.steps():
            ids = torch.from_numpy(step.astype("int64"))  # a bad id is -2 there, which is bad here as well
            for at, place in enumerate(self._places):
                of_layer = ids[:, place].contiguous()
                if of_layer.numel() <= STAGING_ROWS:
                    self._books[at].assign(of_layer)
                else:
                    self._large(at, of_layer)

    def runs_of_small_steps(self) -> None:
        """The same counters for one layer with slots of its own, with all small steps up to the next large one in a
        single call."""
        top_k = self._trace.header.top_k
        ids = self._trace.ids[:, self._places[0]].astype(np.int64).reshape(-1)
        pairs = self._starts * top_k
        small = np.diff(pairs) <= STAGING_ROWS
        changes = np.flatnonzero(np.diff(small)) + 1
        for start, stop in pairwise([0, *changes.tolist(), len(small)]):
            if start == stop:
                continue
            if small[start]:
                self._books[0].assign_steps(ids, pairs[start : stop + 1], top_k)
                continue
            for step in range(start, stop):
                self._large(0, torch.from_numpy(ids[pairs[step] : pairs[step + 1]]).view(-1, top_k))

    def _large(self, at: int, ids: Tensor) -> None:
        plan, book, tally, large = self._plan, self._books[at], self._tallies[at], self._counts[at][1]
        resident = book.resident()
        checked = check_ids(ids, book.experts, large, self._bad_tokens)
        missing = look_up(checked, resident, large, tally.skew)
        if missing and plan.staging and plan.groups:
            deque(groups_of(checked, resident, missing, plan.staging_rows, plan.split, large), maxlen=0)
        else:
            large[IN_PLACE] += len(missing)
