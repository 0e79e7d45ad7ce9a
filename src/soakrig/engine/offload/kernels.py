"""Triton kernel of the gather: rows of a bank in host memory into rows of device memory, by ids on the device.

A captured graph can hold it: its shape does not depend on the ids, and the host waits for nothing. It copies integers
of the widest size that a row allows, whatever the parameter's type. ``TRITON_INTERPRET=1``, set before the first
import of triton, runs it on the CPU (for tests only: slow); the kernel of the bookkeeping is in ``assign_kernel.py``.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

WIDE = 16
"""Bytes of the widest load and store of a thread: 128 bits."""
BLOCK_BYTES = 8192
"""Bytes a program copies at a time: four 128-bit loads in flight for each of its 128 threads."""
PROGRAMS = 64
"""Programs to a row, at most: one row alone keeps 512 KiB in flight, which covers the latency of a host link (some
1 us at 400 GB/s); an entry of the list that asks for nothing costs no more than these."""
INTERPRETED_BLOCK = 65536
"""Elements a program copies at a time under the interpreter, where a program costs 2 ms and its elements little."""
_INTEGERS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit(
    do_not_specialize=["experts", "out_rows", "row_units", "bank_units", "out_units"],
    do_not_specialize_on_alignment=["src_ptr", "dst_ptr", "bad_ptr"],
)
def gather_kernel(
    bank_ptr: tl.tensor,
    out_ptr: tl.tensor,
    src_ptr: tl.tensor,
    dst_ptr: tl.tensor,
    bad_ptr: tl.tensor,
    experts: tl.tensor,
    out_rows: tl.tensor,
    row_units: tl.tensor,
    bank_units: tl.tensor,
    out_units: tl.tensor,
    UNIT: tl.constexpr,  # noqa: N803 - constants of a kernel are written so
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Copy row ``src[i]`` of the bank to row ``dst[i]`` of ``out``; grid (ids, programs to a row).

    Lengths are in units of ``UNIT`` elements: the row, and from one row to the next in the bank and in ``out``. Two
    elements of 8 bytes tell the compiler that every row starts at a multiple of 16 bytes. See ``gather`` for the ids.
    """
    entry = tl.program_id(0)
    src = tl.load(src_ptr + entry)
    dst = tl.load(dst_ptr + entry)
    src_inside = (src >= 0) & (src < experts)
    dst_inside = (dst >= 0) & (dst < out_rows)
    src_bad = (src < -1) | (src > experts)
    dst_bad = src_inside & ((dst < -1) | (dst >= out_rows))
    if (tl.program_id(1) == 0) & (src_bad | dst_bad):
        tl.atomic_add(bad_ptr, 1)
    copied = src_inside & dst_inside
    # The address is clamped as well as masked: no address outside the two tensors is ever formed.
    from_row = bank_ptr + tl.where(copied, src, 0).to(tl.int64) * bank_units * UNIT
    to_row = out_ptr + tl.where(copied, dst, 0).to(tl.int64) * out_units * UNIT
    length = tl.where(copied, row_units * UNIT, 0)
    for start in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < length
        tl.store(to_row + offset, tl.load(from_row + offset, mask=inside), mask=inside)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter on the CPU, as ``TRITON_INTERPRET=1`` asks."""
    return bool(knobs.runtime.interpret)


def on_device(tensor: Tensor) -> Any:
    """A context in which kernels are launched on the device of ``tensor`` (nothing to do on the CPU)."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def gather(bank: Tensor, out: Tensor, src: Tensor, dst: Tensor, bad: Tensor) -> None:
    """``out[dst[i]] = bank[src[i]]`` for every i, on the device and without waiting for it.

    ``bank`` [experts, *row], in device memory or pinned host memory; ``out`` [rows, *row], same type; the rows of both
    contiguous, the tensors themselves not necessarily; a row has less than 2**30 elements. ``src``, ``dst`` [n] int32
    or int64 on the device. -1 and ``experts`` are sentinels in ``src``, -1 is one in ``dst``: skipped. Any other id out
    of range is skipped and counted once in ``bad`` [1] int64, never used as an address. Two entries must not name one
    row of ``out``. ValueError where the tensors do not fit together. Triton compiles on the first call for an
    alignment: call once before a graph is captured.
    """
    if bank.dtype != out.dtype or bank.shape[1:] != out.shape[1:]:
        raise ValueError(
            f"gather copies rows of one kind; the bank has {bank.dtype} {list(bank.shape[1:])}, "
            f"the output {out.dtype} {list(out.shape[1:])}"
        )
    if src.shape != dst.shape or src.dim() != 1 or not (src.is_contiguous() and dst.is_contiguous()):
        raise ValueError(f"gather takes two contiguous lists of one length, got {list(src.shape)}, {list(dst.shape)}")
    if not bank.is_cuda and out.is_cuda and not bank.is_pinned():
        raise ValueError("gather reads the bank from the device: host memory has to be pinned first")
    row = bank.element_size() * math.prod(bank.shape[1:])
    if not (src.numel() and row and bank.shape[0] and out.shape[0]):
        # Empty tensors have no address; ids into them are nobody's rows, and nothing can ask for them.
        if src.numel() and row:
            raise ValueError(f"gather needs rows on both sides, got {bank.shape[0]} and {out.shape[0]}")
        return
    size, bank_rows, out_rows = _widest(bank, out, row)
    unit = WIDE // size if row % WIDE == 0 and _aligned(bank_rows, out_rows) else 1
    length = row // size
    block = min(INTERPRETED_BLOCK, 1 << (length - 1).bit_length()) if interpreted() else BLOCK_BYTES // size
    grid = (src.numel(), min(triton.cdiv(length, block), PROGRAMS))
    with on_device(out):
        launch: Any = gather_kernel[grid]
        launch(
            bank_rows, out_rows, src, dst, bad, bank.shape[0], out.shape[0],
            length // unit, bank_rows.stride(0) // unit, out_rows.stride(0) // unit, UNIT=unit, BLOCK=block,
        )  # fmt: skip


def _widest(bank: Tensor, out: Tensor, row: int) -> tuple[int, Tensor, Tensor]:
    """Both tensors as [rows, n] integers of the widest size that divides rows, distances and addresses."""
    flat = [_rows(tensor) for tensor in (bank, out)]
    common = math.gcd(row, *(number for tensor in flat for number in _places(tensor)))
    size, dtype = next((size, dtype) for size, dtype in _INTEGERS if common % size == 0)
    return size, flat[0].view(dtype), flat[1].view(dtype)


def _rows(tensor: Tensor) -> Tensor:
    """[rows, *row] as [rows, bytes], without a copy."""
    if not tensor[0].is_contiguous():
        raise ValueError(f"gather copies contiguous rows, got shape {list(tensor.shape)}, stride {tensor.stride()}")
    length = math.prod(tensor.shape[1:])
    pitch = tensor.stride(0) if tensor.shape[0] > 1 else length
    return tensor.as_strided((tensor.shape[0], length), (pitch, 1)).view(torch.uint8)


def _places(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.data_ptr(), int(tensor.storage_offset()), tensor.stride(0)


def _aligned(*tensors: Tensor) -> bool:
    return all(
        tensor.data_ptr() % WIDE == 0 and tensor.stride(0) * tensor.element_size() % WIDE == 0 for tensor in tensors
    )
