"""What a checkpoint is made of, from ``config.json`` and the headers of its safetensors files: no weight is read.

A safetensors file begins with the header's length (uint64, little-endian) and the header (JSON: name -> dtype, shape,
data_offsets). Sizes are the offsets' own, so that types which torch does not know are priced right.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from soakrig.engine.model_config import read_config
from soakrig.engine.offload.plan import LayerShape, ModelShape, OffloadPlan
from soakrig.errors import UsageError

from .quantity import Figure, bytes_text

Part = Literal["routed experts", "shared experts", "attention", "embeddings", "other"]
PARTS: tuple[Part, ...] = get_args(Part)
MOST_HEADER = 512 << 20
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_ROUTED = re.compile(r"\.experts\.(?:(\d+)\.)?")
_SHARED = re.compile(r"shared_experts?|shared_mlp|shared_expert_gate")
_ATTENTION = re.compile(r"(?:self_attn|linear_attn|attention|\.attn|\.mixer|indexer)\b")
_EMBEDDING = re.compile(r"embed_tokens|word_embeddings|wte\.|lm_head|(?:^|\.)embed\.|output_layer\.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``parts``: bytes by part of the whole; ``row_bytes``: of one routed expert, by layer number; ``experts`` of one
    layer by number; ``top_k``, ``context`` None where the configuration does not say. ``hidden_layers``: the model's
    own number; MoE layers from it on are draft layers (multi-token prediction)."""

    name: str
    parts: Mapping[Part, int]
    row_bytes: Mapping[int, int]
    experts: Mapping[int, int]
    top_k: int | None
    context: int | None
    hidden_layers: int | None
    files: int
    tensors: int

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(self.parts.values())

    @property
    def draft_layers(self) -> tuple[int, ...]:
        """MoE layers beyond the model's own."""
        return tuple(
            layer for layer in self.row_bytes if self.hidden_layers is not None and layer >= self.hidden_layers
        )

    def shape(self) -> ModelShape:
        """As the offload core prices it. Raises UsageError for a model without routed experts or without a top-k."""
        if not self.row_bytes or self.top_k is None:
            raise UsageError(
                f"{self.name} has {len(self.row_bytes)} layers with routed experts and top-k {self.top_k}",
                remedy="only a mixture of experts can be offloaded by experts",
            )
        layers = tuple(LayerShape(layer, self.experts[layer], size) for layer, size in self.row_bytes.items())
        return ModelShape(self.name, layers, self.top_k)

    def to_json(self) -> dict[str, Any]:
        """All of it; row bytes by layer, folded where all are equal."""
        return {
            "name": self.name,
            "bytes": self.total,
            "parts": dict(self.parts),
            "layers": len(self.row_bytes),
            "draft_layers": list(self.draft_layers),
            "experts": sorted(set(self.experts.values())),
            "top_k": self.top_k,
            "max_context": self.context,
            "row_bytes": {str(layer): size for layer, size in self.row_bytes.items()},
            "files": self.files,
            "tensors": self.tensors,
        }


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the bytes are at a given offload, before KV cache, activations and graphs; all derived."""

    host: Figure
    resident: Figure
    slots: Figure
    staging: Figure
    offloaded_layers: int

    @property
    def device(self) -> Figure:
        """What of the model lies on the device: resident weights, slots, staging rows."""
        return (self.resident + self.slots + self.staging).labelled("resident weights, slots and staging rows")

    def to_json(self) -> dict[str, Any]:
        """Every part as a figure."""
        names = ("host", "resident", "slots", "staging", "device")
        return {"offloaded_layers": self.offloaded_layers, **{name: getattr(self, name).to_json() for name in names}}


def placement(checkpoint: Checkpoint, plan: OffloadPlan) -> Placement:
    """What a plan puts where. Slots of an arena are of the one size that an arena allows."""
    sizes = plan.row_bytes
    if plan.arena:
        slots = plan.arena * next(iter(sizes.values()))
    else:
        slots = sum(layer.slots * layer.row_bytes for layer in plan.layers)
    kinds = sum(sorted(set(sizes.values())))  # layers of one row size share their staging rows
    return Placement(
        Figure.of(plan.bank_bytes, "B", "derived", "routed experts off the device"),
        Figure.of(checkpoint.total - plan.bank_bytes, "B", "derived", "everything else of the checkpoint"),
        Figure.of(slots, "B", "derived", "slots x row"),
        Figure.of(
            plan.staging_rows * kinds if plan.staging and plan.layers else 0, "B", "derived", "staging rows x row"
        ),
        len(plan.layers),
    )


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """One gated expert by its widths: ``bits`` a weight, and one scale byte for every ``scale_block`` weights (0: no
    scales). Three matrices of hidden x intermediate: gate, up (together w13) and down (w2)."""

    hidden: int
    intermediate: int
    bits: float = 4
    scale_block: int = 16

    def weights(self, matrices: int = 3) -> Figure:
        """Bytes of so many of its matrices."""
        return Figure.of(self._parameters(matrices) * self.bits / 8, "B/row", "derived", "width x width x bits")

    def scales(self, matrices: int = 3) -> Figure:
        """Bytes of their scales."""
        count = self._parameters(matrices) / self.scale_block if self.scale_block else 0
        return Figure.of(count, "B/row", "derived", "one byte a block")

    def row(self) -> Figure:
        """What a miss fetches."""
        return self.weights() + self.scales()

    def _parameters(self, matrices: int) -> int:
        return matrices * self.hidden * self.intermediate


def read_checkpoint(folder: str) -> Checkpoint:
    """Read ``config.json`` and every header.

    Raises UsageError for a folder that is no checkpoint, a file that its index names and that is missing, and a header
    that does not fit its file.
    """
    place = Path(folder)
    config = read_config(place)
    files = _files(place)
    parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
    routed: dict[int, int] = defaultdict(int)
    numbered: dict[int, set[int]] = defaultdict(set)
    fused: dict[int, int] = {}
    tensors = 0
    for file in files:
        for name, entry in _header(file).items():
            if name == "__metadata__":
                continue
            tensors += 1
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            part = part_of(name)
            parts[part] += size
            layer = _LAYER.search(name)
            if part == "routed experts" and layer:
                number = int(layer[1])
                routed[number] += size
                expert = _ROUTED.search(name)
                if expert and expert[1]:
                    numbered[number].add(int(expert[1]))
                elif entry["shape"]:
                    fused[number] = int(entry["shape"][0])
    experts = {layer: len(numbered[layer]) if layer in numbered else fused.get(layer, 0) for layer in sorted(routed)}
    said = config.experts
    for layer, count in experts.items():
        if not count or routed[layer] % count or (said is not None and count != said):
            raise UsageError(
                f"{folder}: layer {layer} has {bytes_text(routed[layer])} of routed experts in {count} of them, and "
                f"config.json says {said}: equal shares were expected",
                remedy="complete the checkpoint, or inspect one whose experts lie in tensors of their own",
            )
    rows = {layer: routed[layer] // count for layer, count in experts.items()}
    return Checkpoint(
        place.resolve().name, parts, rows, experts, config.top_k, config.max_positions, config.layers, len(files),
        tensors,
    )  # fmt: skip


def part_of(name: str) -> Part:
    """The part that a tensor belongs to, by its name. Routers, dense MLPs, norms and vision towers are ``other``."""
    if "vision" in name or "visual." in name:
        return "other"
    if _SHARED.search(name):
        return "shared experts"
    if _ROUTED.search(name):
        return "routed experts"
    if _ATTENTION.search(name):
        return "attention"
    return "embeddings" if _EMBEDDING.search(name) else "other"


def _files(place: Path) -> list[Path]:
    index = place / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"{index} is no index of safetensors files: {error}", remedy="fetch it again") from error
        missing = [name for name in names if not (place / name).is_file()]
        if missing:
            raise UsageError(
                f"{place}: {len(missing)} of the {len(names)} files that its index names are missing: "
                f"{', '.join(missing[:3])}",
                remedy="complete the checkpoint",
            )
        return [place / name for name in names]
    files = sorted(place.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{place} has no safetensors file", remedy="give the folder of a checkpoint")
    return files


def _header(path: Path) -> dict[str, Any]:
    remedy = "the file is cut off or no safetensors file; fetch it again"
    with path.open("rb") as file:
        size = path.stat().st_size
        prefix = file.read(8)
        length = int(np.frombuffer(prefix, dtype="<u8")[0]) if len(prefix) == 8 else -1
        if not 2 <= length <= min(size - 8, MOST_HEADER):
            raise UsageError(f"{path}: its header claims {length} bytes, and the file has {size}", remedy=remedy)
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise UsageError(f"{path}: its header cannot be read: {error}", remedy=remedy) from error
    end = 8 + length + max(ends, default=0)
    if end != size:
        raise UsageError(f"{path}: its tensors end at byte {end:,}, and the file has {size:,}", remedy=remedy)
    return header
