"""Replays a routing trace through the slot cache's own books, without weights: what the engine would have counted."""

from __future__ import annotations

from collections import deque

import torch

from .counters import COUNTERS, IN_PLACE, Counters
from .plan import STAGING_ROWS, OffloadPlan
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
    device = torch.device("cpu")
    slots = plan.arena or sum(layer.slots for layer in plan.layers)
    counts = torch.zeros((len(numbers), 2, len(COUNTERS)), dtype=torch.int64)
    most = max((len(marks) for marks, _ in trace.steps()), default=0)
    bad_tokens = torch.zeros(most, dtype=torch.uint8)
    places = [numbers.index(layer.layer) for layer in plan.layers]
    tallies = [
        Tally(counts[place, 0], torch.zeros(layer.experts, dtype=torch.int64), bad_tokens)
        for place, layer in zip(places, plan.layers, strict=True)
    ]
    books = layer_slots(plan.layers, plan.arena, slots if plan.staging else -1, StepBuffers(device), tallies)
    for _, step in trace.steps():
        ids = torch.from_numpy(step.astype("int64"))  # a bad id is -2 there, which is bad here as well
        for place, book, tally in zip(places, books, tallies, strict=True):
            of_layer = ids[:, place].contiguous()
            if of_layer.numel() <= STAGING_ROWS:
                book.assign(of_layer)
            else:
                large, resident = counts[place, 1], book.resident()
                checked = check_ids(of_layer, book.experts, large, bad_tokens)
                missing = look_up(checked, resident, large, tally.skew)
                if missing and plan.staging and plan.groups:
                    deque(groups_of(checked, resident, missing, plan.staging_rows, plan.split, large), maxlen=0)
                else:
                    large[IN_PLACE] += len(missing)
    return counts.tolist()
