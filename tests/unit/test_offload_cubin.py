"""The Triton kernels compiled for real cards, without one: what the wrappers launch is compiled, not a copy of it.

A driver that only names its target stands in for the card. Triton works out signature, alignment and variant from the
tensors that it is given, as at a launch, and its own ptxas makes the cubin.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from soakrig.engine.offload import assign_kernel, kernels
from soakrig.engine.offload.bookkeeping import FETCHES
from soakrig.engine.offload.counters import COUNTERS
from soakrig.engine.offload.policy import Policy

CARDS = [90, 100, 120]
WIDE_ACCESS = r"{}\.global(?:\.\w+)*\.(?:v2\.b64|v4\.b32)\b"
OBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class NamedTarget:
    """As much of a driver as a compilation asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled under the device's number

    def get_current_stream(self, _device: int) -> int:
        return 0


class Compiled:
    """Takes a kernel's place: compiles what would be launched and keeps it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.results: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._compile, grid)

    def _compile(self, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
        self.results.append(self.kernel.warmup(*arguments, grid=grid, **options))


@pytest.fixture(autouse=True)
def nothing_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as patch:
        for module, name in ((kernels, "gather_kernel"), (assign_kernel, "assign_kernel")):
            patch.setattr(module, name, Compiled(getattr(module, name)))
        kernel_caches = [module.kernel.device_caches for module in (kernels.gather_kernel, assign_kernel.assign_kernel)]
        for cache in kernel_caches:
            cache.clear()
        patch.setattr(triton.runtime.driver, "_active", None)
        yield
        for cache in kernel_caches:
            cache.clear()


def compiled_gather(capability: int, dtype: torch.dtype, row: int, shift: int = 0) -> Any:
    """The kernel of a gather of rows of ``row`` elements, ``shift`` elements off a multiple of 64 bytes."""
    triton.runtime.driver.set_active(NamedTarget(capability))
    bank, out = (torch.zeros(4 * row + shift, dtype=dtype)[shift:].view(4, row) for _ in range(2))
    ids = torch.zeros(2, dtype=torch.int32)
    kernels.gather(bank, out, ids, ids, torch.zeros(1, dtype=torch.int64))
    (result,) = kernels.gather_kernel.results
    return result


def compiled_assign(
    capability: int,
    policy: Policy,
    pairs: int,
    slots: int,
    ids: torch.dtype,
    *,
    key_base: int = 16,
    first_row: int = 17,
    staging_row: int = 500,
    shift: int = 0,
) -> Any:
    """The kernel of a layer-step; ``shift``: elements that every array is off alignment."""
    triton.runtime.driver.set_active(NamedTarget(capability))
    int32, int64 = torch.int32, torch.int64

    def array(length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length + shift, dtype=dtype)[shift:]

    state = [array(slots, int32), array(300, int32), array(slots, int64), array(slots, int64), array(slots, int32)]
    found = [array(pairs, ids), array(pairs, ids), array(FETCHES, int32), array(FETCHES, int32)]
    figures = [array(len(COUNTERS), int64), array(256, int64), array(64, torch.uint8)]
    numbers = (int(policy), first_row, staging_row)
    assign_kernel.assign(array(pairs, ids), 8, 256, key_base, *state, array(2, int64), *numbers, *found, *figures)
    (result,) = assign_kernel.assign_kernel.results
    return result


def check_cubin(result: Any, capability: int, tmp_path: Path) -> str:
    """The kernel is a cubin of this very architecture; its PTX."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(result.asm["cubin"])
    listed = subprocess.run([OBJDUMP, "-lelf", cubin], capture_output=True, text=True, check=True).stdout
    assert re.search(rf"sm_{capability}a?\.cubin", listed), listed
    ptx = result.asm["ptx"]
    assert re.search(rf"^\.target sm_{capability}a?$", ptx, flags=re.MULTILINE)
    return ptx


def accesses(ptx: str, kind: str) -> set[str]:
    return set(re.findall(rf"\b{kind}\.global[.\w]*", ptx))


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize(
    ("dtype", "row"), [(torch.uint8, 16), (torch.bfloat16, 7 * 8), (torch.float8_e4m3fn, 48), (torch.int64, 4096)]
)
def test_rows_of_whole_16_bytes_move_128_bits_at_a_time(
    capability: int, dtype: torch.dtype, row: int, tmp_path: Path
) -> None:
    ptx = check_cubin(compiled_gather(capability, dtype, row), capability, tmp_path)
    assert re.search(WIDE_ACCESS.format("ld"), ptx)
    assert re.search(WIDE_ACCESS.format("st"), ptx)


def test_row_offsets_have_64_bits() -> None:
    """A bank has more than 2**31 elements."""
    ttir = compiled_gather(90, torch.uint8, 33).asm["ttir"]
    for name in ("bank_ptr", "out_ptr"):
        assert re.search(rf"tt\.addptr %{name}, %\w+ : !tt\.ptr<i8>, i64", ttir), ttir


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize(
    ("dtype", "row", "shift", "width"),
    [
        (torch.uint8, 4096, 8, "b64"),
        (torch.uint8, 24, 0, "b64"),
        (torch.float16, 4096, 2, "b32"),
        (torch.uint8, 20, 0, "b32"),
        (torch.bfloat16, 7, 0, "b16"),
        (torch.uint8, 4096, 1, "b8"),
        (torch.uint8, 33, 0, "b8"),
    ],
)
def test_other_rows_move_as_wide_as_they_allow(
    capability: int, dtype: torch.dtype, row: int, shift: int, width: str, tmp_path: Path
) -> None:
    ptx = check_cubin(compiled_gather(capability, dtype, row, shift), capability, tmp_path)
    assert accesses(ptx, "st") == {f"st.global.{width}"}
    assert accesses(ptx, "ld") == {"ld.global.b32", f"ld.global.{width}"}  # b32: the ids


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("policy", Policy, ids=lambda policy: policy.name.lower())
@pytest.mark.parametrize(
    ("pairs", "slots", "ids"), [(8, 64, torch.int64), (64, 256, torch.int32), (16, 8400, torch.int64)]
)
def test_the_books_compile_and_load_all_before_they_store(
    capability: int, policy: Policy, pairs: int, slots: int, ids: torch.dtype, tmp_path: Path
) -> None:
    """One warp may run ahead of another: between the last load and the first store all of them meet."""
    ptx = check_cubin(compiled_assign(capability, policy, pairs, slots, ids), capability, tmp_path)
    order = re.findall(r"\b(?:(ld)\.global|(st)\.global|(bar)\.sync|(atom|red)\.global)", ptx)
    kinds = ["".join(found) for found in order]
    assert set(kinds) == {"ld", "st", "bar"}
    last_load, first_store = len(kinds) - 1 - kinds[::-1].index("ld"), kinds.index("st")
    assert "bar" in kinds[last_load:first_store]


def test_frozen_slots_need_no_search(tmp_path: Path) -> None:
    """Every policy is one kernel there, whatever the slots."""
    frozen = check_cubin(compiled_assign(90, Policy.CLOCK, 8, 8400, torch.int64, staging_row=-1), 90, tmp_path)
    assign_kernel.assign_kernel.results.clear()
    static = check_cubin(compiled_assign(90, Policy.STATIC, 8, 64, torch.int64), 90, tmp_path)
    assert frozen == static


def test_layers_share_one_compiled_kernel() -> None:
    """Numbers and addresses that differ from layer to layer make no new variant."""
    caches = assign_kernel.assign_kernel.kernel.device_caches
    for slots, key_base, first_row, staging_row, shift in ((64, 0, 0, 1, 0), (50, 1, 1, 512, 1), (49, 16, 37, 0, 2)):
        assign_kernel.assign_kernel.results.clear()
        numbers = {"key_base": key_base, "first_row": first_row, "staging_row": staging_row}
        compiled_assign(90, Policy.LRU, 8, slots, torch.int64, shift=shift, **numbers)
    assert len(caches[90][0]) == 1
