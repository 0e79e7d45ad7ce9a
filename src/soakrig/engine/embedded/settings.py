"""The embedded engine's variables: those of the offload core, and its own planted fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from soakrig.engine.offload import settings as offload

from .plant import Plant, hold

VARIABLES: Mapping[str, offload.Variable] = {
    **offload.VARIABLES,
    "SOAKRIG_PLANT": offload.Variable(None, Plant.parse),
}
"""Name -> default and reader."""


@dataclass(frozen=True, slots=True)
class Settings(offload.OffloadSettings):
    """The effective values by name, and the texts that the environment set."""

    variables: ClassVar[Mapping[str, offload.Variable]] = VARIABLES
    foreign: ClassVar[Mapping[str, str]] = {
        offload.SPLIT: "this engine sums over a token's experts itself and gives the same bits however they are cut"
    }
    prefixes: ClassVar[tuple[str, ...]] = (*offload.PREFIXES, "SOAKRIG_PLANT")

    def check(self) -> None:
        """Raise UsageError for values that do not go together and for a plant that cannot be carried out."""
        offload.OffloadSettings.check(self)
        if self.plant is not None:
            self.plant.check(VARIABLES)
            self.hold(self.plant.when)

    @property
    def plant(self) -> Plant | None:
        return self.values["SOAKRIG_PLANT"]

    def hold(self, wanted: Mapping[str, str]) -> bool:
        """Whether every named setting has the value that the text stands for. Raises UsageError."""
        return hold(self, wanted)

    def report(self) -> dict[str, dict[str, Any]]:
        """For ``/soakrig/settings``: ``{NAME: {"value", "source", "obeyed"}}``."""
        found = offload.OffloadSettings.report(self)
        if self.plant is not None:
            found["SOAKRIG_PLANT"]["value"] = self.plant.report()
        return found
