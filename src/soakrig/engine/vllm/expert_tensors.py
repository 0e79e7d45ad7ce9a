"""The tensors of one vLLM layer that have an expert axis: found, laid out as rows, and pointed somewhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soakrig.errors import EngineStartError

ROUTERS = frozenset({"e_score_correction_bias", "hash_indices_table"})
"""Parameters that a layer holds for its router: an entry for each expert, and no part of any. vLLM's own list of what
is no expert weight is in ``RoutedExperts.get_expert_weights``."""


@dataclass(frozen=True, slots=True)
class _Held:
    parameter: Tensor
    order: tuple[int, ...]
    """Axes of the parameter in the order in which its memory runs; the expert axis comes first."""

    def rows(self) -> Tensor:
        return self.parameter.data.permute(self.order)


class ExpertTensors:
    """Every parameter of a layer with a leading expert axis, by name: weights, scales, zero points.

    A kernel or a quantisation's own tables may hold on to a parameter, so that the parameter stays and its ``data``
    moves.
    """

    def __init__(self, held: Mapping[str, _Held]) -> None:
        self._held = held
        self._source: Mapping[str, Tensor] | None = None

    def rows(self) -> dict[str, Tensor]:
        """Name -> contiguous [experts, ...], whatever the order of the parameter's axes."""
        return {name: one.rows() for name, one in self._held.items()}

    def release(self) -> None:
        """Give the memory back: the rows are in a bank now."""
        for one in self._held.values():
            one.parameter.data = torch.empty(0, dtype=one.parameter.dtype, device=one.parameter.device)

    def point_at(self, source: Mapping[str, Tensor]) -> None:
        """Have every parameter show ``source``: name -> contiguous [rows, ...]. Nothing is copied."""
        if source is self._source:
            return
        for name, one in self._held.items():
            back = sorted(range(len(one.order)), key=one.order.__getitem__)
            one.parameter.data = source[name].permute(back)
        self._source = source


def expert_tensors(module: Any) -> ExpertTensors:
    """Those of a ``RoutedExperts`` whose weights are in their final layout.

    Raises EngineStartError where a weight has no leading expert axis, or memory of its own that is not dense: such a
    quantisation's experts cannot be moved one by one.
    """
    experts = module.local_num_experts
    held: dict[str, _Held] = {}
    for name, parameter in module.named_parameters(recurse=False):
        if name in ROUTERS:
            continue
        data: Tensor = parameter.data
        if data.dim() and data.shape[0] == experts and data.stride(0) != 0:
            held[name] = _Held(parameter, _memory_order(module.layer_name, name, data))
        elif name.endswith("weight") and data.numel() > 1:
            raise EngineStartError(
                f"{name} of {module.layer_name} has the shape {tuple(data.shape)} after "
                f"{type(module.quant_method).__name__} packed it; a leading axis of {experts} experts was expected",
                remedy="use another quantisation or --moe-backend, or unset the offload variables",
            )
    if not held:
        raise EngineStartError(f"{module.layer_name} holds no tensor with an axis of {experts} experts")
    return ExpertTensors(held)


def _memory_order(layer: str, name: str, data: Tensor) -> tuple[int, ...]:
    inner = sorted(range(1, data.dim()), key=lambda axis: (-data.stride(axis), axis))
    order = (0, *inner)
    if not data.permute(order).is_contiguous():
        raise EngineStartError(
            f"{name} of {layer} is laid out with gaps (shape {tuple(data.shape)}, strides {data.stride()}): its "
            "experts cannot be moved one by one",
            remedy="use another quantisation or --moe-backend, or unset the offload variables",
        )
    return order
