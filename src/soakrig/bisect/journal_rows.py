"""The rows of a journal as Python has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

from soakrig.bisect.evidence import ArmRun
from soakrig.bisect.run_states import RunResult, RunState


@dataclass(frozen=True)
class Turn:
    """A turn that ended. ``number``: within its conversation. ``outcome``: as the soak classed it. ``exposure``: what
    it adds to the run's, 1 where turns are counted, else its generated tokens."""

    number: int
    outcome: str
    exposure: float = 1.0
    conversation: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def row(self) -> tuple[int, int, str, float, str]:
        """As table ``turns`` has it, between run and time."""
        return self.conversation, self.number, self.outcome, self.exposure, orjson.dumps(dict(self.detail)).decode()

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        conversation, number, outcome, exposure, detail = row
        return cls(number, outcome, exposure, conversation, orjson.loads(detail))


@dataclass(frozen=True)
class Note:
    """A state that a run came into (``is_state``), an intent, or a fact; ``run`` is None for the campaign's own.
    ``time``: seconds since the epoch. ``boot_id``: of the host that it is about."""

    run: int | None
    what: str
    is_state: bool
    time: float
    boot_id: str
    detail: Mapping[str, Any]

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        run, what, is_state, time, boot_id, detail = row
        return cls(run, what, bool(is_state), time, boot_id, orjson.loads(detail))


@dataclass(frozen=True)
class RunRow:
    """A run as it stands. ``id``: its place among the launches. ``boot_id``: of the boot it was launched on, empty
    before. ``exposure``: of the result, before it the sum of its turns. ``turns``: how many ended. ``folder``: the
    name of its run folder, empty until known."""

    id: int
    arm: str
    stratum: str
    cap: float
    state: RunState
    boot_id: str
    result: RunResult | None
    exposure: float
    signature: str | None
    reason: str
    folder: str
    why: str
    planned_at: float
    turns: int

    def evidence(self) -> ArmRun:
        """As the statistics take it. Interrupted or without any work done, it is void: it proves nothing."""
        void = ""
        if self.result in ("void", "interrupted") or self.result is None:
            void = self.reason or "no result"
        elif self.exposure <= 0:
            void = f"{self.result} before the first turn" + (f": {self.reason}" if self.reason else "")
        exposure = min(self.exposure, self.cap)
        return ArmRun(self.arm, exposure, self.cap, self.id, None if void else self.signature, void, self.stratum)


RUNS = """
SELECT id, arm, stratum, cap, state, boot_id, result, coalesce(runs.exposure, sum(turns.exposure), 0.0), signature,
       reason, folder, why, planned_at, count(turns.run)
FROM runs LEFT JOIN turns ON turns.run = runs.id WHERE {} GROUP BY runs.id ORDER BY runs.id
"""
"""Runs as ``run_row`` reads them; {}: which ones."""


def run_row(row: Sequence[Any]) -> RunRow:
    """A row of ``RUNS``."""
    return RunRow(*row)
