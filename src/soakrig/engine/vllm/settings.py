"""vLLM's variables: those of the offload core, how a chunk is cut, and the planted fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from soakrig.engine.embedded.plant import Plant, hold
from soakrig.engine.offload.settings import PREFIXES, SPLIT, SPLIT_VARIABLE, OffloadSettings, Variable
from soakrig.engine.offload.settings import VARIABLES as OFFLOAD_VARIABLES

PLANT = "SOAKRIG_PLANT"
VARIABLES: Mapping[str, Variable] = {**OFFLOAD_VARIABLES, SPLIT: SPLIT_VARIABLE, PLANT: Variable(None, Plant.parse)}


@dataclass(frozen=True, slots=True)
class VllmSettings(OffloadSettings):
    """The effective values by name, and the texts that the environment set."""

    variables: ClassVar[Mapping[str, Variable]] = VARIABLES
    prefixes: ClassVar[tuple[str, ...]] = (*PREFIXES, PLANT)

    @property
    def asked(self) -> bool:
        """Whether anything asks for the plug-in: without that it leaves vLLM as it is."""
        return self.offloads or self.trace is not None or self.plant is not None

    def check(self) -> None:
        """Raise UsageError for values that do not go together and for a plant that cannot be carried out."""
        OffloadSettings.check(self)
        if self.plant is not None:
            self.plant.check(VARIABLES)
            hold(self, self.plant.when)

    @property
    def plant(self) -> Plant | None:
        return self.values[PLANT]

    def report(self) -> dict[str, dict[str, Any]]:
        """For ``/soakrig/settings``: ``{NAME: {"value", "source", "obeyed"}}``."""
        found = OffloadSettings.report(self)
        if self.plant is not None:
            found[PLANT]["value"] = self.plant.report()
        return found
