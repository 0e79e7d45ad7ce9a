"""What the offload core counts, kept over windows of steps, and the figures that follow, each under its own name.

Counters are cumulative whole numbers, ``[all MoE layers of the model][PATHS][COUNTERS]``. A figure over a window that
leaves the start out is ``measured``; one over the whole life has the cold start in it and is ``uncontrolled``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from soakrig.errors import UsageError

COUNTERS = (
    "steps", "accesses", "hits", "unique", "unique_hits", "clean_steps", "fills", "evictions", "staged", "in_place",
    "groups", "sentinels", "bad_ids",
)  # fmt: skip
"""In layer-steps: ``steps`` (at least one routed id), ``clean_steps`` (every expert was in a slot when it began). In
routed ids, duplicates included: ``accesses``, ``hits``. In different experts of a layer-step: ``unique``,
``unique_hits``, ``fills`` (into a slot), ``evictions``, ``staged`` (into the staging buffer), ``in_place`` (read from
the bank). ``groups`` of the staging buffer; ids that name no expert: ``sentinels`` (-1 and E), ``bad_ids``."""
STEPS, ACCESSES, HITS, UNIQUE, UNIQUE_HITS, CLEAN_STEPS, FILLS, EVICTIONS, STAGED, IN_PLACE = range(10)
GROUPS, SENTINELS, BAD_IDS = range(10, 13)
PATHS = ("small", "large")
"""``small``: at most 64 routed ids, where the policy acts; ``large``: prefill, where slots are only read."""
HIT_RATES = ("per_access", "per_unique", "per_step")
WINDOW_STEPS = 100
"""A window begins and ends at a multiple of this many engine steps."""
MOST_SNAPSHOTS = 4096
"""Above it every other snapshot goes and the spacing doubles: 75 layers then take 64 MB, however long the engine runs.
"""
Kind = Literal["measured", "uncontrolled"]
Counters = Sequence[Sequence[Sequence[int]]]
"""[layers][PATHS][COUNTERS]."""
_INDEX = {name: index for index, name in enumerate(COUNTERS)}


def no_counters(layers: int) -> list[list[list[int]]]:
    """All zero, for ``layers`` MoE layers."""
    return [[[0] * len(COUNTERS) for _ in PATHS] for _ in range(layers)]


@dataclass(frozen=True, slots=True)
class Window:
    """Counters of the engine steps ``first_step`` + 1 to ``last_step``."""

    first_step: int
    last_step: int
    counters: Counters

    @property
    def kind(self) -> Kind:
        """Whether the cold start is left out."""
        return "measured" if self.first_step > 0 else "uncontrolled"


class History:
    """The cumulative counters of one engine over its life: the newest, and a snapshot at every ``spacing`` steps."""

    def __init__(self, layers: int) -> None:
        self.spacing = WINDOW_STEPS
        self.step = 0
        self._latest: Counters = no_counters(layers)
        self._kept: dict[int, NDArray[np.int64]] = {0: _array(self._latest)}

    def add(self, step: int, counters: Counters) -> None:
        """Take the counters as they stand after engine step ``step``. Raises ValueError when steps do not rise."""
        if step <= self.step:
            raise ValueError(f"counters of step {step} came after those of step {self.step}")
        self.step, self._latest = step, counters
        if step % self.spacing:
            return
        self._kept[step] = _array(counters)
        if len(self._kept) > MOST_SNAPSHOTS:
            self.spacing *= 2
            self._kept = {kept: one for kept, one in self._kept.items() if kept % self.spacing == 0}

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """The steps at which a window may begin or end, 0 included."""
        return tuple(self._kept)

    def whole(self) -> Window:
        """From the first step to the newest: the cold start is in it."""
        return Window(0, self.step, self._latest)

    def window(self, first_step: int, last_step: int) -> Window:
        """Between two kept steps. Raises UsageError naming the kept steps next to one that is not kept."""
        for name, step in (("first_step", first_step), ("last_step", last_step)):
            if step not in self._kept:
                raise UsageError(
                    f"{name}={step}: no counters are kept at that step; {self._around(step)}",
                    remedy=f"give a multiple of {self.spacing} engine steps, up to {max(self._kept)}",
                )
        if first_step >= last_step:
            raise UsageError(
                f"first_step={first_step} and last_step={last_step} hold no step between them",
                remedy="first_step has to be the lower of the two",
            )
        return Window(first_step, last_step, (self._kept[last_step] - self._kept[first_step]).tolist())

    def _around(self, step: int) -> str:
        below = max((kept for kept in self._kept if kept < step), default=None)
        above = min((kept for kept in self._kept if kept > step), default=None)
        return f"the nearest kept are {' and '.join(str(one) for one in (below, above) if one is not None)}"


def report(layers: Sequence[int], row_bytes: Mapping[int, int], window: Window) -> dict[str, Any]:
    """The figures of one window, fit for JSON.

    ``layers``: numbers of all MoE layers, in the order of the counters; ``row_bytes``: of the offloaded ones, by
    number. ``total`` sums the offloaded layers: a resident layer has no slots and would only dilute the rates. What
    resident layers routed is in ``resident``. Each path has COUNTERS, ``misses``, ``bytes_moved``,
    ``misses_per_step_per_layer`` and ``hit_rate`` {HIT_RATES}; a rate without a denominator is null. Raises ValueError
    when layers and counters do not belong together.
    """
    counters = window.counters
    if len(counters) != len(layers) or not set(row_bytes) <= set(layers):
        raise ValueError(f"counters of {len(counters)} layers, layers {list(layers)}, row sizes of {list(row_bytes)}")
    by_layer = dict(zip(layers, counters, strict=True))
    offloaded = [layer for layer in layers if layer in row_bytes]
    resident = [layer for layer in layers if layer not in row_bytes]
    return {
        "kind": window.kind,
        "first_step": window.first_step,
        "last_step": window.last_step,
        "engine_steps": window.last_step - window.first_step,
        "bad_ids": sum(path[_INDEX["bad_ids"]] for layer in counters for path in layer),
        "total": _paths([by_layer[layer] for layer in offloaded], [row_bytes[layer] for layer in offloaded]),
        "layers": {str(layer): _paths([by_layer[layer]], [row_bytes[layer]]) for layer in offloaded},
        "resident": {
            path: {name: sum(by_layer[layer][at][_INDEX[name]] for layer in resident) for name in _RESIDENT}
            for at, path in enumerate(PATHS)
        },
    }


_RESIDENT = ("steps", "accesses", "sentinels", "bad_ids")
"""The counters that a resident layer moves."""


def bytes_moved(counters: Sequence[int], row_bytes: int) -> int:
    """Bytes fetched from the bank by one layer on one path: rows into slots and into the staging buffer."""
    return (counters[_INDEX["fills"]] + counters[_INDEX["staged"]]) * row_bytes


def rates(counters: Mapping[str, int]) -> dict[str, Any]:
    """The three hit rates and the misses per layer-step of counters by name; null where nothing was counted.

    ``misses_per_step_per_layer`` divides by layer-steps, so that counters summed over layers give it per layer too.
    """
    return {
        "hit_rate": {
            "per_access": _ratio(counters["hits"], counters["accesses"]),
            "per_unique": _ratio(counters["unique_hits"], counters["unique"]),
            "per_step": _ratio(counters["clean_steps"], counters["steps"]),
        },
        "misses_per_step_per_layer": _ratio(counters["unique"] - counters["unique_hits"], counters["steps"]),
    }


def _paths(layers: Sequence[Sequence[Sequence[int]]], row_bytes: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for at, path in enumerate(PATHS):
        of_path = [layer[at] for layer in layers]
        summed = {name: sum(one[index] for one in of_path) for name, index in _INDEX.items()}
        moved = sum(bytes_moved(one, size) for one, size in zip(of_path, row_bytes, strict=True))
        misses = summed["unique"] - summed["unique_hits"]
        found[path] = {**summed, "misses": misses, "bytes_moved": moved, **rates(summed)}
    return found


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _array(counters: Counters) -> NDArray[np.int64]:
    return np.array(cast("list[Any]", counters), dtype=np.int64).reshape(len(counters), len(PATHS), len(COUNTERS))
