"""The expert bank: all routed experts of one layer in host memory, every parameter that has an expert axis."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from soakrig.errors import EngineStartError

from .host_memory import HostMemory, device_view


class Bank:
    """One layer's experts. A *row* is all parameters of one expert: weights, scales, zero points, at their own sizes.

    ``parameters``: name -> [experts, ...] on any device; they are copied into exact-size host memory here.

    Raises EngineStartError where a parameter does not have the layer's number of experts in front.
    """

    def __init__(self, layer: int, experts: int, parameters: Mapping[str, Tensor], memory: HostMemory) -> None:
        self.layer = layer
        self.experts = experts
        self.memory = memory
        self.host: dict[str, Tensor] = {}
        for name, tensor in check_parameters(layer, experts, parameters).items():
            home = memory.empty(tuple(tensor.shape), tensor.dtype)
            home.copy_(tensor)
            self.host[name] = home
        self._device: dict[str, Tensor] | None = None

    @property
    def row_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> type and shape of one expert's part: layers that agree in it can share device rows."""
        return {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in self.host.items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(row_bytes(tensor) for tensor in self.host.values())

    def in_place(self, device: torch.device) -> dict[str, Tensor]:
        """The parameters as the device reads them where they are; on CUDA only once the memory is pinned."""
        if self._device is None:
            self._device = {name: device_view(tensor, device) for name, tensor in self.host.items()}
        return self._device


def row_bytes(parameter: Tensor) -> int:
    """Bytes of one expert's part of a parameter [experts, ...]."""
    return parameter[0].numel() * parameter.element_size()


def check_parameters(layer: int, experts: int, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters, contiguous. Raises EngineStartError where one has no axis of ``experts`` in front."""
    if not parameters:
        raise EngineStartError(f"layer {layer} came without expert parameters; at least one was expected")
    for name, tensor in parameters.items():
        if tensor.dim() < 1 or tensor.shape[0] != experts:
            raise EngineStartError(
                f"parameter {name} of layer {layer} has the shape {tuple(tensor.shape)}; an expert axis of {experts} "
                "in front was expected"
            )
    return {name: tensor.contiguous() for name, tensor in parameters.items()}
