"""The hot profile: how often each expert of each offloaded layer was routed to. JSON, written and read by the engine.

``{"schema": "soakrig.hot_profile/1", "model": NAME, "offload_gb": x|null, "experts": E, "steps": n,
"counts": {"0": [E whole numbers], ...}}``: keys are the model's layer numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field, model_validator

from .json_file import JsonFile, LayerKey, as_data, read_json_file, write_whole

SCHEMA = "soakrig.hot_profile/1"
_MOST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class HotProfile:
    """``counts`` by layer number: int64 [experts], how many layer-steps routed to each; ``steps``: engine steps
    counted.

    ``model`` and ``offload_gb`` (CPU_OFFLOAD_GB in GiB, None where it was not set) are those it was taken at.
    """

    model: str
    offload_gb: float | None
    experts: int
    steps: int
    counts: Mapping[int, NDArray[np.int64]]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that were offloaded when it was taken."""
        return tuple(sorted(self.counts))

    def hottest(self, layer: int, most: int) -> tuple[int, ...]:
        """At most ``most`` experts of a layer that were routed to at all, hottest first, ties to the lower number."""
        counts = self.counts.get(layer)
        if counts is None:
            return ()
        order = np.argsort(-counts, kind="stable")[:most]
        return tuple(int(expert) for expert in order if counts[expert] > 0)


class _File(JsonFile):
    schema_: Literal["soakrig.hot_profile/1"] = Field(alias="schema")
    model: Annotated[str, Field(min_length=1)]
    offload_gb: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None
    experts: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=0)]
    counts: dict[LayerKey, list[Annotated[int, Field(ge=0, le=_MOST)]]]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for layer, counts in self.counts.items():
            if len(counts) != self.experts:
                raise ValueError(f"layer {layer} has {len(counts)} counts, and {self.experts} experts")
        return self


def read_profile(path: str) -> HotProfile:
    """Raises UsageError for anything that is no profile; whether it fits a model is the plan's question."""
    file = read_json_file(path, _File, "hot profile")
    counts = {int(layer): np.array(counts, dtype=np.int64) for layer, counts in file.counts.items()}
    return HotProfile(file.model, file.offload_gb, file.experts, file.steps, counts)


def write_profile(path: str, profile: HotProfile) -> None:
    """Write the file whole or not at all. Raises ValueError for what is no profile, OSError."""
    file = _File(
        schema=SCHEMA,
        model=profile.model,
        offload_gb=profile.offload_gb,
        experts=profile.experts,
        steps=profile.steps,
        counts={str(layer): profile.counts[layer].tolist() for layer in profile.layers},
    )
    write_whole(path, orjson.dumps(as_data(file)) + b"\n")
