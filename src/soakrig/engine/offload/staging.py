"""Moves rows from a bank into device rows: the gather of small layer-steps, the copies of large ones.

On the CPU both are one compiled loop over bytes (measured beside ``torch.index_select`` in
``benchmarks/offload_cpu.py``). On CUDA the gather is a Triton kernel that reads its ids on the device, so that a graph
can hold it; large steps may wait for the host and take the copy engine, which reads host memory faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arena import Arena
from .bank import Bank
from .jit import compiled
from .slots import Native, native


@compiled
def copy_rows(bank: Any, out: Any, src: Any, dst: Any, bad: Any) -> None:
    """``out[dst[i]] = bank[src[i]]`` for bytes [experts, n] and [rows, n]; ids as in ``kernels.gather``.

    -1 and the number of experts are sentinels in ``src``, -1 is one in ``dst``: skipped. Any other number out of range
    is skipped and counted in ``bad[0]``, never used as an index.
    """
    for i in range(src.size):
        expert = src[i]
        row = dst[i]
        if expert in {-1, bank.shape[0]}:
            continue
        if expert < 0 or expert > bank.shape[0] or row < -1 or row >= out.shape[0]:
            bad[0] += 1
            continue
        if row == -1:
            continue
        for byte in range(bank.shape[1]):
            out[row, byte] = bank[expert, byte]


class Staging:
    """Fetches rows of one bank into its arena. ``bad`` [1] int64 counts ids that the gather refused."""

    def __init__(self, bank: Bank, arena: Arena, bad: Tensor) -> None:
        self._bank = bank
        self._arena = arena
        self._bad = bad
        self._bad_native = native(bad)
        self._cuda = bad.is_cuda
        if not self._cuda:
            self._bytes = [
                (_bytes(tensor).numpy(), _bytes(arena.tensors[name]).numpy()) for name, tensor in bank.host.items()
            ]

    def gather(self, src: Native, dst: Native) -> None:
        """Fetch the rows of a fetch list: ``src``, ``dst`` [n] int32, native; -1 where there is nothing."""
        if self._cuda:
            from .kernels import gather

            for name, tensor in self._bank.host.items():
                gather(tensor, self._arena.tensors[name], src, dst, self._bad)
            return
        for bank, out in self._bytes:
            copy_rows(bank, out, src, dst, self._bad_native)

    def copy(self, experts: Sequence[int], first_row: int) -> None:
        """Fetch checked ``experts`` (ascending) into the rows from ``first_row`` on: the host knows them.

        Runs of neighbours go as one copy each.
        """
        if not self._cuda:
            rows = np.arange(first_row, first_row + len(experts), dtype=np.int32)
            self.gather(np.array(experts, dtype=np.int32), rows)
            return
        for start, stop in _runs(experts):
            low, row = experts[start], first_row + start
            for name, tensor in self._bank.host.items():
                out = self._arena.tensors[name][row : row + stop - start]
                out.copy_(tensor[low : low + stop - start], non_blocking=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape[0], tensor.shape[1:].numel()).view(torch.uint8)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Places ``start``..``stop`` whose numbers follow each other without a gap."""
    cuts = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1), len(numbers)]
    return [(a, b) for a, b in pairwise(cuts) if b > a]
