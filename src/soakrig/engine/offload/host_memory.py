"""Host memory of exactly the size asked for, page-locked for CUDA without a caching allocator in between.

PyTorch's pinned allocator rounds every request up to a power of two (one operator measured 33.8 GiB resident for 19.0
GiB of weights, and 21.5 GiB with exact sizes). Here each allocation is an anonymous mapping of its own, registered
with ``cudaHostRegister`` (CUDA Runtime API, Memory Management) at its own size.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soakrig.errors import EngineStartError

_PORTABLE_AND_MAPPED = 0x01 | 0x02  # cudaHostRegisterPortable | cudaHostRegisterMapped
_PAGE = mmap.PAGESIZE


@dataclass
class _Region:
    memory: mmap.mmap
    address: int
    asked: int
    pinned: bool = False


@dataclass
class HostMemory:
    """The allocations of one bank. ``pin`` is for CUDA only; ``close`` gives the page locks back."""

    regions: list[_Region] = field(default_factory=list[_Region])

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous CPU tensor in a mapping of its own, page aligned; its content is not defined."""
        asked = math.prod(shape) * dtype.itemsize
        memory = mmap.mmap(-1, max(asked, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.regions.append(_Region(memory, address, asked))
        if asked == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=torch.uint8, count=asked).view(dtype).view(shape)

    def pin(self) -> None:
        """Lock every allocation in memory and map it for the device. Raises EngineStartError."""
        runtime: Any = torch.cuda.cudart()
        for region in self.regions:
            if region.pinned or region.asked == 0:
                continue
            status = int(runtime.cudaHostRegister(region.address, region.asked, _PORTABLE_AND_MAPPED))
            if status != 0:
                raise EngineStartError(
                    f"cudaHostRegister of {region.asked} bytes of expert weights failed with CUDA error {status}, "
                    f"after {self.pinned} bytes were locked",
                    remedy="lower CPU_OFFLOAD_GB, or raise the limit of locked memory (ulimit -l)",
                )
            region.pinned = True

    @property
    def asked(self) -> int:
        """Bytes of all tensors together."""
        return sum(region.asked for region in self.regions)

    @property
    def pinned(self) -> int:
        """Bytes that are page-locked."""
        return sum(region.asked for region in self.regions if region.pinned)

    def resident(self) -> int:
        """Bytes of these mappings that are in memory now (``Rss`` in ``/proc/self/smaps``, see proc(5)).

        The kernel merges neighbouring anonymous mappings; of one that is shared with others, our part is at most what
        our pages cover.
        """
        total = 0
        spans = [(r.address, r.address + -(-r.asked // _PAGE) * _PAGE) for r in self.regions if r.asked]
        low = high = rss = 0
        for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
            head = line.split(maxsplit=2)
            if "-" in head[0] and not head[0].endswith(":"):
                low, high = (int(part, 16) for part in head[0].split("-"))
            elif head[0] == "Rss:":
                rss = int(head[1]) * 1024
                ours = sum(max(0, min(high, stop) - max(low, start)) for start, stop in spans)
                total += min(rss, ours)
        return total

    def close(self) -> None:
        """Unlock what ``pin`` locked. The tensors stay readable on the host."""
        for region in self.regions:
            if region.pinned:
                runtime: Any = torch.cuda.cudart()
                runtime.cudaHostUnregister(region.address)
                region.pinned = False


def device_view(pinned: Tensor, device: torch.device) -> Tensor:
    """``pinned`` host memory as a tensor of ``device``: read over the bus in place (UVA), nothing is copied.

    Goes through ``__cuda_array_interface__`` (Numba's specification, version 3), which torch takes for any pointer that
    the driver knows; registered memory is known. On the CPU it is the tensor itself.
    """
    if device.type == "cpu":
        return pinned
    return torch.as_tensor(_HostPointer(pinned), device=device).view(pinned.dtype).view(pinned.shape)


class _HostPointer:
    def __init__(self, tensor: Tensor) -> None:
        self._keep = tensor
        size = tensor.numel() * tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3,
        }  # fmt: skip
