"""Host memory, locked memory and shared memory, on faked hosts: to the byte, and with both numbers in the refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from faked_machine import CPU_VLLM, GIB, MIB, embedded, fake_machine, glm53
from soakrig.engine.preflight.finding import Finding
from soakrig.engine.preflight.memory import cgroup_room, check_host_ram, check_memlock
from soakrig.engine.preflight.shm import check_shm

KIB_155 = 155 * MIB
"""155 GiB in KiB."""


def both(finding: Finding, *numbers: str) -> None:
    """A refusal says both numbers and what to do."""
    assert finding.state == "refused"
    assert finding.remedy
    for number in numbers:
        assert number in finding.text


def test_the_seeds_need_is_155_gib_and_one_page_less_is_refused(tmp_path: Path) -> None:
    fits = check_host_ram(glm53(), fake_machine(tmp_path, available_kib=KIB_155))
    assert (fits.state, fits.needs, fits.has) == ("ok", 155, 155)
    short = check_host_ram(glm53(), fake_machine(tmp_path, available_kib=KIB_155 - 4))
    assert short.needs == 155
    both(short, "155 GiB needed", "125 offloaded + 30 while it loads", "no swap")
    # What the operator's own host had while another model's cache sat in /dev/shm.
    both(check_host_ram(glm53(), fake_machine(tmp_path, available_kib=70 * MIB)), "155 GiB", "70.0 GiB available")


def test_swap_is_told_and_not_counted(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path, available_kib=150 * MIB, swap_kib=64 * MIB)
    both(check_host_ram(glm53(), machine), "155 GiB", "150.0 GiB", "64.0 GiB of swap, which pinned memory cannot use")


def test_another_offload_needs_another_amount(tmp_path: Path) -> None:
    entry = glm53(settings={"CPU_OFFLOAD_GB": "105"})
    assert check_host_ram(entry, fake_machine(tmp_path, available_kib=135 * MIB)).state == "ok"
    both(check_host_ram(entry, fake_machine(tmp_path, available_kib=134 * MIB)), "135 GiB needed", "134.0 GiB")


def test_a_limit_of_the_cgroup_counts(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path, cgroup="0::/pod/engine\n")
    folder = tmp_path / "sys/fs/cgroup/pod"
    (folder / "engine").mkdir(parents=True)
    (folder / "engine/memory.max").write_text("max\n")
    (folder / "engine/memory.current").write_text("0\n")
    assert cgroup_room(machine) is None
    (folder / "memory.max").write_text(f"{100 * GIB}\n")
    (folder / "memory.current").write_text(f"{20 * GIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {2 * GIB}\n")
    assert cgroup_room(machine) == 82 * GIB
    both(check_host_ram(glm53(), machine), "155 GiB", "82.0 GiB left below this cgroup's limit")


def test_a_limit_of_a_version_1_cgroup_counts(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path, cgroup="4:memory:/box\n1:cpu:/\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory/box"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (folder / "memory.usage_in_bytes").write_text("4096\n")
    assert cgroup_room(machine) is None
    (folder / "memory.limit_in_bytes").write_text(f"{8 * GIB}\n")
    assert cgroup_room(machine) == 8 * GIB - 4096


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path)
    (tmp_path / "proc/meminfo").unlink()
    assert check_host_ram(glm53(), machine).state == "unknown"
    (tmp_path / "proc/self/limits").write_text("nothing here\n")
    assert check_memlock(glm53(), machine).state == "unknown"


def test_a_need_that_nobody_stated_is_unknown(tmp_path: Path) -> None:
    entry = embedded(host_ram_gib=None)
    found = check_host_ram(entry, fake_machine(tmp_path))
    assert (found.state, "host_ram_gib" in found.remedy) == ("unknown", True)
    assert check_host_ram(glm53(settings={"CPU_OFFLOAD_GB": "much"}), fake_machine(tmp_path)).state == "unknown"


def test_memlock(tmp_path: Path) -> None:
    assert check_memlock(glm53(), fake_machine(tmp_path)).text == "unlimited"
    small = fake_machine(tmp_path, memlock=str(8 * MIB))
    both(check_memlock(glm53(), small), "125 GiB will be pinned", "8 MiB may be locked")
    privileged = fake_machine(tmp_path, memlock=str(8 * MIB), capabilities=1 << 14)
    assert check_memlock(glm53(), privileged).state == "ok"
    exact = fake_machine(tmp_path, memlock=str(125 * GIB))
    assert check_memlock(glm53(), exact).state == "ok"
    both(check_memlock(glm53(), fake_machine(tmp_path, memlock=str(125 * GIB - 1))), "125 GiB")


@pytest.mark.parametrize("installation", [CPU_VLLM, None])
def test_nothing_is_pinned_without_a_card(tmp_path: Path, installation: object) -> None:
    machine = fake_machine(tmp_path, memlock="0", installation=installation)
    entry = glm53() if installation is CPU_VLLM else embedded(settings={"CPU_OFFLOAD_GB": "1"})
    assert check_memlock(entry, machine).text == "nothing is pinned"


def test_the_tier_in_shared_memory(tmp_path: Path) -> None:
    """A 48 GiB tier met 32 GiB of /dev/shm in a container, and the engine found out after it had built everything."""
    entry = glm53(flags=("--kv-offloading-size=48",))
    both(check_shm(entry, fake_machine(tmp_path, shm=(32 * GIB, 32 * GIB))), "48 GiB needed", "32.0 GiB of 32.0 GiB")
    assert check_shm(entry, fake_machine(tmp_path, shm=(64 * GIB, 48 * GIB))).state == "ok"
    both(check_shm(entry, fake_machine(tmp_path, shm=(64 * GIB, 48 * GIB - 1))), "48 GiB needed")
    assert check_shm(glm53(shm_gib=10.0), fake_machine(tmp_path, shm=(64 * GIB, 9 * GIB))).needs == 10
    assert check_shm(glm53(), fake_machine(tmp_path, shm=(0, 0))).state == "ok"
    assert check_shm(glm53(flags=("--kv-offloading-size=big",)), fake_machine(tmp_path)).state == "unknown"
