"""``manifest.json``: what a run set out to do, written before the first request."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Plan(BaseModel):
    """The planned exposure: ``turns`` of each conversation, or ``seconds`` of load; exactly one of the two is set."""

    model_config = ConfigDict(extra="forbid")

    conversations: int
    turns: int | None = None
    seconds: float | None = None

    def text(self) -> str:
        if self.turns is not None:
            return f"{self.turns} turns" + (f" x {self.conversations}" if self.conversations > 1 else "")
        return f"{self.seconds:g} s of load"


class Manifest(BaseModel):
    """Everything that ``soak report --rejudge`` needs beside the events.

    ``settings``: what was set for the engine and what the engine itself reports. ``fingerprint``: versions and hashes.
    ``accept``: the named leniencies. ``simulated``: a planted fault may take part. ``text_kept``: whether requests are
    on disk in full (synthetic loads) or by reference (transcripts without --keep-text).
    """

    model_config = ConfigDict(extra="forbid")

    schema_: int = 1
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
    simulated: bool = False
    settings: dict[str, Any] = {}
    fingerprint: dict[str, Any] = {}
    host: dict[str, Any] = {}
