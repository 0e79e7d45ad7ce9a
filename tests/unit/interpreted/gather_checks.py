"""The gather against torch indexing, in Triton's interpreter: run by ``test_offload_kernels.py`` in a child process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soakrig.engine.offload import kernels
from soakrig.engine.offload.kernels import gather, interpreted

DTYPES = [
    torch.int64, torch.int32, torch.uint8, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
ROWS = [(1,), (3,), (16,), (5, 7), (2, 4, 4), ()]
GUARD = 0xA5
WILD = [-2, -7, -(2**31), 2**31 - 1]
"""Ids far from any row; 9 and the like, just behind the last, come from the ranges."""


def guarded(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, *, shift: int = 0, gap: int = 0
) -> tuple[Tensor, Tensor]:
    """Random rows amid guard bytes, and the whole buffer: ``shift`` bytes off alignment, ``gap`` elements between rows.

    A row that is read or written just outside shows: the guard is three rows wide on either side.
    """
    row = math.prod(shape) * dtype.itemsize
    pitch = row + gap * dtype.itemsize
    edge = -(-3 * pitch // 64) * 64 + shift
    buffer = torch.full((edge + count * pitch + 3 * pitch,), GUARD, dtype=torch.uint8)
    rows = buffer[edge : edge + count * pitch].view(count, pitch)[:, :row]
    rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8))
    typed = buffer[edge : edge + count * pitch].view(dtype).view(count, -1)[:, : math.prod(shape)]
    return typed.unflatten(1, shape) if shape else typed.squeeze(1), buffer


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(tensor.shape[0], -1).view(torch.uint8)


def check(
    bank: Tensor, out: Tensor, buffers: tuple[Tensor, Tensor], src: list[int], dst: list[int], ids: torch.dtype
) -> None:
    """Gather, and compare every byte of both buffers with what torch indexing makes of the ids."""
    experts, rows = bank.shape[0], out.shape[0]
    asked = [(s, d) for s, d in zip(src, dst, strict=True) if s not in (-1, experts)]
    inside = [(s, d) for s, d in asked if 0 <= s < experts]
    good = [(s, d) for s, d in inside if 0 <= d < rows]
    bad = len(asked) - len(inside) + sum(d != -1 and not 0 <= d < rows for _, d in inside)
    bank_before, whole_before = buffers[0].clone(), buffers[1].clone()
    want = as_bytes(out).clone()
    if good:
        from_rows, to_rows = (torch.tensor(numbers) for numbers in zip(*good, strict=True))
        want[to_rows] = as_bytes(bank)[from_rows]
    counted = torch.full((1,), 5, dtype=torch.int64)
    gather(bank, out, torch.tensor(src, dtype=ids), torch.tensor(dst, dtype=ids), counted)
    assert torch.equal(as_bytes(out), want)
    assert int(counted) == 5 + bad
    assert torch.equal(buffers[0], bank_before)
    # What lies between and around the rows is as it was.
    outside = torch.ones_like(whole_before, dtype=torch.bool)
    place = out.data_ptr() - buffers[1].data_ptr()
    length = want.shape[1]
    for row in range(rows):
        start = place + row * out.stride(0) * out.element_size()
        outside[start : start + length] = False
    assert torch.equal(buffers[1][outside], whole_before[outside])
    assert bool((buffers[1][outside] == GUARD).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_every_type_and_row_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    bank, bank_buffer = guarded(6, shape, dtype)
    out, out_buffer = guarded(5, shape, dtype)
    check(bank, out, (bank_buffer, out_buffer), [3, 0, -1, 6, 5, 3], [0, 4, 1, 2, -1, 2], torch.int32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("wild", "other"), [(wild, 0) for wild in [*WILD, 7]] + [(0, wild) for wild in [*WILD, 4, 5]])
def test_ids_out_of_range_touch_nothing_and_count_once(dtype: torch.dtype, wild: int, other: int) -> None:
    bank, bank_buffer = guarded(6, (24,), torch.uint8)
    out, out_buffer = guarded(4, (24,), torch.uint8)
    check(bank, out, (bank_buffer, out_buffer), [wild, 2], [other, 1], dtype)


@pytest.mark.parametrize("wild", [2**40, -(2**40), 2**63 - 1, -(2**63)])
def test_ids_beyond_32_bits(wild: int) -> None:
    bank, bank_buffer = guarded(6, (24,), torch.uint8)
    out, out_buffer = guarded(4, (24,), torch.uint8)
    check(bank, out, (bank_buffer, out_buffer), [wild, 2, 1], [0, wild, 3], torch.int64)


@pytest.mark.parametrize("programs", [1, 3, 64])
@pytest.mark.parametrize("block", [16, 32])
def test_a_row_of_many_blocks_is_whole(monkeypatch: pytest.MonkeyPatch, programs: int, block: int) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    monkeypatch.setattr(kernels, "INTERPRETED_BLOCK", block)
    for elements in (127, 128, 129):
        bank, bank_buffer = guarded(3, (elements,), torch.int64)
        out, out_buffer = guarded(2, (elements,), torch.int64)
        check(bank, out, (bank_buffer, out_buffer), [2, 0, 4, 1], [0, 1, -1, 2], torch.int32)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_layout_any_ids(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = (data.draw(st.integers(1, 70)),)
    experts, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    shift = data.draw(st.sampled_from([0, 1, 2, 3, 4, 8])) * dtype.itemsize
    bank, bank_buffer = guarded(experts, shape, dtype, shift=shift, gap=data.draw(st.integers(0, 3)))
    out, out_buffer = guarded(rows, shape, dtype, shift=shift, gap=data.draw(st.integers(0, 3)))
    src = data.draw(st.lists(st.one_of(st.integers(-2, experts + 2), st.sampled_from(WILD)), min_size=1, max_size=8))
    places = data.draw(st.permutations(range(-2, rows + 2)))
    dst = [places[i] if i < len(places) else -1 for i in range(len(src))]
    check(bank, out, (bank_buffer, out_buffer), src, dst, data.draw(st.sampled_from([torch.int32, torch.int64])))


def test_an_empty_list_copies_nothing() -> None:
    bank, bank_buffer = guarded(2, (8,), torch.int64)
    out, out_buffer = guarded(2, (8,), torch.int64)
    check(bank, out, (bank_buffer, out_buffer), [], [], torch.int32)


def test_this_process_runs_the_interpreter() -> None:
    assert interpreted()
