"""Memory in use on the GPUs of this host, by one question to NVML in a process of its own."""

from __future__ import annotations

from typing import Any

from soakrig.clock import Clock
from soakrig.errors import WatcherError
from soakrig.soak.watch.nvml_session import read_once

_MIB = 1 << 20


def vram_used(clock: Clock) -> float | str | None:
    """MiB in use on all GPUs together, by whomever; why it could not be measured; None where there is no NVML."""
    try:
        answer = read_once("state", clock)
    except WatcherError as error:
        return error.message
    if isinstance(answer, str):
        return None
    gpus: list[dict[str, Any]] = answer["gpus"]
    used = [gpu.get("memory") for gpu in gpus]  # [used, total] in bytes
    if any(one is None for one in used):
        return "a GPU does not tell how much of its memory is in use"
    return sum(float(one[0]) for one in used if one) / _MIB
