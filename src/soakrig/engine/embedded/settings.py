"""The one place that reads the environment: the engine's variables, checked, with where each value came from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soakrig.errors import UsageError

from .plant import Plant

PREFIXES = ("VLLM_MOE_", "SOAKRIG_PLANT", "CPU_OFFLOAD")
NEAR = 0.85


def _count(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text) if text.strip().isdecimal() else -1
        if value < low:
            raise ValueError(f"a whole number of {low} or more was expected")
        return value

    return read


def _switch(text: str) -> int:
    if text not in ("0", "1"):
        raise ValueError("0 or 1 was expected")
    return int(text)


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise ValueError("a number of GiB, 0 or more, was expected")
    return value


def _input_file(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError("the path of an existing profile was expected")
    return text


def _output_file(text: str) -> str:
    if not text or Path(text).is_dir() or not Path(text).absolute().parent.is_dir():
        raise ValueError("the path of a file to write, in an existing folder, was expected")
    return text


@dataclass(frozen=True, slots=True)
class _Variable:
    default: Any
    read: Callable[[str], Any]
    obeyed: bool


VARIABLES: dict[str, _Variable] = {
    "VLLM_MOE_HOT_SLOTS": _Variable(0, _count(0), obeyed=False),
    "VLLM_MOE_HOT_PROFILE": _Variable(None, _input_file, obeyed=False),
    "VLLM_MOE_SKEW_PERLAYER": _Variable(None, _output_file, obeyed=False),
    "VLLM_MOE_DMA_STAGING": _Variable(1, _switch, obeyed=False),
    "VLLM_MOE_PREFILL_GROUPS": _Variable(1, _count(1), obeyed=False),
    "CPU_OFFLOAD_GB": _Variable(0.0, _gib, obeyed=False),
    "SOAKRIG_PLANT": _Variable(None, Plant.parse, obeyed=True),
}
"""Name -> default, reader, and whether this build acts on it: no experts are offloaded yet, so there are no slots."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective values by name, and the names that the environment set."""

    values: Mapping[str, Any]
    texts: Mapping[str, str]
    """What the environment said, by name; only for what it set."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read and check every variable. Raises UsageError naming the variable, its text and what was expected."""
        environment = os.environ if environment is None else environment
        for name in environment:
            if name not in VARIABLES and name.startswith(PREFIXES):
                near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=NEAR)
                if near:
                    raise UsageError(f"{name} is no setting of this engine", remedy=f"{near[0]} was probably meant")
        texts = {name: environment[name] for name in VARIABLES if name in environment}
        values: dict[str, Any] = {}
        for name, variable in VARIABLES.items():
            try:
                values[name] = variable.read(texts[name]) if name in texts else variable.default
            except ValueError as error:
                raise UsageError(
                    f"{name}={texts[name]!r} makes no sense: {error}", remedy=f"correct {name} or unset it"
                ) from error
        settings = cls(values, texts)
        plant = settings.plant
        if plant is not None:
            plant.check(VARIABLES)
            settings.hold(plant.when)
        return settings

    @property
    def plant(self) -> Plant | None:
        return self.values["SOAKRIG_PLANT"]

    def hold(self, wanted: Mapping[str, str]) -> bool:
        """Whether every named setting has the value that the text stands for ("" for none). Raises UsageError."""
        same = True
        for name, text in wanted.items():
            try:
                value = VARIABLES[name].read(text) if text else None
            except ValueError as error:
                raise UsageError(f"SOAKRIG_PLANT: when: {name}={text!r} makes no sense: {error}") from error
            same = same and value == self.values[name]
        return same

    def report(self) -> dict[str, dict[str, Any]]:
        """For ``/soakrig/settings``: ``{NAME: {"value", "source", "obeyed"}}``."""
        return {
            name: {
                "value": value.report() if isinstance(value, Plant) else value,
                "source": "environment" if name in self.texts else "default",
                "obeyed": VARIABLES[name].obeyed,
            }
            for name, value in self.values.items()
        }
