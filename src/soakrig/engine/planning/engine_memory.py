"""What an engine and the driver themselves say of device memory: log lines of vLLM, and NVML."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from soakrig.errors import UsageError

from .quantity import Figure

NVML_SECONDS = 15.0
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
LINES = {
    "weights": re.compile(rf"Model loading took {_NUMBER} GiB"),
    "kv": re.compile(rf"(?:Available KV cache memory: {_NUMBER} GiB|reserved {_NUMBER} GiB memory for KV Cache)"),
    "graphs": re.compile(
        rf"(?:CUDA graph pool memory: {_NUMBER} GiB|Graph capturing finished in .*took {_NUMBER} GiB)"
    ),
}
"""By the name that a budget's ``log`` key gives. Texts as in vLLM 0.24 to 0.32 (v1/worker/gpu_worker.py,
gpu_model_runner.py); GiB there is 2**30 bytes."""
_CHILD = """
import json, sys, pynvml
pynvml.nvmlInit()
memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(int(sys.argv[1])))
print(json.dumps([memory.total, memory.total - memory.used]))
"""


def read_engine_log(path: str) -> dict[str, Figure]:
    """The last amount of each of ``LINES`` in a log, in bytes, ``measured`` (to the two digits that it prints).

    Raises UsageError for a file that cannot be read, and one without any such line.
    """
    found: dict[str, Figure] = {}
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                for name, pattern in LINES.items():
                    if match := pattern.search(line):
                        amount = next(group for group in match.groups() if group)
                        found[name] = Figure.of(float(amount), "GiB", "measured", f"{Path(path).name}, line {number}")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="give the engine's log") from error
    if not found:
        raise UsageError(
            f"{path} has no line on memory; of vLLM, 'Model loading took ... GiB' and the like were expected",
            remedy="give the log of the engine's start",
        )
    return found


def read_nvml(index: int, python: str = sys.executable) -> tuple[Figure, Figure]:
    """Capacity and free bytes of a GPU, ``measured``. In a process of its own: NVML can hang for good.

    Raises UsageError where there is no such GPU, no driver, or no answer.
    """
    argv = [python, "-c", _CHILD, str(index)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=NVML_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"NVML did not answer within {NVML_SECONDS:g} s", remedy="look at nvidia-smi and dmesg"
        ) from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UsageError(f"NVML told nothing of GPU {index}: {reason}", remedy="give capacity and free in the budget")
    capacity, free = json.loads(lines[-1])  # the library may print before
    source = f"NVML, GPU {index}"
    return Figure.of(capacity, "B", "measured", source), Figure.of(free, "B", "measured", source)
