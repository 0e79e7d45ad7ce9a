"""What is offloaded, decided once at start: which layers leave the device, their slots, policies and first hot sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import orjson
from pydantic import ConfigDict, TypeAdapter, ValidationError

from soakrig.errors import UsageError

from .json_file import broken
from .layer_list import layer_list
from .profile import HotProfile, read_profile
from .settings import OffloadSettings, PolicyName, SplitName
from .slot_map import read_slot_map

GIB = 2**30
STAGING_ROWS = 64
"""Device rows that misses are gathered into; also the most routed ids of a small layer-step."""
MOST_TRACED_EXPERTS = 2**15 - 1
"""A trace keeps ids in 16 bits."""
FALLBACK: PolicyName = "lru"
"""Policy of a layer that should be static and is not in the profile."""
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One MoE layer: its number in the model, its routed experts, and the bytes of one expert's parameters."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    layer: int
    experts: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        return self.experts * self.row_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as offload sees it: ``layers``, all its MoE layers in order, ``top_k`` routed experts a token."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    name: str
    layers: tuple[LayerShape, ...]
    top_k: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One offloaded layer. ``slots``: of its own (0 in an arena); ``hot``: experts that start in slots, hottest first.

    Under ``static`` the hot set is all that is ever in slots; under the others it is where they start.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    layer: int
    experts: int
    row_bytes: int
    slots: int
    policy: PolicyName
    hot: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """``layers``: the offloaded ones, in order. ``arena``: slots that they share (0: each has its own), filled at
    start layer by layer, each layer's hottest first.

    ``asked_gb``: CPU_OFFLOAD_GB in GiB, None where it was not set; ``trace``, ``skew``: files to write.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    model: ModelShape
    layers: tuple[LayerPlan, ...]
    arena: int
    staging: bool
    groups: bool
    staging_rows: int
    asked_gb: float | None
    trace: str | None
    skew: str | None
    warnings: tuple[str, ...]
    split: SplitName = "experts"
    """How a large layer-step that misses more than the staging rows hold is cut."""

    @classmethod
    def build(cls, settings: OffloadSettings, model: ModelShape) -> OffloadPlan:
        """Apply the settings to a model; reads the slot map and the profile they name.

        Raises UsageError, with both numbers, for what does not fit the model. What can be gone on with is in
        ``warnings``.
        """
        _check_trace(settings, model)
        leaving = _leaving(settings, model)
        warnings: list[str] = []
        total = sum(layer.bytes for layer in model.layers)
        if settings.offload_gb is not None and settings.offload_gb * GIB > total:
            warnings.append(
                f"CPU_OFFLOAD_GB={settings.offload_gb:g} is more than the {total / GIB:.4g} GiB of all experts: "
                f"layers {layer_list(layer.layer for layer in leaving)} are offloaded"
            )
        layers = _with_slots(settings, leaving)
        if settings.hot_profile is not None:
            layers, found = _pinned(settings, model, layers)
            warnings += found
        rows = settings.arena or sum(layer.slots for layer in layers)
        if rows and not settings.staging and not any(layer.hot for layer in layers):
            warnings.append(
                f"VLLM_MOE_DMA_STAGING=0 fills no slot while the engine runs, and without VLLM_MOE_HOT_PROFILE none is "
                f"filled at start: the {rows} slots stay empty"
            )
        return cls(
            model=model,
            layers=layers,
            arena=settings.arena,
            staging=settings.staging,
            groups=settings.groups,
            staging_rows=STAGING_ROWS,
            asked_gb=settings.offload_gb,
            trace=settings.trace,
            skew=settings.skew,
            warnings=tuple(warnings),
            split=settings.split,
        )

    @property
    def frozen(self) -> bool:
        """Whether slots keep what start-up put in them: with staging off nothing is fetched at run time."""
        return not self.staging

    @property
    def row_bytes(self) -> dict[int, int]:
        """Bytes of one row of each offloaded layer, by layer number."""
        return {layer.layer: layer.row_bytes for layer in self.layers}

    @property
    def bank_bytes(self) -> int:
        """Bytes of all rows in host memory."""
        return sum(layer.experts * layer.row_bytes for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """For JSON: the worker's argument and the header of a trace."""
        return orjson.loads(orjson.dumps(asdict(self)))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """What ``to_json`` gave. Raises UsageError saying which key is wrong, or what contradicts itself."""
        try:
            plan = TypeAdapter(cls).validate_json(orjson.dumps(dict(raw)))
        except ValidationError as error:
            raise UsageError(f"this is no offload plan: {broken(error)}") from error
        except TypeError as error:  # a value that JSON does not have
            raise UsageError(f"this is no offload plan: {error}") from error
        wrong = _contradiction(plan)
        if wrong:
            raise UsageError(f"this offload plan contradicts itself: {wrong}")
        return plan

    def report(self) -> dict[str, Any]:
        """For ``/soakrig/settings``: what the settings came to for this model."""
        return {
            "model": self.model.name,
            "moe_layers": len(self.model.layers),
            "offloaded_layers": len(self.layers),
            "asked_gb": self.asked_gb,
            "bank_bytes": self.bank_bytes,
            "slots": self.arena or sum(layer.slots for layer in self.layers),
            "arena": self.arena > 0,
            "frozen": self.frozen,
            "staging": self.staging,
            "groups": self.groups,
            "staging_rows": self.staging_rows,
            "split": self.split,
            "trace": self.trace,
            "skew": self.skew,
            "layers": [{**asdict(layer), "hot": len(layer.hot)} for layer in self.layers],
            "warnings": list(self.warnings),
        }


def _check_trace(settings: OffloadSettings, model: ModelShape) -> None:
    experts = max((layer.experts for layer in model.layers), default=0)
    if settings.trace is not None and not 1 <= experts <= MOST_TRACED_EXPERTS:
        raise UsageError(
            f"VLLM_MOE_ROUTING_TRACE={settings.trace}: a trace holds 1 to {MOST_TRACED_EXPERTS} experts a layer, and "
            f"{model.name} has {experts}",
            remedy="unset VLLM_MOE_ROUTING_TRACE",
        )


def _leaving(settings: OffloadSettings, model: ModelShape) -> tuple[LayerShape, ...]:
    if not settings.offloads:
        return ()
    if not model.layers:
        raise UsageError(
            f"VLLM_MOE_HOT_SLOTS={settings.values['VLLM_MOE_HOT_SLOTS']}, CPU_OFFLOAD_GB={_gb(settings.offload_gb)}: "
            f"{model.name} has no MoE layer to offload",
            remedy="unset them, or serve a model with routed experts",
        )
    if settings.offload_gb is None:
        return model.layers
    leaving: list[LayerShape] = []
    off = 0
    for layer in model.layers:
        if off >= settings.offload_gb * GIB:
            break
        leaving.append(layer)
        off += layer.bytes
    return tuple(leaving)


def _with_slots(settings: OffloadSettings, leaving: tuple[LayerShape, ...]) -> tuple[LayerPlan, ...]:
    """The offloaded layers with their slots and the policy, nothing pinned yet."""
    name = f"VLLM_MOE_HOT_SLOTS={settings.values['VLLM_MOE_HOT_SLOTS']}"
    if settings.arena:
        _check_arena(settings.arena, name, leaving)
    slots = _from_map(settings.slot_map, leaving) if settings.slot_map is not None else {}
    policy = settings.policy
    layers: list[LayerPlan] = []
    for shape in leaving:
        count = slots.get(shape.layer, settings.slots)
        if count > shape.experts:
            raise UsageError(
                f"{name} asks for {count} slots in layer {shape.layer}, which has {shape.experts} experts",
                remedy=f"give at most {shape.experts}",
            )
        layers.append(LayerPlan(shape.layer, shape.experts, shape.row_bytes, count, policy, ()))
    return tuple(layers)


def _check_arena(arena: int, name: str, leaving: tuple[LayerShape, ...]) -> None:
    experts = sum(layer.experts for layer in leaving)
    if arena > experts:
        raise UsageError(
            f"{name} asks for {arena} shared slots, and the {len(leaving)} offloaded layers have {experts} experts",
            remedy=f"give at most arena:{experts}",
        )
    first = leaving[0]
    for layer in leaving:
        if layer.row_bytes != first.row_bytes:
            raise UsageError(
                f"{name}: a shared slot holds a row of any layer, but a row of layer {first.layer} has "
                f"{first.row_bytes} bytes and one of layer {layer.layer} {layer.row_bytes}",
                remedy="give a number of slots per layer, or a slot map",
            )


def _from_map(path: str, leaving: tuple[LayerShape, ...]) -> Mapping[int, int]:
    slot_map = read_slot_map(path)
    wanted = {layer.layer for layer in leaving}
    if set(slot_map.slots) != wanted:
        raise UsageError(
            f"VLLM_MOE_HOT_SLOTS={path} gives slots to layers {layer_list(slot_map.slots)}, and the offloaded layers "
            f"are {layer_list(wanted)}",
            remedy="give a map of exactly the offloaded layers; CPU_OFFLOAD_GB decides which they are",
        )
    for layer in leaving:
        if layer.experts != slot_map.experts:
            raise UsageError(
                f"VLLM_MOE_HOT_SLOTS={path} was made for {slot_map.experts} experts a layer, and layer {layer.layer} "
                f"has {layer.experts}",
                remedy="give a map that was made for this model",
            )
    return slot_map.slots


def _pinned(
    settings: OffloadSettings, model: ModelShape, layers: tuple[LayerPlan, ...]
) -> tuple[tuple[LayerPlan, ...], list[str]]:
    """The layers with their hot sets, and at most one warning."""
    path = str(settings.hot_profile)
    profile = read_profile(path)
    name = f"VLLM_MOE_HOT_PROFILE={path}"
    _refuse_unusable(name, profile, model, layers)
    if not settings.arena and not any(layer.slots for layer in layers):
        raise UsageError(
            f"{name} has nothing to pin in: VLLM_MOE_HOT_SLOTS={settings.slot_map} gives 0 slots to every layer",
            remedy="give slots, or unset VLLM_MOE_HOT_PROFILE",
        )
    hot = _hot_in_arena(profile, layers, settings.arena) if settings.arena else _hot_by_layer(profile, layers)
    cold = [layer.layer for layer in layers if (settings.arena or layer.slots) and not profile.hottest(layer.layer, 1)]
    fall_back = settings.policy == "static" and not settings.arena
    pinned = tuple(
        replace(layer, hot=hot[layer.layer], policy=FALLBACK if fall_back and layer.layer in cold else layer.policy)
        for layer in layers
    )
    here = {layer.layer for layer in layers}
    if profile.offload_gb == settings.offload_gb and set(profile.layers) == here and not cold:
        return pinned, []
    then = f"it was taken at CPU_OFFLOAD_GB={_gb(profile.offload_gb)}, layers {layer_list(profile.layers)}"
    now = f"this engine has CPU_OFFLOAD_GB={_gb(settings.offload_gb)}, layers {layer_list(here)}"
    rest = ""
    if cold:
        how = f"run {FALLBACK} from cold" if fall_back else "start cold"
        rest = f"; without counts and so {how}: layers {layer_list(cold)}"
    return pinned, [f"{name} does not fit: {then}; {now}{rest}"]


def _refuse_unusable(name: str, profile: HotProfile, model: ModelShape, layers: tuple[LayerPlan, ...]) -> None:
    experts = next((layer.experts for layer in layers if layer.experts != profile.experts), layers[0].experts)
    if profile.model != model.name or profile.experts != experts:
        raise UsageError(
            f"{name} is foreign: it was taken of {profile.model} with {profile.experts} experts a layer, and this is "
            f"{model.name} with {experts}",
            remedy="take a profile of this model with VLLM_MOE_SKEW_PERLAYER",
        )
    counted = {layer for layer in profile.layers if profile.hottest(layer, 1)}
    if not counted:
        raise UsageError(
            f"{name} is empty: {len(profile.layers)} layers, {profile.steps} steps, and every count is 0",
            remedy="take it anew with VLLM_MOE_SKEW_PERLAYER, and send the engine some requests",
        )
    here = {layer.layer for layer in layers}
    if not counted & here:
        raise UsageError(
            f"{name} has counts of layers {layer_list(counted)}, and none of the offloaded layers {layer_list(here)}",
            remedy="take it at the CPU_OFFLOAD_GB that this engine has",
        )


def _hot_by_layer(profile: HotProfile, layers: tuple[LayerPlan, ...]) -> dict[int, tuple[int, ...]]:
    return {layer.layer: profile.hottest(layer.layer, layer.slots) for layer in layers}


def _hot_in_arena(profile: HotProfile, layers: tuple[LayerPlan, ...], slots: int) -> dict[int, tuple[int, ...]]:
    """The ``slots`` rows with the greatest share of their own layer; ties to the lower layer, then expert."""
    shares: list[tuple[float, int, int]] = []
    for layer in layers:
        counts = profile.counts.get(layer.layer)
        if counts is None:
            continue
        total = sum(counts.tolist())
        shares += [(-int(counts[expert]) / total, layer.layer, int(expert)) for expert in np.flatnonzero(counts)]
    hot: dict[int, list[int]] = {layer.layer: [] for layer in layers}
    for _, layer, expert in sorted(shares)[:slots]:
        hot[layer].append(expert)
    return {layer: tuple(experts) for layer, experts in hot.items()}


def _contradiction(plan: OffloadPlan) -> str:
    """What in a plan cannot be, "" where all can."""
    shapes = {shape.layer: shape for shape in plan.model.layers}
    numbers = [layer.layer for layer in plan.layers]
    if len(shapes) != len(plan.model.layers) or numbers != [number for number in shapes if number in numbers]:
        return f"offloaded layers {numbers} of the model's {[shape.layer for shape in plan.model.layers]}"
    for layer in plan.layers:
        shape = shapes[layer.layer]
        most = layer.experts if plan.arena else layer.slots
        if (layer.experts, layer.row_bytes) != (shape.experts, shape.row_bytes):
            return f"layer {layer.layer} has {layer.experts} experts of {layer.row_bytes} bytes, and the model {shape}"
        if not 0 <= layer.slots <= layer.experts or (plan.arena and layer.slots):
            return f"layer {layer.layer} has {layer.slots} slots and {layer.experts} experts, the arena {plan.arena}"
        if len(set(layer.hot)) != len(layer.hot) or len(layer.hot) > most:
            return f"layer {layer.layer} has hot experts {list(layer.hot)} for {most} places"
        if any(not 0 <= expert < layer.experts for expert in layer.hot):
            return f"layer {layer.layer} has hot experts {list(layer.hot)} of {layer.experts}"
    if plan.arena and not sum(len(layer.hot) for layer in plan.layers) <= plan.arena <= sum(
        layer.experts for layer in plan.layers
    ):
        return f"an arena of {plan.arena} slots"
    return ""


def _gb(value: float | None) -> str:
    return "(unset)" if value is None else f"{value:g}"
