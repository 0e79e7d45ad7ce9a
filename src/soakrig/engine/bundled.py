"""Launch a bundled engine by name, with settings and flags as given and an environment of known names only."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from soakrig.engine.launcher import EngineProcess, launch
from soakrig.engine.ports import refuse_if_taken
from soakrig.errors import EngineStartError, UsageError

BUNDLED = ("embedded",)
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


def check_engine(name: str) -> str:
    """``name`` when it is a bundled engine. Raises ``UsageError`` with what there is."""
    if name not in BUNDLED:
        near = difflib.get_close_matches(name, BUNDLED, n=1)
        raise UsageError(
            f"there is no bundled engine {name!r}" + (f"; {near[0]!r} was meant?" if near else ""),
            remedy=f"Bundled in this version: {', '.join(BUNDLED)}. Any other engine is attached with --url.",
        )
    return name


def engine_environment(settings: Mapping[str, str], caller: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the engine gets: the caller's variables of known names, then ``settings``."""
    inherited = {name: value for name, value in (caller or os.environ).items() if PASSED_ON.match(name)}
    return {**inherited, "PYTHONUNBUFFERED": "1", **settings}


def launch_embedded(
    settings: Mapping[str, str], flags: Sequence[str], folder: Path, *, port: int = 0, timeout: float = 120.0
) -> EngineProcess:
    """Start the embedded engine with its log and port file in ``folder`` and wait until it is ready.

    Raises ``PreflightRefusedError`` when ``port`` is taken (naming who holds it), ``UsageError`` when it refuses a
    flag or a setting, and ``EngineStartError`` when it does not come up.
    """
    refuse_if_taken(port)
    taken = next((flag for flag in flags if flag.partition("=")[0] in ("--port", "--port-file")), None)
    if taken is not None:
        raise UsageError(f"--arg={taken} is set by this tool", remedy="Use --port for the port.")
    port_file = folder / "engine.port"
    argv = [sys.executable, "-m", "soakrig.engine.embedded", "--port", str(port), "--port-file", str(port_file), *flags]
    try:
        return launch(
            argv,
            env=engine_environment(settings),
            log_path=folder / "engine.log",
            port_file=port_file,
            timeout=timeout,
        )
    except EngineStartError as error:
        if error.exit_status == UsageError.exit_code:  # it refused a flag or a setting, as its own command would
            raise UsageError(error.message, remedy=error.remedy) from error
        raise
