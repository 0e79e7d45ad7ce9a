"""What two runs came to side by side: the object of ``soak compare --json``. Fields are added, never changed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from soakrig.record.campaign import Span

COMPARISON_SCHEMA: Literal[1] = 1
Answer = Literal["lower", "higher", "no difference shown", "cannot tell"]
"""Of B against A. "No difference shown" is not "the same": the interval says how large one could be."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Side(_Part):
    """One of the two runs. ``faults`` in ``exposure`` turns; ``rate`` per turn with its exact 95 % interval."""

    run_id: str
    folder: str
    verdict: str
    exit_code: int
    ended: str
    simulated: bool
    exposure: int
    faults: int
    rate: Span
    signatures: dict[str, int]


class HazardChange(_Part):
    """Faults per turn of B over A's, exact (``bisect.statistics.ratio_interval``); derived. ``ratio`` None: neither
    faulted."""

    answer: Answer
    ratio: Span | None
    why: str


class LatencyChange(_Part):
    """One figure in turns that both runs have, ok in both. ``a``, ``b``: medians of those turns, measured. ``ratio``: B
    over A (Hodges and Lehmann's estimate over pairs, with the interval of Wilcoxon's signed-rank test); None below
    ``LEAST_PAIRS`` pairs. ``left_out``: turns that have no partner."""

    figure: Literal["ttft_s", "decode_tokens_per_s"]
    answer: Answer
    pairs: int
    left_out: int
    a: float | None
    b: float | None
    ratio: Span | None
    kind: Literal["uncontrolled"] = "uncontrolled"


class Difference(_Part):
    """Something that is set otherwise; ``-`` where a run does not have it."""

    name: str
    a: str
    b: str


class Comparison(_Part):
    """``comparable``: whether the figures may stand beside one another; ``why_not`` has every reason against it.
    ``outcomes``: counts of turns by outcome, A's and B's."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal[1] = COMPARISON_SCHEMA
    comparable: bool
    exit_code: int
    why_not: list[str]
    simulated: bool
    a: Side
    b: Side
    outcomes: dict[str, tuple[int, int]]
    hazard: HazardChange
    latency: list[LatencyChange]
    differences: list[Difference]

    def to_json(self) -> dict[str, Any]:
        """Plain data with the contract's names."""
        data = self.model_dump(mode="json")
        return {"schema": data.pop("schema_"), **data}
