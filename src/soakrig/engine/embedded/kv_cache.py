"""The paged KV cache's memory: keys and values of every layer in blocks of a fixed number of tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .config import HEAD_DIM, EngineConfig


class KVCache:
    """[layers, 2, blocks * block size, kv heads, head dim]; token ``i`` of block ``b`` has slot ``b * size + i``."""

    def __init__(self, config: EngineConfig) -> None:
        self.block_size = config.block_size
        self.device = torch.device(config.device)
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        slots = config.blocks * config.block_size
        self._data = torch.zeros((config.layers, 2, slots, config.kv_heads, HEAD_DIM), dtype=dtype, device=self.device)
        self._by_block = self._data.view(config.layers, 2, config.blocks, -1)

    @property
    def bytes(self) -> int:
        return self._data.numel() * self._data.element_size()

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` [tokens, kv heads, head dim] at ``slots`` [tokens] int64."""
        self._data[layer, 0].index_copy_(0, slots, keys)
        self._data[layer, 1].index_copy_(0, slots, values)

    def read(self, layer: int, table: BlockTable, length: int) -> tuple[Tensor, Tensor]:
        """The first ``length`` tokens of a sequence: keys and values, [kv heads, length, head dim] each.

        Blocks that lie side by side are read in place; others are gathered.
        """
        if table.first >= 0:
            start = table.first * self.block_size
            both = self._data[layer, :, start : start + length]
        else:
            kv_heads, head_dim = self._data.shape[3:]
            gathered = self._by_block[layer].index_select(1, table.blocks)
            both = gathered.view(2, -1, kv_heads, head_dim)[:, :length]
        keys_values = both.transpose(1, 2)
        return keys_values[0], keys_values[1]


class BlockTable:
    """A sequence's blocks as the model reads them in one step."""

    def __init__(self, blocks: list[int], device: torch.device) -> None:
        contiguous = blocks[-1] - blocks[0] == len(blocks) - 1 and all(
            after - before == 1 for before, after in pairwise(blocks)
        )
        self.first = blocks[0] if contiguous else -1
        self.blocks = torch.tensor([] if contiguous else blocks, dtype=torch.int64, device=device)
