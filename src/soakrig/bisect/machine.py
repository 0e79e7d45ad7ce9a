"""The state of the machine, kept with every run: two runs that differ should differ in the arm and in nothing else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import soakrig
from soakrig.clock import Clock
from soakrig.errors import WatcherError
from soakrig.soak.fingerprint import fingerprint, host_facts
from soakrig.soak.watch.nvml import THROTTLES
from soakrig.soak.watch.nvml_session import read_once

NVML_DEADLINE = 30.0
GIT_DEADLINE = 10.0
PACKAGE = Path(soakrig.__file__).parent
_CPUS = Path("/sys/devices/system/cpu")
_MIB = 1 << 20


def machine_state(
    clock: Clock, *, env: Mapping[str, str] | None = None, deadline: float = NVML_DEADLINE, package: Path = PACKAGE
) -> dict[str, Any]:
    """What the machine is and how it is now, as plain JSON data; None or "" is "not known". Never raises.

    ``read_at`` (seconds since the epoch), ``boot_id``, ``uptime_s``, ``kernel``, ``soakrig``, ``load`` (1, 5, 15 min),
    ``memory_available_mib``, ``cpu`` {``governors``, ``mhz``, ``mhz_max``}, ``nvidia_driver``, ``git`` (commit of the
    checkout that the tool runs from, with "-dirty" where its code was changed; None where it is installed),
    ``gpus`` (see ``_gpu``; None without NVML) and ``gpus_why``, which says why something is missing there.

    NVML is read in a child process and waited for at most ``deadline`` seconds; ``env`` is that child's environment.
    """
    facts = fingerprint({})
    state: dict[str, Any] = {
        "read_at": clock.time(),
        "boot_id": host_facts()["boot_id"],
        "uptime_s": _uptime(),
        "kernel": facts["kernel"],
        "soakrig": facts["soakrig"],
        "load": [round(one, 2) for one in os.getloadavg()],
        "memory_available_mib": psutil.virtual_memory().available // _MIB,
        "cpu": _cpu(),
        "nvidia_driver": facts["nvidia_driver"],
        "git": git_commit(package),
        "gpus": None,
        "gpus_why": "",
    }
    try:
        answer = read_once("state", clock, env=env, deadline=deadline)
    except (WatcherError, OSError) as error:
        answer = error.message if isinstance(error, WatcherError) else f"NVML cannot be asked: {error}"
    if isinstance(answer, str):
        return {**state, "gpus_why": answer}
    driver = answer["driver"] or state["nvidia_driver"]
    return {
        **state,
        "nvidia_driver": driver,
        "gpus": [_gpu(one) for one in answer["gpus"]],
        "gpus_why": "; ".join(answer["notes"]),
    }


def git_commit(folder: Path) -> str | None:
    """Commit of the checkout that ``folder`` belongs to, with "-dirty" where a file below ``folder`` is changed or new.

    None where there is no git, no checkout, or one that merely has ``folder`` somewhere inside (a virtual environment
    in another project's checkout) and does not track it.
    """
    if not (_git(folder, "ls-files", "--", ".") or "").strip():
        return None
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--", ".")
    if not commit or changes is None:
        return None
    return commit.strip() + ("-dirty" if changes.strip() else "")


def _git(folder: Path, *words: str) -> str | None:
    """Output of a git command in ``folder``; None where it fails or takes too long."""
    # A hook that runs this tool sets GIT_DIR for a repository of its own; a lock of ours could disturb another git.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    # Started as root after a reboot, git would refuse a checkout that belongs to the operator.
    argv = ["git", "-c", "safe.directory=*", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_DEADLINE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def _uptime() -> float | None:
    try:
        return float(Path("/proc/uptime").read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _cpu(folder: Path = _CPUS) -> dict[str, Any]:
    """Governors (sorted; more than one where cores differ), mean and highest frequency, where the kernel tells."""
    governors: set[str] = set()
    for path in folder.glob("cpu[0-9]*/cpufreq/scaling_governor"):
        try:
            governors.add(path.read_text("ascii").strip())
        except (OSError, ValueError):
            continue  # a core that was just taken offline
    try:
        frequency: Any = psutil.cpu_freq()
    except (OSError, RuntimeError, ValueError, NotImplementedError):
        frequency = None  # virtual machines and containers show none, each in its own way
    mhz = round(frequency.current, 1) if frequency is not None and frequency.current else None
    highest = round(frequency.max, 1) if frequency is not None and frequency.max else None
    return {"governors": sorted(governors), "mhz": mhz, "mhz_max": highest}


def _gpu(read: Mapping[str, Any]) -> dict[str, Any]:
    """A card as ``nvml_child`` read it, with memory in MiB and the throttle bits that mean trouble by name.

    A reading that the card does not support is left out; ``failed`` is there where the card is lost.
    """
    gpu = {name: value for name, value in read.items() if name not in ("memory", "processes")}
    if read.get("memory"):
        gpu["memory_used_mib"], gpu["memory_total_mib"] = (round(one / _MIB, 1) for one in read["memory"])
    if read.get("clocks_reasons") is not None:
        gpu["throttle"] = [name for bit, name in THROTTLES.items() if read["clocks_reasons"] & bit]
    return gpu
