"""Planted faults: what ``SOAKRIG_PLANT`` asks for, and when it strikes. For demonstrations and tests only."""

from __future__ import annotations

import json
import os
import random
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from soakrig.engine.offload.settings import OffloadSettings
from soakrig.errors import UsageError

from .xid_line import KMSG

PlantAction = Literal[
    "exit", "sigkill", "hang", "empty_200", "answerless", "cut", "error_frame", "one_token", "bad_expert_id"
]
ACTIONS: tuple[PlantAction, ...] = get_args(PlantAction)
CANARY_TOKENS = 16
"""Requests that ask for no more than this are no turns: they are how a client asks whether the engine lives."""


class Rising(BaseModel):
    """A hazard in proportion to the context."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    per_1k_context: Annotated[float, Field(ge=0.0)]


class After(BaseModel):
    """What has to lie behind before the hazard starts."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    turns: Annotated[int, Field(ge=0)] = 0
    context_tokens: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _one(self) -> After:
        if len(self.model_fields_set) != 1:
            raise ValueError("exactly one of turns and context_tokens was expected")
        return self


class Plant(BaseModel):
    """One planted fault.

    ``hazard``: probability per turn once ``after`` is behind; ``when``: settings that must hold, by environment name;
    ``min_tools``: tools that the request must offer; ``xid``: number or whole line to write to ``kernel_log`` first.
    ``seed``: of the draws; without one every start draws its own, as a real fault does not come at the same turn of
    each launch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    action: PlantAction
    hazard: Annotated[float, Field(ge=0.0, le=1.0)] | Rising = 1.0
    after: After = Field(default_factory=lambda: After(turns=0))
    when: dict[str, str] = Field(default_factory=dict[str, str])
    min_tools: Annotated[int, Field(ge=0)] = 0
    xid: Annotated[int, Field(ge=1, le=9999)] | str | None = None
    kernel_log: str | None = None
    seed: Annotated[int, Field(ge=0)] | None = None

    @field_validator("after", mode="before")
    @classmethod
    def _plain_turns(cls, value: Any) -> Any:
        return {"turns": value} if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("when", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: str(wanted) if isinstance(wanted, int | float) else wanted for name, wanted in value.items()}
        return value

    @classmethod
    def parse(cls, text: str) -> Plant:
        """Raises ValueError saying which key is wrong and what was expected."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"one JSON object was expected ({error})") from error
        if not isinstance(raw, dict):
            raise ValueError("one JSON object was expected")  # noqa: TRY004 - every reader of a setting raises ValueError
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            parts = [f"{'.'.join(map(str, one['loc'])) or 'plant'}: {one['msg']}" for one in error.errors()]
            known = ", ".join(cls.model_fields)
            raise ValueError(f"{'; '.join(parts)} (keys: {known}; actions: {', '.join(ACTIONS)})") from error

    def check(self, known: Collection[str]) -> None:
        """Raise UsageError for what can only be seen with the rest: settings by name, the log's place."""
        for name in self.when:
            if name not in known or name == "SOAKRIG_PLANT":
                raise UsageError(f"SOAKRIG_PLANT: when names {name}, which is no setting; known: {', '.join(known)}")
        if (self.xid is None) != (self.kernel_log is None):
            raise UsageError("SOAKRIG_PLANT: xid and kernel_log go together: what to write, and where")
        if self.kernel_log is not None:
            place = Path(self.kernel_log)
            file = place.exists() or self.kernel_log == KMSG
            if place.is_dir() or not os.access(place if file else place.absolute().parent, os.W_OK):
                raise UsageError(
                    f"SOAKRIG_PLANT: {place} cannot be written to",
                    remedy="give a file in a writable folder; /dev/kmsg needs root",
                )

    def report(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def hold(settings: OffloadSettings, wanted: Mapping[str, str]) -> bool:
    """Whether every named setting has the value that the text stands for ("" for none). Raises UsageError.

    A setting that was left to the engine holds by its default's name and by what it comes to here.
    """
    comes_to = {"VLLM_MOE_SLOT_POLICY": settings.policy, **({} if settings.offloads else {"CPU_OFFLOAD_GB": 0.0})}
    same = True
    for name, text in wanted.items():
        try:
            value = settings.variables[name].read(text) if text else None
        except (ValueError, OSError) as error:
            raise UsageError(f"SOAKRIG_PLANT: when: {name}={text!r} makes no sense: {error}") from error
        same = same and value in (settings.values[name], comes_to.get(name, settings.values[name]))
    return same


class PlantClock:
    """Counts turns and decides, once for each, whether the fault strikes.

    One draw a turn, in order of arrival, whether or not it can strike, so that a seed means the same turns under any
    ``after`` and ``when``. Its ``plant`` has the seed that is in use.
    """

    def __init__(self, plant: Plant, *, holds: bool) -> None:
        if plant.seed is None:
            plant = plant.model_copy(update={"seed": secrets.randbelow(1 << 31)})
        self.plant = plant
        self._holds = holds
        self._draws = random.Random(plant.seed)
        self.turns = 0
        self.struck = 0

    def turn(self, context_tokens: int, max_tokens: int | None, tools: int = 0) -> PlantAction | None:
        """The action for this chat request, or None. ``max_tokens`` and ``tools`` are what the client asked for."""
        if max_tokens is not None and max_tokens <= CANARY_TOKENS:
            return None
        self.turns += 1
        draw = self._draws.random()
        plant = self.plant
        hazard = plant.hazard
        if isinstance(hazard, Rising):
            hazard = hazard.per_1k_context * context_tokens / 1000
        behind = self.turns > plant.after.turns and context_tokens >= plant.after.context_tokens
        if not (self._holds and behind and tools >= plant.min_tools and draw < hazard):
            return None
        self.struck += 1
        return plant.action
