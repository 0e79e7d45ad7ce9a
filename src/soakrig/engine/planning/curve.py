"""Miss curves: what every number of slots would have missed on a trace, layer by layer, from one pass.

LRU in engine steps follows the cache's rules but for one: among experts last used in the same step the engine lets the
lowest slot go, which no single list can say for all sizes. Here another one stays longest each time. Replays of single
sizes have no such gap; ``docs/planning.md`` says how wide it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from soakrig.engine.offload.trace import Trace

from .curve_kernels import sequential_kernel, skew_kernel, step_kernel
from .quantity import Kind
from .trace import small_steps

Semantics = Literal["step", "sequential"]
CurvePolicy = Literal["lru", "static"]
BLOCK_BYTES = 2 << 20
"""Rows that are handled together: a block of them stays in the cache while one layer after the other reads it."""
_Kernel = Callable[[NDArray[np.int16], NDArray[np.int64], int, slice], None]


@dataclass(frozen=True, slots=True)
class MissCurves:
    """Misses of every layer by its slots: ``misses`` int64 [layers, experts + 1] are rows fetched in small layer-steps,
    ``missed_accesses`` the routed ids behind them (more where a step routes an expert twice), ``clean_steps`` the
    layer-steps without a miss (None where the semantics have no steps), ``large_misses`` those of prefill, which only
    reads the slots.

    ``steps``, ``accesses``, ``unique``: int64 [layers], of small layer-steps.
    """

    policy: CurvePolicy
    semantics: Semantics
    layers: tuple[int, ...]
    experts: int
    steps: NDArray[np.int64]
    accesses: NDArray[np.int64]
    unique: NDArray[np.int64]
    misses: NDArray[np.int64]
    missed_accesses: NDArray[np.int64]
    clean_steps: NDArray[np.int64] | None = None
    large_misses: NDArray[np.int64] | None = None
    kind: Kind = "derived"

    def misses_of(self, slots: Mapping[int, int]) -> int:
        """Rows fetched with so many slots by layer number."""
        return sum(int(self.misses[at, slots[layer]]) for at, layer in enumerate(self.layers))

    def per_step(self, misses: float) -> float:
        """Misses of all layers as misses per step per layer."""
        return misses / max(int(self.steps.sum()), 1)

    def uniform(self) -> NDArray[np.float64]:
        """Misses per step per layer with as many slots in every layer: [experts + 1]."""
        return self.misses.sum(axis=0) / max(int(self.steps.sum()), 1)

    def uniform_at(self, slots: float) -> float:
        """The same at any mean number of slots, between two sizes in proportion.

        Raises ValueError outside 0 to ``experts``.
        """
        if not 0 <= slots <= self.experts:
            raise ValueError(f"{slots:g} slots a layer; 0 to {self.experts} were expected")
        return float(np.interp(slots, np.arange(self.experts + 1), self.uniform()))

    def hit_rates(self, slots: int) -> dict[str, float | None]:
        """The hit rates by name with ``slots`` in every layer; None without a denominator."""
        accesses, unique, steps = (int(one.sum()) for one in (self.accesses, self.unique, self.steps))
        clean = None if self.clean_steps is None else int(self.clean_steps[:, slots].sum())
        return {
            "per_access": 1 - int(self.missed_accesses[:, slots].sum()) / accesses if accesses else None,
            "per_unique": 1 - int(self.misses[:, slots].sum()) / unique if unique else None,
            "per_step": clean / steps if steps and clean is not None else None,
        }

    def concave_layers(self) -> int:
        """Layers whose every further slot saves no more than the one before."""
        return int((np.diff(self.misses, n=2, axis=1) >= 0).all(axis=1).sum())

    def __post_init__(self) -> None:
        expected = (len(self.layers), self.experts + 1)
        if self.misses.shape != expected:
            raise ValueError(f"misses of shape {self.misses.shape}; {expected} was expected")


def lru_curves(trace: Trace, semantics: Semantics = "step") -> MissCurves:
    """All sizes of LRU, from empty slots: by engine steps, or one routed id of a small step after another (what cache
    simulators do)."""
    return _Sequential.run(small_steps(trace)) if semantics == "sequential" else _Steps.run(trace)


def static_curves(trace: Trace, fitted_on: Trace | None = None) -> MissCurves:
    """All sizes of a static hot set: the experts that most small layer-steps of ``fitted_on`` routed to. None: of this
    trace itself, which is the best any static set could do here and flatters it.
    """
    own = skew(trace)
    order = np.argsort(-(own if fitted_on is None else skew(fitted_on)).used, axis=1, kind="stable")
    used, routed = (np.take_along_axis(one, order, axis=1) for one in (own.used, own.routed))
    unique, accesses = used.sum(axis=1), routed.sum(axis=1)
    return MissCurves(
        "static", "step", trace.header.layers, trace.header.experts, own.steps, accesses, unique,
        _left(unique, used), _left(accesses, routed),
    )  # fmt: skip


def _left(of: NDArray[np.int64], hits: NDArray[np.int64]) -> NDArray[np.int64]:
    """What is missed with 0, 1, ... slots, where slot n brings ``hits[:, n]``."""
    return of[:, None] - np.concatenate([np.zeros((len(of), 1), dtype=np.int64), np.cumsum(hits, axis=1)], axis=1)


@dataclass(frozen=True, slots=True)
class Skew:
    """``used``: small layer-steps that routed to each expert, ``routed``: routed ids, int64 [layers, experts];
    ``steps``: small layer-steps with a routed id [layers]."""

    used: NDArray[np.int64]
    routed: NDArray[np.int64]
    steps: NDArray[np.int64]


def skew(trace: Trace) -> Skew:
    """What each expert was asked for in small layer-steps: what a hot profile counts."""
    shape = (len(trace.header.layers), trace.header.experts)
    found = Skew(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape[0], np.int64))
    stamp = np.full(shape, -1, dtype=np.int64)

    def kernel(ids: NDArray[np.int16], starts: NDArray[np.int64], first: int, part: slice) -> None:
        counts = (found.used[part], found.routed[part], found.steps[part])
        skew_kernel(ids, starts, shape[1], stamp[part], first, *counts)

    _over(trace, kernel)
    return found


def _blocks(trace: Trace) -> Iterator[tuple[int, int, NDArray[np.int64], int]]:
    """First row, last row, step starts within and number of the first step, in blocks of whole steps."""
    starts = np.append(np.flatnonzero(trace.first), len(trace.first)).astype(np.int64)
    most = max(BLOCK_BYTES // (2 * len(trace.header.layers) * trace.header.top_k), 1)
    step = 0
    while step < len(starts) - 1:
        end = max(int(np.searchsorted(starts, starts[step] + most, side="right")) - 1, step + 1)
        end = min(end, len(starts) - 1)
        yield int(starts[step]), int(starts[end]), starts[step : end + 1] - starts[step], step
        step = end


def _over(trace: Trace, kernel: _Kernel) -> None:
    """Run a kernel over all blocks, layers shared out over the CPUs."""
    layers, workers = len(trace.header.layers), len(os.sched_getaffinity(0))
    cuts = np.linspace(0, layers, min(workers, layers) + 1).astype(int).tolist()

    def one(part: slice) -> None:
        for start, stop, starts, step in _blocks(trace):
            kernel(np.ascontiguousarray(trace.ids[start:stop, part], dtype=np.int16), starts, step, part)

    with ThreadPoolExecutor(max_workers=workers) as pool:
        list(pool.map(one, [slice(a, b) for a, b in pairwise(cuts)]))


class _Pass:
    """State of one pass: the list of every layer."""

    def __init__(self, trace: Trace) -> None:
        self.layers, self.experts = len(trace.header.layers), trace.header.experts
        shape = (self.layers, self.experts)
        self.place = np.tile(
            np.arange(self.experts, dtype=np.uint8 if self.experts <= 256 else np.uint16), (self.layers, 1)
        )
        self.seen = np.zeros(shape, dtype=np.uint8)

    @classmethod
    def run(cls, trace: Trace) -> MissCurves:
        """One pass over the trace."""
        state: Self = cls(trace)
        _over(trace, state.kernel)
        return state.curves(trace)

    def kernel(self, ids: NDArray[np.int16], starts: NDArray[np.int64], first: int, part: slice) -> None:
        """Take one block in."""
        raise NotImplementedError

    def curves(self, trace: Trace) -> MissCurves:
        """What was found."""
        raise NotImplementedError


class _Sequential(_Pass):
    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.hits = np.zeros((self.layers, self.experts), dtype=np.int64)
        self.counts = np.zeros((self.layers, 2), dtype=np.int64)

    def kernel(self, ids: NDArray[np.int16], starts: NDArray[np.int64], first: int, part: slice) -> None:
        state = (self.place[part], self.seen[part], self.hits[part], self.counts[part])
        sequential_kernel(ids, starts, self.experts, *state)

    def curves(self, trace: Trace) -> MissCurves:
        steps, accesses = self.counts[:, 0].copy(), self.counts[:, 1].copy()
        misses = _left(accesses, self.hits)
        return MissCurves(
            "lru", "sequential", trace.header.layers, self.experts, steps, accesses, accesses, misses, misses
        )


class _Steps(_Pass):
    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        shape = (self.layers, 2, self.experts)
        self.stamp = np.full((self.layers, self.experts), -1, dtype=np.int64)
        self.unique_hits, self.access_hits, self.clean = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        self.counts = np.zeros((self.layers, 2, 3), dtype=np.int64)

    def kernel(self, ids: NDArray[np.int16], starts: NDArray[np.int64], first: int, part: slice) -> None:
        counts: Sequence[Any] = [one[part] for one in (self.unique_hits, self.access_hits, self.clean, self.counts)]
        step_kernel(
            ids, starts, self.experts, self.place[part], self.seen[part], self.stamp[part], first, *counts
        )  # fmt: skip

    def curves(self, trace: Trace) -> MissCurves:
        steps, accesses, unique = (self.counts[:, 0, at].copy() for at in range(3))
        clean = steps[:, None] - _left(steps, self.clean[:, 0])
        return MissCurves(
            "lru", "step", trace.header.layers, self.experts, steps, accesses, unique,
            _left(unique, self.unique_hits[:, 0]), _left(accesses, self.access_hits[:, 0]), clean,
            _left(self.counts[:, 1, 2], self.unique_hits[:, 1]),
        )  # fmt: skip
