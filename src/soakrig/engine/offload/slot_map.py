"""The slot map: how many slots each offloaded layer gets. JSON, written by the planner.

``{"schema": "soakrig.slots/1", "experts": 32, "slots": {"0": 8, "1": 12}}``: keys are the model's layer numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import orjson
from pydantic import Field, model_validator

from .json_file import JsonFile, LayerKey, as_data, read_json_file, write_whole

SCHEMA = "soakrig.slots/1"


@dataclass(frozen=True, slots=True)
class SlotMap:
    """``slots`` by layer number, each 0 to ``experts``, the routed experts of one layer."""

    experts: int
    slots: Mapping[int, int]


class _File(JsonFile):
    schema_: Literal["soakrig.slots/1"] = Field(alias="schema")
    experts: Annotated[int, Field(ge=1)]
    slots: dict[LayerKey, Annotated[int, Field(ge=0)]] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for layer, slots in self.slots.items():
            if slots > self.experts:
                raise ValueError(f"layer {layer} is given {slots} slots, and has {self.experts} experts")
        return self


def read_slot_map(path: str) -> SlotMap:
    """Raises UsageError for anything that is no slot map; whether it fits a model is the plan's question."""
    file = read_json_file(path, _File, "slot map")
    return SlotMap(file.experts, {int(layer): slots for layer, slots in file.slots.items()})


def write_slot_map(path: str, slot_map: SlotMap) -> None:
    """Write the file whole or not at all. Raises ValueError for what is no slot map, OSError."""
    file = _File(
        schema=SCHEMA,
        experts=slot_map.experts,
        slots={str(layer): slots for layer, slots in sorted(slot_map.slots.items())},
    )
    write_whole(path, orjson.dumps(as_data(file)) + b"\n")
