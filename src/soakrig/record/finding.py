"""A finding: what a judge beyond turns and signals found out (a perplexity, a drift, a leftover process)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

FigureKind = Literal["measured", "derived", "modelled"]
Weight = Literal["fault", "unknown", "clean", "note"]
"""fault: fails a run. unknown: makes it inconclusive. clean: was looked at and is as it should be. note: for people."""


@dataclass(slots=True)
class Finding:
    """One figure and what it says.

    ``name``: short and the same in every run, as the fault's signature is ``finding NAME``. ``text``: a sentence.
    ``value`` and ``unit``: the figure, None where it could not be had; ``kind``: where it comes from. ``bound``: what
    it was held against, in words, empty where against nothing. ``conversation`` and ``turn``: where it belongs to one.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    name: str
    text: str
    value: float | None = None
    unit: str = ""
    kind: FigureKind = "measured"
    bound: str = ""
    says: Weight = "note"
    conversation: int | None = None
    turn: int | None = None


def finding_signature(name: str) -> str:
    """Signature of a fault that a finding alone shows: ``finding prefix-drift``."""
    return f"finding {name}"
