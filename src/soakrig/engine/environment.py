"""The environment of a launched engine: the caller's variables of known names, and what --set says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from soakrig.errors import UsageError

PASSED_ON = re.compile(
    r"^(PATH|HOME|USER|LANG|LANGUAGE|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHONPATH|XDG_CACHE_HOME|"
    r"CUDA_.*|NVIDIA_.*|NCCL_.*|PYTORCH_.*|TORCH_.*|TORCHINDUCTOR_.*|TRITON_.*|VLLM_.*|HF_.*|OMP_.*|MKL_.*|OPENBLAS_.*|"
    r"CPU_OFFLOAD_GB)$"
)
"""Variables of the caller that an engine gets; everything else is left out, so that a run does not depend on what
happened to be exported. ``SOAKRIG_PLANT`` is never inherited: a planted fault is asked for with --set."""

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` pairs of --set. Raises ``UsageError`` for anything else and for a name that is set twice."""
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _NAME.match(name):
            raise UsageError(f"--set {pair!r} is no NAME=VALUE", remedy="Example: --set VLLM_MOE_DMA_STAGING=0")
        if name in settings:
            raise UsageError(f"--set names {name} twice: {settings[name]!r} and {value!r}", remedy="Name it once.")
        settings[name] = value
    return settings


def engine_environment(settings: Mapping[str, str], caller: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the engine gets: the caller's variables of known names, then ``settings``."""
    inherited = os.environ if caller is None else caller
    inherited = {name: value for name, value in inherited.items() if PASSED_ON.match(name)}
    return {**inherited, "PYTHONUNBUFFERED": "1", **settings}
