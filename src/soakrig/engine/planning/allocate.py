"""Slots shared out over the layers: what a map of them is worth beside as many in each.

Curves that only flatten (a static hot set's do, by construction) are served best by taking the best next slot again and
again. LRU's do so nearly; there an exact search over all sums is made, and what the greedy one would have lost is told.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from soakrig.engine.offload.jit import compiled
from soakrig.engine.offload.slot_map import SlotMap
from soakrig.errors import UsageError

from .curve import MissCurves

MapName = Literal["uniform", "demand", "greedy", "best"]
_MANY = 2**62


@dataclass(frozen=True, slots=True)
class Limits:
    """Least and most slots of a layer (``most`` None: its experts); ``grain``: slots are given in lots of so many."""

    least: int = 0
    most: int | None = None
    grain: int = 1


@dataclass(frozen=True, slots=True)
class Allocation:
    """One map: slots by layer number, rows fetched on the curves that it was judged by, and the same per step and
    layer. ``exact``: nothing with so many slots misses fewer on the curves it was made from."""

    name: MapName
    slots: Mapping[int, int]
    misses: int
    misses_per_step_per_layer: float
    exact: bool

    @property
    def total(self) -> int:
        """Slots given away: below what was asked where lots do not divide it."""
        return sum(self.slots.values())

    def slot_map(self, experts: int) -> SlotMap:
        """As the engine reads it (``write_slot_map``)."""
        return SlotMap(experts, dict(self.slots))


def allocate(
    curves: MissCurves, total: int, limits: Limits | None = None, judged_by: MissCurves | None = None
) -> list[Allocation]:
    """Uniform, weighted by demand, greedy and best map of ``total`` slots, in this order.

    ``judged_by``: curves of other traffic to count the misses on; None: the ones it was made from, which flatters all
    but the uniform map. Raises UsageError, with both numbers, for a total that the layers cannot hold.
    """
    limits = limits or Limits()
    lots, least, most = _lots(curves, total, limits)
    values = curves.misses[:, :: limits.grain] if limits.grain > 1 else curves.misses
    judge = judged_by or curves
    if (judge.layers, judge.experts) != (curves.layers, curves.experts):
        raise UsageError(
            f"the map is made from layers {curves.layers} and judged by layers {judge.layers}",
            remedy="judge by a trace of the same model",
        )
    layers = len(curves.layers)
    even = _rounded(np.ones(layers), lots, least, most)
    at_even = values[np.arange(layers), even].astype(np.float64)
    demand = _rounded(at_even, lots, least, most)
    greedy = _greedy(values, lots, least, most)
    flattening = curves.concave_layers() == layers
    best = greedy if flattening else _exact(values, lots, least, most)
    found: list[tuple[MapName, NDArray[np.int64], bool]] = [
        ("uniform", even, False), ("demand", demand, False), ("greedy", greedy, flattening), ("best", best, True),
    ]  # fmt: skip
    return [_allocation(name, judge, lot * limits.grain, exact) for name, lot, exact in found]


def slots_of_bytes(budget: float, row_bytes: Mapping[int, int]) -> int:
    """Slots that ``budget`` bytes buy where every layer's row is of the same size.

    Raises UsageError naming two layers whose rows differ: a slot then has no one price.
    """
    sizes = sorted({size: layer for layer, size in row_bytes.items()}.items())
    if len(sizes) != 1:
        raise UsageError(
            f"rows differ in size: {', '.join(f'{size:,} B in layer {layer}' for size, layer in sizes[:3])}",
            remedy="give the budget in slots",
        )
    return int(budget // sizes[0][0])


def _lots(curves: MissCurves, total: int, limits: Limits) -> tuple[int, int, int]:
    """The total, the least and the most of a layer, in lots."""
    grain, layers = limits.grain, len(curves.layers)
    most = curves.experts if limits.most is None else limits.most
    if grain < 1 or not 0 <= limits.least <= most <= curves.experts:
        raise UsageError(
            f"slots of a layer from {limits.least} to {most} in lots of {grain}; 0 to {curves.experts} in lots of 1 or "
            "more were expected",
            remedy="give --least, --most and --grain that a layer can have",
        )
    least, most = -(-limits.least // grain), most // grain
    lots = total // grain
    if not layers * least <= lots <= layers * most:
        raise UsageError(
            f"{total} slots for {layers} layers of {least * grain} to {most * grain} each: {layers * least * grain} to "
            f"{layers * most * grain} were expected",
            remedy="give a total within this range",
        )
    return lots, least, most


def _rounded(weights: NDArray[np.float64], lots: int, least: int, most: int) -> NDArray[np.int64]:
    """Lots in proportion to the weights, within the limits, summing to ``lots``; largest remainders get the rest."""
    given = np.full(len(weights), least, dtype=np.int64)
    weights = np.where(weights > 0, weights, 1e-12)
    while (left := lots - int(given.sum())) > 0:
        open_ = given < most
        share = np.where(open_, weights, 0.0)
        wanted = left * share / share.sum()
        whole = np.minimum(wanted.astype(np.int64), most - given)
        if whole.any():
            given += whole
            continue
        order = np.argsort(-np.where(open_, wanted, -1.0), kind="stable")[: min(left, int(open_.sum()))]
        given[order] += 1
    return given


def _greedy(values: NDArray[np.int64], lots: int, least: int, most: int) -> NDArray[np.int64]:
    given = np.full(len(values), least, dtype=np.int64)
    gains = values[:, :-1] - values[:, 1:]
    heap = [(-int(gains[layer, least]), layer) for layer in range(len(values)) if least < most]
    heapq.heapify(heap)
    for _ in range(lots - least * len(values)):
        _, layer = heapq.heappop(heap)
        given[layer] += 1
        if given[layer] < most:
            heapq.heappush(heap, (-int(gains[layer, given[layer]]), layer))
    return given


def _exact(values: NDArray[np.int64], lots: int, least: int, most: int) -> NDArray[np.int64]:
    layers = len(values)
    spare = lots - least * layers
    choice = np.zeros((layers, spare + 1), dtype=np.int32)
    _search(np.ascontiguousarray(values[:, least : most + 1]), spare, choice)
    given = np.full(layers, least, dtype=np.int64)
    for layer in range(layers - 1, -1, -1):
        given[layer] += choice[layer, spare]
        spare -= int(choice[layer, spare])
    return given


@compiled
def _search(values: Any, spare: int, choice: Any) -> None:
    """Fewest misses of the first layers with every sum of lots; ``choice`` [layers, spare + 1]: what the last of them
    then gets."""
    best = np.full(spare + 1, _MANY, dtype=np.int64)
    best[0] = 0
    for layer in range(values.shape[0]):
        found = np.full(spare + 1, _MANY, dtype=np.int64)
        for lots in range(values.shape[1]):
            value = values[layer, lots]
            for total in range(lots, spare + 1):
                if best[total - lots] < _MANY and best[total - lots] + value < found[total]:
                    found[total] = best[total - lots] + value
                    choice[layer, total] = lots
        best = found


def _allocation(name: MapName, judge: MissCurves, slots: NDArray[np.int64], exact: bool) -> Allocation:
    given = {layer: int(count) for layer, count in zip(judge.layers, slots, strict=True)}
    misses = judge.misses_of(given)
    return Allocation(name, given, misses, judge.per_step(misses), exact)
