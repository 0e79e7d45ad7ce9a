"""The card: fit, who holds the rest, foreign processes, and versions known to be bad; NVML's facts are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from faked_machine import CARD_BYTES, CPU_VLLM, FORK, GIB, MIB, card, embedded, fake_machine, glm53, without_gpu
from soakrig.engine.preflight.gpu import cards_of, check_gpu_process, check_vram, wants_gpu
from soakrig.engine.preflight.machine import GpuFacts, Holder, Machine, Serving
from soakrig.engine.preflight.versions import Bad, check_versions, cuda_version, driver_version, table
from soakrig.engine.vllm.installation import Installation

NEED = 0.95 * CARD_BYTES


def test_the_seeds_fit_is_to_the_byte(tmp_path: Path) -> None:
    free = CARD_BYTES - int(CARD_BYTES - NEED)
    assert free >= NEED
    fits = fake_machine(tmp_path, cards=(card(used=CARD_BYTES - free),))
    assert check_vram(glm53(), fits).state == "ok"
    short = fake_machine(tmp_path, cards=(card(used=CARD_BYTES - free + 1),))
    found = check_vram(glm53(), short)
    assert found.state == "refused"
    assert (round(found.needs or 0, 2), round(found.has or 0, 2)) == (90.82, 90.82)


def test_who_holds_the_rest_is_named(tmp_path: Path) -> None:
    holders = (Holder(4177, "python3", 30 * GIB), Holder(812, "Xorg", 200 * MIB, compute=False))
    machine = fake_machine(tmp_path, cards=(card(used=33 * GIB, holders=holders),))
    machine = replace(machine, serving=(Serving("flash", 4100, "main", frozenset({4100, 4177})),))
    found = check_vram(glm53(), machine)
    for part in ("90.8 GiB needed (0.95 of 95.6 GiB)", "62.6 GiB free", "pid 4177 (python3) 30.0 GiB of flash",
                 "pid 812 (Xorg)", "2.8 GiB held by no process shown"):  # fmt: skip
        assert part in found.text
    assert found.remedy


def test_a_second_process_on_the_card(tmp_path: Path) -> None:
    display = Holder(812, "Xorg", 200 * MIB, compute=False)
    assert check_gpu_process(glm53(), fake_machine(tmp_path, cards=(card(holders=(display,)),))).state == "ok"
    busy = fake_machine(tmp_path, cards=(card(holders=(display, Holder(4177, "python3", 1 * GIB))),))
    found = check_gpu_process(glm53(), busy)
    assert (found.state, found.needs, found.has) == ("refused", 0, 1)
    assert "1 on the card, 0 expected: pid 4177 (python3)" in found.text
    silent = fake_machine(tmp_path, cards=(card(holders=None),))
    assert check_gpu_process(glm53(), silent).state == "unknown"


def test_what_nvml_does_not_tell_is_unknown(tmp_path: Path) -> None:
    machine = without_gpu(fake_machine(tmp_path), "NVML did not answer within 30 s")
    for check in (check_vram, check_gpu_process, check_versions):
        found = check(glm53(), machine)
        assert (found.state, found.text) == ("unknown", "NVML did not answer within 30 s")
    assert check_vram(glm53(), fake_machine(tmp_path, cards=(card(used=None),))).state == "unknown"
    assert check_vram(glm53(gpu_memory_utilization=None), fake_machine(tmp_path)).state == "unknown"
    assert check_vram(glm53(), fake_machine(tmp_path, cards=())).state == "unknown"


def test_who_needs_no_card_is_not_asked_for_one(tmp_path: Path) -> None:
    machine = without_gpu(fake_machine(tmp_path, installation=CPU_VLLM), "no NVML")
    assert not wants_gpu(glm53(), machine)
    assert check_vram(glm53(), machine).state == check_versions(glm53(), machine).state == "ok"
    assert check_vram(embedded(), machine).state == "ok"
    assert wants_gpu(embedded(flags=("--device=cuda",)), machine)


def two(tmp_path: Path, *, alike: bool, caller: dict[str, str]) -> Machine:
    second = card(index=1) if alike else card(index=1, name="NVIDIA GeForce RTX 3090")
    machine = fake_machine(tmp_path, cards=(card(), second))
    return replace(machine, caller={**machine.caller, **caller})


@pytest.mark.parametrize(
    ("alike", "caller", "expected"),
    [
        (True, {}, [0]),
        (True, {"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        (True, {"CUDA_VISIBLE_DEVICES": "GPU-11"}, [1]),
        (True, {"CUDA_VISIBLE_DEVICES": "7"}, "none of the cards"),
        (True, {"CUDA_VISIBLE_DEVICES": "GPU"}, "several of the cards"),
        (True, {"CUDA_VISIBLE_DEVICES": "-1"}, "no card is visible"),
        (False, {}, "which of the 2 unlike cards"),
        (False, {"CUDA_VISIBLE_DEVICES": "0"}, "numbers unlike cards"),
        (False, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [1]),
    ],
)
def test_which_card(tmp_path: Path, alike: bool, caller: dict[str, str], expected: list[int] | str) -> None:
    found = cards_of(glm53(), two(tmp_path, alike=alike, caller=caller))
    if isinstance(expected, str):
        assert isinstance(found, str)
        assert expected in found
    else:
        assert [one.index for one in found] == expected


def test_tensor_parallel_takes_several_cards(tmp_path: Path) -> None:
    machine = two(tmp_path, alike=True, caller={})
    full = card(index=1, used=CARD_BYTES)
    machine = replace(machine, gpu=GpuFacts((card(), full), "", "580.159.03"))
    assert check_vram(glm53(), machine).state == "ok"
    found = check_vram(glm53(flags=("--tensor-parallel-size=2",)), machine)
    assert found.state == "refused"
    assert "GPU 1" in found.text


def installed(tmp_path: Path, *names: str) -> Installation:
    for name in names:
        (tmp_path / "venv/lib/python3.12/site-packages" / f"{name}.dist-info").mkdir(parents=True, exist_ok=True)
    return replace(FORK, python=tmp_path / "venv/bin/python")


@pytest.mark.parametrize(
    ("names", "cuda"),
    [
        (("torch-2.9.0+cu128",), "12.8"),
        (("torch-2.9.0+cu130", "nvidia_cuda_runtime-12.8.90"), "13.0"),
        (("torch-2.9.0", "nvidia_cuda_runtime_cu12-12.8.90"), "12.8"),
        (("torch-2.11.0", "nvidia_cuda_runtime-13.0.96"), "13.0"),
        (("torch-2.9.0",), None),
    ],
)
def test_the_cuda_that_the_engine_was_built_for(tmp_path: Path, names: tuple[str, ...], cuda: str | None) -> None:
    assert cuda_version(installed(tmp_path, *names)) == cuda


@pytest.mark.parametrize(
    ("driver", "cuda", "name", "bad"),
    [
        ("580.159.03", "cu130", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", ""),
        ("575.57.08", "cu130", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "CUDA 13 need driver 580"),
        ("575.57.08", "cu128", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", ""),
        ("575.57.08", "cu126", "NVIDIA GeForce RTX 5090", "no kernels"),
        ("575.57.08", "cu126", "NVIDIA B200", "no kernels"),
        ("575.57.08", "cu126", "NVIDIA GeForce RTX 4090", ""),
        ("565.57.01", "cu128", "NVIDIA GeForce RTX 5090", "no driver before 570"),
        ("520.61.05", "cu121", "NVIDIA A100-SXM4-80GB", "CUDA 12 need driver 525"),
        ("610.57.04", "cu130", "NVIDIA H200", "issues/1370"),
    ],
)
def test_bad_versions(tmp_path: Path, driver: str, cuda: str, name: str, bad: str) -> None:
    machine = fake_machine(
        tmp_path, driver=driver, cards=(card(name=name),), installation=installed(tmp_path, f"torch-2.9.0+{cuda}")
    )
    found = check_versions(glm53(), machine)
    assert found.state == ("refused" if bad else "ok")
    assert bad in found.text
    assert driver in found.text
    assert bool(found.remedy) == bool(bad)


def test_a_version_that_nobody_tells_is_unknown(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path, driver="", installation=installed(tmp_path, "torch-2.9.0+cu130"))
    assert check_versions(glm53(), machine).state == "unknown"
    module = tmp_path / "sys/module/nvidia"
    module.mkdir(parents=True)
    (module / "version").write_text("580.159.03\n")
    assert driver_version(machine) == "580.159.03"
    assert check_versions(glm53(), machine).state == "ok"


def test_every_row_of_the_table_has_a_source() -> None:
    assert table()
    assert all(isinstance(row, Bad) and "https://" in row.source and (row.driver or row.cuda) for row in table())
