"""The one place of the engines that reads the environment: the offload variables, checked, and where each came from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from soakrig.errors import UsageError

PREFIXES = ("VLLM_MOE_", "CPU_OFFLOAD")
NEAR = 0.85
ARENA = "arena:"
PolicyName = Literal["static", "lru", "lfru", "clock"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
SplitName = Literal["experts", "rows"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
AUTO = "auto"
"""Static where a profile is given, else least recently used."""


def _slots(text: str) -> int | str:
    if _whole(text):
        return int(text)
    if text.startswith(ARENA):
        count = text.removeprefix(ARENA)
        if _whole(count) and int(count) >= 1:
            return f"{ARENA}{int(count)}"
    elif Path(text).is_file():
        return text
    raise ValueError(
        "a whole number of slots per layer, 0 or more, arena:N with N of 1 or more, or the path of an existing slot "
        "map was expected"
    )


def _whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9


def _switch(text: str) -> int:
    if text not in ("0", "1"):
        raise ValueError("0 or 1 was expected")
    return int(text)


def _gib(text: str) -> float:
    try:
        value = float(text) if text.isascii() and "_" not in text and text == text.strip() else -1.0
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise ValueError("a number of GiB, 0 or more, was expected")
    return value


def _policy(text: str) -> str:
    if text not in (AUTO, *POLICIES):
        raise ValueError(f"one of {', '.join((AUTO, *POLICIES))} was expected")
    return text


def _split(text: str) -> str:
    if text not in SPLITS:
        raise ValueError(f"one of {', '.join(SPLITS)} was expected")
    return text


def _input_file(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError("the path of an existing profile was expected")
    return text


def _output_file(text: str) -> str:
    path = Path(text)
    folder = path.absolute().parent
    # A device is refused too: renaming a new file into its place would put it out of the system.
    # So is a link that leads nowhere, or in a circle.
    if not text or not folder.is_dir() or (os.path.lexists(path) and not path.is_file()):
        raise ValueError("the path of a file to write, in an existing folder, was expected")
    # Found out now: these files are written hours later, and what they hold is gone when they cannot be.
    if not os.access(folder, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError("the path of a file that this user may write was expected")
    return text


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: ``read`` turns its text into a value, or raises ValueError saying what was expected."""

    default: Any
    read: Callable[[str], Any]


VARIABLES: Mapping[str, Variable] = {
    "VLLM_MOE_HOT_SLOTS": Variable(0, _slots),
    "VLLM_MOE_HOT_PROFILE": Variable(None, _input_file),
    "VLLM_MOE_SKEW_PERLAYER": Variable(None, _output_file),
    "VLLM_MOE_DMA_STAGING": Variable(1, _switch),
    "VLLM_MOE_PREFILL_GROUPS": Variable(1, _switch),
    "CPU_OFFLOAD_GB": Variable(None, _gib),
    "VLLM_MOE_SLOT_POLICY": Variable(AUTO, _policy),
    "VLLM_MOE_ROUTING_TRACE": Variable(None, _output_file),
}
"""The variables of the offload core, in the order in which they are reported. All of them are obeyed."""


SPLIT = "VLLM_MOE_PREFILL_SPLIT"
SPLIT_VARIABLE = Variable("experts", _split)
"""For hosts whose kernel sums over a token's experts itself. One that sums afterwards gives the same bits however
experts are grouped, and other ones when rows are split."""


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """The effective values by name, and the texts that the environment set.

    A host with variables of its own derives from this and names them in ``variables`` and ``prefixes``.
    """

    values: Mapping[str, Any]
    texts: Mapping[str, str]
    """What the environment said, by name; only for what it set."""

    variables: ClassVar[Mapping[str, Variable]] = VARIABLES
    foreign: ClassVar[Mapping[str, str]] = {}
    """Variables that another host obeys and this one cannot: name -> why. Set here, they are refused."""
    prefixes: ClassVar[tuple[str, ...]] = PREFIXES

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read and check every variable; None for this process's own environment.

        Raises UsageError naming the variable, its text and what was expected, or both variables that do not go
        together.
        """
        environment = os.environ if environment is None else environment
        for name in environment:
            if name in cls.foreign:
                raise UsageError(f"{name} is not obeyed here: {cls.foreign[name]}", remedy=f"unset {name}")
            if name not in cls.variables and name.startswith(cls.prefixes):
                near = difflib.get_close_matches(name, cls.variables, n=1, cutoff=NEAR)
                if near:
                    raise UsageError(f"{name} is no setting of this engine", remedy=f"{near[0]} was probably meant")
        texts = {name: environment[name] for name in cls.variables if name in environment}
        values: dict[str, Any] = {}
        for name, variable in cls.variables.items():
            try:
                values[name] = variable.read(texts[name]) if name in texts else variable.default
            except ValueError as error:
                raise UsageError(
                    f"{name}={texts[name]!r} makes no sense: {error}", remedy=f"correct {name} or unset it"
                ) from error
            except OSError as error:
                raise UsageError(
                    f"{name}={texts[name]!r} cannot be looked at: {error.strerror}",
                    remedy=f"correct {name}, or let this user read its folder",
                ) from error
        settings = cls(values, texts)
        settings.check()
        return settings

    def check(self) -> None:
        """Raise UsageError, naming variables and values, for values that do not go together."""
        if self.slots_asked and self.offload_gb == 0:
            raise self._contradiction(
                "VLLM_MOE_HOT_SLOTS",
                "CPU_OFFLOAD_GB",
                "slots hold experts that were offloaded, and none are",
                "raise or unset CPU_OFFLOAD_GB, or unset VLLM_MOE_HOT_SLOTS",
            )
        if self.values["VLLM_MOE_SLOT_POLICY"] == "static" and self.hot_profile is None:
            raise self._contradiction(
                "VLLM_MOE_SLOT_POLICY",
                "VLLM_MOE_HOT_PROFILE",
                "a static hot set comes from a profile",
                "give a profile (VLLM_MOE_SKEW_PERLAYER writes one), or another policy",
            )
        if not self.offloads:
            for name in ("VLLM_MOE_HOT_PROFILE", "VLLM_MOE_SLOT_POLICY", "VLLM_MOE_SKEW_PERLAYER"):
                if self.values[name] != self.variables[name].default:
                    raise self._contradiction(
                        name,
                        "CPU_OFFLOAD_GB",
                        "no layer's experts leave the device, so nothing would obey it",
                        f"give CPU_OFFLOAD_GB the GiB of experts to offload, or unset {name}",
                    )
        if self.values["VLLM_MOE_SLOT_POLICY"] != AUTO and not self.slots_asked:
            raise self._contradiction(
                "VLLM_MOE_SLOT_POLICY",
                "VLLM_MOE_HOT_SLOTS",
                "there is no slot for a policy to decide about",
                "give VLLM_MOE_HOT_SLOTS, or unset VLLM_MOE_SLOT_POLICY",
            )
        if self.hot_profile is not None and not self.slots_asked:
            raise self._contradiction(
                "VLLM_MOE_HOT_PROFILE",
                "VLLM_MOE_HOT_SLOTS",
                "there is no slot to pin a hot expert in",
                "give VLLM_MOE_HOT_SLOTS, or unset VLLM_MOE_HOT_PROFILE",
            )
        self._check_files()

    def _check_files(self) -> None:
        # A profile may be read and then written anew at the same place; nothing else shares a file.
        inputs = ["VLLM_MOE_HOT_SLOTS"] if self.slot_map is not None else []
        for name, others in (
            ("VLLM_MOE_SKEW_PERLAYER", inputs),
            ("VLLM_MOE_ROUTING_TRACE", [*inputs, "VLLM_MOE_HOT_PROFILE", "VLLM_MOE_SKEW_PERLAYER"]),
        ):
            for other in others:
                ours, theirs = self.values[name], self.values[other]
                if ours is not None and theirs is not None and Path(ours).resolve() == Path(theirs).resolve():
                    raise self._contradiction(
                        name, other, "one would overwrite the other", f"give {name} a file of its own"
                    )

    def _contradiction(self, one: str, other: str, why: str, remedy: str) -> UsageError:
        return UsageError(f"{one}={self._text(one)} does not go with {other}={self._text(other)}: {why}", remedy=remedy)

    def _text(self, name: str) -> str:
        if name in self.texts:
            return repr(self.texts[name])
        value = self.variables[name].default
        return "(unset)" if value is None else f"{value!r} (its default)"

    @property
    def slots(self) -> int:
        """Slots of each offloaded layer; 0 where an arena or a map says it."""
        value = self.values["VLLM_MOE_HOT_SLOTS"]
        return value if isinstance(value, int) else 0

    @property
    def arena(self) -> int:
        """Slots that all offloaded layers share; 0 where each layer has its own."""
        value = self.values["VLLM_MOE_HOT_SLOTS"]
        return int(value.removeprefix(ARENA)) if isinstance(value, str) and value.startswith(ARENA) else 0

    @property
    def slot_map(self) -> str | None:
        """Path of the slot map."""
        value = self.values["VLLM_MOE_HOT_SLOTS"]
        return value if isinstance(value, str) and not value.startswith(ARENA) else None

    @property
    def slots_asked(self) -> bool:
        return self.values["VLLM_MOE_HOT_SLOTS"] != 0

    @property
    def hot_profile(self) -> str | None:
        """Path of the profile to pin from."""
        return self.values["VLLM_MOE_HOT_PROFILE"]

    @property
    def skew(self) -> str | None:
        """Path of the profile to write."""
        return self.values["VLLM_MOE_SKEW_PERLAYER"]

    @property
    def trace(self) -> str | None:
        """Path of the routing trace to write."""
        return self.values["VLLM_MOE_ROUTING_TRACE"]

    @property
    def staging(self) -> bool:
        """Whether misses are gathered into the staging buffer, rather than read in the bank."""
        return bool(self.values["VLLM_MOE_DMA_STAGING"])

    @property
    def groups(self) -> bool:
        """Whether a prefill chunk goes through the staging buffer in groups."""
        return bool(self.values["VLLM_MOE_PREFILL_GROUPS"])

    @property
    def split(self) -> SplitName:
        """How a chunk that misses more experts than the staging buffer holds is cut: by experts, or by rows."""
        return self.values.get(SPLIT, "experts")

    @property
    def offload_gb(self) -> float | None:
        """GiB of experts to offload; None where nobody said."""
        return self.values["CPU_OFFLOAD_GB"]

    @property
    def offloads(self) -> bool:
        """Whether any layer's experts leave the device: as asked, or all of them where only slots are asked for."""
        return self.slots_asked if self.offload_gb is None else self.offload_gb > 0

    @property
    def policy(self) -> PolicyName:
        """What was asked for, or what ``auto`` stands for here."""
        value = self.values["VLLM_MOE_SLOT_POLICY"]
        if value != AUTO:
            return value
        return "lru" if self.hot_profile is None else "static"

    def report(self) -> dict[str, dict[str, Any]]:
        """For ``/soakrig/settings``: ``{NAME: {"value", "source", "obeyed"}}``."""
        return {
            name: {
                "value": value,
                "source": "environment" if name in self.texts else "default",
                "obeyed": True,
            }
            for name, value in self.values.items()
        }
