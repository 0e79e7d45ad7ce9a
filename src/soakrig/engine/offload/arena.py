"""Device rows: all slots of the layers that share a row shape, and the staging rows behind them, in one tensor each.

One tensor for both means that an expert kernel takes one base pointer and row numbers, wherever an expert is.
"""

from __future__ import annotations

import torch
from torch import Tensor

RowShapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Arena:
    """``tensors``: name -> [slots + staging, *row shape]. ``staging_row``: the first staging row.

    Allocated whole, once: no row ever moves, so that a captured graph stays true.
    """

    def __init__(self, shapes: RowShapes, slots: int, staging: int, device: torch.device) -> None:
        self.slots = slots
        self.staging = staging
        # Zeroed: a row that was never fetched must not hold a NaN that a masked product would spread.
        self.tensors: dict[str, Tensor] = {
            name: torch.zeros((slots + staging, *shape), dtype=dtype, device=device)
            for name, (dtype, shape) in shapes.items()
        }

    @property
    def staging_row(self) -> int:
        return self.slots

    @property
    def row_bytes(self) -> int:
        return sum(tensor.shape[1:].numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Bytes of device memory, slots and staging."""
        return (self.slots + self.staging) * self.row_bytes
