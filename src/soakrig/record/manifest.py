"""``manifest.json``: what a run set out to do, written before the first request."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Plan(BaseModel):
    """The planned exposure: ``turns`` of each conversation, or ``seconds`` of load; exactly one of the two is set.

    ``lanes``: how many turns each conversation of a transcript has, where it is sent once and not over again.
    """

    model_config = ConfigDict(extra="forbid")

    conversations: int = Field(ge=1)
    turns: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)
    lanes: list[int] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Plan:
        if (self.turns is None) == (self.seconds is None):
            raise ValueError("a plan has either turns or seconds")
        return self

    @property
    def total_turns(self) -> int:
        """Turns of all conversations together; 0 where the plan is in seconds."""
        if self.lanes is not None:
            return sum(self.lanes)
        return (self.turns or 0) * self.conversations

    def text(self) -> str:
        if self.lanes is not None:
            return f"{self.total_turns} turns"
        if self.turns is not None:
            return f"{self.turns} turns" + (f" x {self.conversations}" if self.conversations > 1 else "")
        return f"{self.seconds:g} s of load"


class Manifest(BaseModel):
    """Everything that ``soak report --rejudge`` needs beside the events.

    ``settings``: what was set for the engine and what the engine itself reports. ``fingerprint``: versions and hashes.
    ``load``: what was set of the reproducer's load, empty where it was not recorded or is a transcript's.
    ``accept``: the named leniencies. ``simulated``: a planted fault may take part. ``text_kept``: whether requests are
    on disk in full (synthetic loads) or by reference (transcripts without --keep-text).
    """

    model_config = ConfigDict(extra="forbid")

    schema_: Literal[1] = 1
    run_id: str
    created: float
    reproducer: str
    plan: Plan
    seed: int
    gates: list[str] = []
    accept: list[str] = []
    base_url: str
    model: str
    launched: Literal["embedded", "vllm"] | None = None
    kernel_log: str = "auto"
    stall_timeout_s: float = 120.0
    text_kept: bool = True
    transcript: dict[str, Any] | None = None
    load: dict[str, Any] = {}
    simulated: bool = False
    settings: dict[str, Any] = {}
    fingerprint: dict[str, Any] = {}
    host: dict[str, Any] = {}

    @property
    def resend_from(self) -> str | None:
        """The transcript that sends this run again where its own folder cannot; None where the folder can."""
        return str(self.transcript.get("path")) if self.transcript is not None and not self.text_kept else None
