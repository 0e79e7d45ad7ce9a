"""What a run ran on: versions and hashes, so that two runs can be told apart a year later."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import orjson

import soakrig


def fingerprint(settings: dict[str, Any], engine_version: str = "") -> dict[str, Any]:
    """Versions of the tool, Python, kernel, driver and engine, and one hash over the settings."""
    return {
        "soakrig": soakrig.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "nvidia_driver": _first_line("/sys/module/nvidia/version"),
        "engine": engine_version or str(settings.get("engine", {}).get("version", "")),
        "settings_sha256_16": hashlib.sha256(orjson.dumps(settings, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16],
    }


def host_facts() -> dict[str, Any]:
    """``boot_id`` (a reboot in mid-campaign shows by it), the CPU's name, cores, and memory in MiB."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "boot_id": _first_line("/proc/sys/kernel/random/boot_id"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": pages >> 20,
    }


def _cpu() -> str:
    """The name that the kernel gives the CPU; "" where it gives none (other architectures than x86)."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").split("\n", 1)[0].strip()
    except OSError:
        return ""
