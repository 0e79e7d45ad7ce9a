"""Replays of a routing trace under given slots: the engine's own books for its policies, and the offline optimum.

Two semantics. ``step``: as the engine has it, all ids of a layer-step at once. ``sequential``: one routed id after
another, as cache simulators and both seeds' offline tools count, for comparison. Only small layer-steps (at most 64
routed ids) are counted in ``misses``: in the others slots are read and never filled.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from soakrig.engine.offload.counters import COUNTERS, PATHS, UNIQUE, UNIQUE_HITS, Counters, rates
from soakrig.engine.offload.optimum import optimum_counts
from soakrig.engine.offload.plan import STAGING_ROWS, LayerPlan, LayerShape, ModelShape, OffloadPlan
from soakrig.engine.offload.profile import HotProfile
from soakrig.engine.offload.replay import replay
from soakrig.engine.offload.settings import POLICIES, PolicyName
from soakrig.engine.offload.trace import Trace
from soakrig.errors import UsageError

from .curve import Semantics, skew
from .trace import PlannedTrace, small_steps

ReplayPolicy = Literal["lru", "static", "lfru", "clock", "opt"]
REPLAY_POLICIES: tuple[ReplayPolicy, ...] = get_args(ReplayPolicy)
SEMANTICS: tuple[Semantics, ...] = get_args(Semantics)
OPTIMUM = "opt"
Hot = Mapping[int, Sequence[int]]
"""Experts that start in slots, by layer number, hottest first."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """``counters`` [layers][PATHS][COUNTERS] of the layers with slots, ``slots`` by layer number (of an arena: its
    slots under -1); ``steps``: small layer-steps of the engine, by place of the layer. ``hot_set``: what the slots
    started with, in words.
    """

    policy: str
    semantics: Semantics
    layers: tuple[int, ...]
    slots: Mapping[int, int]
    counters: Counters
    steps: tuple[int, ...]
    rows: Mapping[str, int]
    hot_set: str

    @property
    def misses(self) -> int:
        """Rows fetched in small layer-steps."""
        return sum(_misses(layer[0]) for layer in self.counters)

    @property
    def misses_per_step_per_layer(self) -> float | None:
        """Misses over the engine's small layer-steps, whatever the semantics."""
        steps = sum(self.steps)
        return self.misses / steps if steps else None

    def to_json(self) -> dict[str, Any]:
        """The object of ``soak plan replay --json``."""
        summed = _named([sum(layer[0][at] for layer in self.counters) for at in range(len(COUNTERS))])
        hit_rate = rates(summed)["hit_rate"]
        return {
            "misses": self.misses,
            "accesses": summed["accesses"],
            "misses_per_step_per_layer": self.misses_per_step_per_layer,
            "hit_rate": {name: hit_rate[name] for name in ("per_access", "per_unique")},
            "per_layer": [
                self._layer(layer, counters, steps)
                for layer, counters, steps in zip(self.layers, self.counters, self.steps, strict=True)
            ],
            "rows": dict(self.rows),
            "policy": self.policy,
            "semantics": self.semantics,
        }

    def hit_rates(self) -> dict[str, float | None]:
        """All three by name over all layers. ``per_step`` says nothing where every id is a step of its own."""
        return rates(_named([sum(layer[0][at] for layer in self.counters) for at in range(len(COUNTERS))]))["hit_rate"]

    def _layer(self, layer: int, counters: Sequence[Sequence[int]], steps: int) -> dict[str, Any]:
        small, large = (_named(path) for path in counters)
        misses = _misses(counters[0])
        return {
            "layer": layer,
            "slots": self.slots.get(layer),
            "misses": misses,
            "misses_per_step": misses / steps if steps else None,
            **small,
            "hit_rate": rates(small)["hit_rate"],
            "large": {**large, "misses": _misses(counters[1]), "hit_rate": rates(large)["hit_rate"]},
        }


def _misses(path: Sequence[int]) -> int:
    return path[UNIQUE] - path[UNIQUE_HITS]


def _named(path: Sequence[int]) -> dict[str, int]:
    return dict(zip(COUNTERS, map(int, path), strict=True))


Choice = TypeVar("Choice", bound=str)


def choose(name: str, value: str, known: Sequence[Choice]) -> Choice:
    """The one of ``known`` that ``value`` spells. Raises UsageError naming the nearest to what is none."""
    found = next((one for one in known if one == value), None)
    if found is not None:
        return found
    near = difflib.get_close_matches(value, known, n=1)
    hint = f"{near[0]!r} was probably meant; " if near else ""
    raise UsageError(f"{name} {value!r} is none of {', '.join(known)}", remedy=f"{hint}give one of them")


def uniform_slots(planned: PlannedTrace, slots: int) -> dict[int, int]:
    """As many slots in each layer that the trace's engine offloaded, or in every layer where it does not say."""
    header = planned.trace.header
    layers = header.layers if header.plan is None or not header.plan.layers else tuple(header.plan.row_bytes)
    return dict.fromkeys(layers, slots)


def replay_trace(
    planned: PlannedTrace,
    slots: Mapping[int, int],
    policy: ReplayPolicy = "lru",
    semantics: Semantics = "step",
    *,
    profile: HotProfile | None = None,
    cold: bool = False,
) -> Replayed:
    """What the engine would have counted with ``slots`` by layer number.

    What the slots start with: of ``profile``; else what the engine that wrote the trace started with, where that fills
    them; else nothing, and for ``static`` the experts that this very trace uses most (an upper bound). ``cold``:
    nothing, whatever there is.

    Raises UsageError for layers that the trace does not have and for more slots than experts.
    """
    trace = planned.trace
    _check_slots(planned, slots)
    hot, words = ({}, "empty") if cold and policy != "static" else _hot(planned, slots, policy, profile)
    layers = tuple(slots)
    steps = _small_layer_steps(trace, layers)
    if policy == OPTIMUM:
        counters = _optimum(trace, slots, semantics)
        words = "empty, and the future known"
    else:
        plan = _plan(trace, slots, policy, hot)
        if semantics == "sequential":
            trace, plan = _one_by_one(trace), replace(plan, model=replace(plan.model, top_k=1))
        whole = replay(trace, plan)
        places = [trace.header.layers.index(layer) for layer in layers]
        counters = [whole[place] for place in places]
    return Replayed(policy, semantics, layers, slots, counters, steps, planned.rows, words)


def replay_as_captured(planned: PlannedTrace) -> Replayed:
    """The counters of the engine that wrote the trace: its own slots, policy and hot sets, arena and all.

    Raises UsageError for a trace that does not say how it was offloaded.
    """
    trace, plan = planned.trace, planned.trace.header.plan
    if plan is None or not plan.layers:
        raise UsageError(
            f"{planned.path} does not say how its engine was offloaded", remedy="give --slots or --map, and --policy"
        )
    layers = tuple(layer.layer for layer in plan.layers)
    whole = replay(trace, plan)
    counters = [whole[trace.header.layers.index(layer)] for layer in layers]
    policies = {layer.policy for layer in plan.layers}
    slots = {-1: plan.arena} if plan.arena else {layer.layer: layer.slots for layer in plan.layers}
    steps = _small_layer_steps(trace, layers)
    return Replayed(
        policies.pop() if len(policies) == 1 else "mixed", "step", layers, slots, counters, steps, planned.rows,
        "as the engine's",
    )  # fmt: skip


def replay_arena(planned: PlannedTrace, slots: int, policy: PolicyName = "lru") -> Replayed:
    """One pool of ``slots`` for all layers, from empty slots: the per-layer map then needs no planning."""
    header = planned.trace.header
    layers = tuple(uniform_slots(planned, 0))
    most = len(layers) * header.experts
    if not 1 <= slots <= most:
        raise UsageError(f"an arena of {slots} slots; 1 to {most} were expected", remedy="give slots that fit")
    plan = replace(_plan(planned.trace, dict.fromkeys(layers, 0), policy, {}), arena=slots)
    whole = replay(planned.trace, plan)
    counters = [whole[header.layers.index(layer)] for layer in layers]
    steps = _small_layer_steps(planned.trace, layers)
    return Replayed(policy, "step", layers, {-1: slots}, counters, steps, planned.rows, "empty")


def _check_slots(planned: PlannedTrace, slots: Mapping[int, int]) -> None:
    header = planned.trace.header
    unknown = sorted(set(slots) - set(header.layers))
    if unknown or not slots:
        raise UsageError(
            f"slots are given to layers {unknown[:5]}, and {planned.path} has layers {header.layers[0]} to "
            f"{header.layers[-1]}",
            remedy="give a map of the trace's own layers",
        )
    wrong = next((layer for layer, count in slots.items() if not 0 <= count <= header.experts), None)
    if wrong is not None:
        raise UsageError(
            f"layer {wrong} is given {slots[wrong]} slots; 0 to {header.experts}, its experts, were expected",
            remedy="give fewer slots",
        )


def _hot(planned: PlannedTrace, slots: Mapping[int, int], policy: str, profile: HotProfile | None) -> tuple[Hot, str]:
    own = planned.trace.header.plan
    if policy == OPTIMUM:
        return {}, "empty"
    if profile is not None:
        _check_profile(planned, profile)
        return {layer: profile.hottest(layer, count) for layer, count in slots.items()}, "the profile's hottest"
    if own is not None and not own.arena and any(layer.hot for layer in own.layers):
        started = {layer.layer: layer.hot for layer in own.layers}
        same = {layer.layer: layer.slots for layer in own.layers} == dict(slots)
        if same or all(len(started.get(layer, ())) >= count for layer, count in slots.items()):
            return {layer: started[layer][:count] for layer, count in slots.items()}, "what the trace's engine had"
    if policy != "static":
        return {}, "empty"
    header, used = planned.trace.header, skew(planned.trace).used
    order = np.argsort(-used, axis=1, kind="stable")
    hot: dict[int, Sequence[int]] = {}
    for layer, count in slots.items():
        at = header.layers.index(layer)
        hot[layer] = [int(expert) for expert in order[at, :count] if used[at, expert]]
    return hot, "this trace's own hottest (an upper bound)"


def _check_profile(planned: PlannedTrace, profile: HotProfile) -> None:
    header = planned.trace.header
    if profile.experts != header.experts or not set(profile.layers) & set(header.layers):
        raise UsageError(
            f"the profile is of {profile.model}, {profile.experts} experts, layers {list(profile.layers)[:4]}..., and "
            f"{planned.path} has {header.experts} experts and layers {list(header.layers)[:4]}...",
            remedy="give a profile of the same model",
        )


def _plan(trace: Trace, slots: Mapping[int, int], policy: str, hot: Hot) -> OffloadPlan:
    header = trace.header
    names: dict[str, PolicyName] = {name: name for name in POLICIES}
    if header.plan is not None:
        base, sizes = header.plan, {layer.layer: layer for layer in header.plan.model.layers}
    else:
        sizes = {layer: LayerShape(layer, header.experts, 1) for layer in header.layers}
        model = ModelShape(header.model, tuple(sizes.values()), header.top_k)
        base = OffloadPlan(
            model=model, layers=(), arena=0, staging=True, groups=True, staging_rows=STAGING_ROWS, asked_gb=None,
            trace=None, skew=None, warnings=(),
        )  # fmt: skip
    layers = tuple(
        LayerPlan(
            layer, sizes[layer].experts, sizes[layer].row_bytes, slots[layer], names[policy], tuple(hot.get(layer, ()))
        )
        for layer in header.layers
        if layer in slots
    )
    return replace(base, layers=layers, arena=0)


def _one_by_one(trace: Trace) -> Trace:
    """Every routed id of the small steps as a step of its own."""
    small = small_steps(trace)
    rows, layers, top_k = small.ids.shape
    count = rows * top_k
    return replace(
        small,
        header=replace(trace.header, top_k=1, plan=None),
        marks=np.repeat(small.marks, top_k),
        first=np.ones(count, dtype=np.bool_),
        ids=small.ids.transpose(0, 2, 1).reshape(count, layers, 1),
    )


def _small_layer_steps(trace: Trace, layers: Sequence[int]) -> tuple[int, ...]:
    places = [trace.header.layers.index(layer) for layer in layers]
    steps = skew(trace).steps
    return tuple(int(steps[place]) for place in places)


def _optimum(trace: Trace, slots: Mapping[int, int], semantics: Semantics) -> Counters:
    small = small_steps(trace)
    experts, top_k = trace.header.experts, trace.header.top_k
    starts = np.append(np.flatnonzero(small.first), len(small.first)).astype(np.int64) * top_k
    if semantics == "sequential":
        starts = np.arange(len(small.first) * top_k + 1, dtype=np.int64)

    def one(layer: int) -> list[list[int]]:
        ids = small.ids[:, trace.header.layers.index(layer)].astype(np.int64).reshape(-1)
        counts = optimum_counts(ids, starts, experts, slots[layer])
        return [counts.tolist(), [0] * len(COUNTERS)]

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(one, slots))
    assert len(found[0]) == len(PATHS)
    return found
