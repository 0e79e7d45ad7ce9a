"""``result.json``: what a run came to. Other people's scripts read it: fields are added, never changed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from soakrig.record.finding import Finding
from soakrig.record.signal import SOURCE_NAMES, SourceName

SCHEMA: Literal[1] = 1

VerdictName = Literal["pass", "fail", "inconclusive"]

EXIT_CODES: dict[VerdictName, int] = {"pass": 0, "fail": 1, "inconclusive": 2}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Exposure(_Part):
    """Work done under watch. ``busy_seconds``: time with at least one turn in flight."""

    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    busy_seconds: float = 0.0


class FirstBad(_Part):
    """The first turn that was not ok."""

    conversation: int
    turn: int
    outcome: str
    why: str = ""


class Fault(_Part):
    """One incident, named after its headline. ``turn`` and what follows say what was in flight when it came.

    ``attribution``: ``exact`` (one turn in flight at that moment), ``several`` (the oldest of several), ``nearest``
    (none in flight: the last that was) or ``none``.
    """

    signature: str
    xid: int | None = None
    pci: str | None = None
    pid: int | None = None
    process: str | None = None
    source: str
    time: float
    turn: int | None = None
    conversation: int | None = None
    context_tokens: int | None = None
    seconds_under_load: float = 0.0
    raw: str
    injected: bool = False
    attribution: Literal["exact", "several", "nearest", "none"] = "none"
    in_flight: list[tuple[int, int]] = []
    signals: int = 1
    advice: str = ""


class EngineEnd(_Part):
    """``died_after_turn``: the last turn that was ok before the engine was found dead (of the conversation that found
    it); 0 when none was, None when it lives."""

    alive: bool | None = None
    exit_status: int | None = None
    died_after_turn: int | None = None
    how: str = ""


class Quantiles(_Part):
    """Seconds; None without a value."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Rates(_Part):
    """Tokens a second; p10 is the slow end."""

    p10: float | None = None
    p50: float | None = None
    p90: float | None = None


class Latency(_Part):
    """Of ok turns only; ``left_out`` counts the others. Measured by this tool, monotonic clock."""

    ttft_s: Quantiles = Quantiles()
    first_answer_s: Quantiles = Quantiles()
    decode_tokens_per_s: Rates = Rates()
    throughput_tokens_per_s: float | None = None
    turns: int = 0
    left_out: int = 0
    counted: Literal["usage", "deltas", "mixed", "none"] = "none"


class Source(_Part):
    """How well one source was watched, over the whole run; see ``record.signal.SourceState``."""

    state: Literal["live", "partial", "absent"] = "absent"
    detail: str = "not asked for"
    lost: int = 0


class Hazard(_Part):
    """``upper_95``: one-sided 95 % upper bound on the chance of a fault per ``unit`` (Clopper-Pearson)."""

    unit: Literal["turn"] = "turn"
    faults: int = 0
    exposure: int = 0
    upper_95: float | None = None


class HitRate(_Part):
    """Three rates that differ, each from 0 to 1: of routed accesses (duplicates counted), of different experts of a
    layer's step, and of a layer's steps that missed nothing. None where there was nothing to count."""

    per_access: float | None = None
    per_unique: float | None = None
    per_step: float | None = None


class OffloadPath(_Part):
    """Rates of one path; ``misses_per_step_per_layer`` counts different experts."""

    hit_rate: HitRate = HitRate()
    misses_per_step_per_layer: float | None = None


class Offload(_Part):
    """The engine's expert cache over the run, from its own counters, summed over the layers whose experts leave the
    device (``bad_ids`` over all layers).

    ``kind``: ``measured``, or ``uncontrolled`` where the cold start is in it or the engine was restarted. Rates are of
    small steps, where the cache's policy acts; ``large`` has those of prefill chunks. ``bytes_moved`` is of both.
    """

    kind: Literal["measured", "uncontrolled"]
    first_step: int
    last_step: int
    hit_rate: HitRate
    misses_per_step_per_layer: float | None
    large: OffloadPath
    bytes_moved: int
    bad_ids: int
    counters: dict[Literal["small", "large"], dict[str, int]]


class GateResult(_Part):
    """``held`` is None when the figure could not be had."""

    gate: str
    value: float | None
    held: bool | None


class ToolHealth(_Part):
    """The load generator's own state, so that it cannot pass for the engine's."""

    lag_max_s: float = 0.0
    lags: int = 0


class Result(_Part):
    """The whole of ``result.json``. ``unknown``: those of the reasons that say what could not be seen or done, also in
    a fail. ``findings``: what a reproducer's own judge found out, in order."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal[1] = SCHEMA
    run_id: str
    verdict: VerdictName
    exit_code: int
    reasons: list[str]
    unknown: list[str] = []
    simulated: bool
    exposure: Exposure
    outcomes: dict[str, int]
    first_bad: FirstBad | None
    faults: list[Fault]
    engine: EngineEnd
    latency: Latency
    sources: dict[SourceName, Source]
    hazard: Hazard
    gates: list[GateResult]
    tool: ToolHealth
    offload: Offload | None = None
    findings: list[Finding] = []
    accepted: dict[str, int]
    ended: str
    settings: dict[str, Any]
    fingerprint: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain data with the contract's names."""
        data = self.model_dump(mode="json")
        return {"schema": data.pop("schema_"), **data}

    @classmethod
    def from_json(cls, data: object) -> Result:
        """Read it back. Raises ``ValueError`` for anything that is no consistent result of this schema."""
        if not isinstance(data, dict):
            raise ValueError("it is no JSON object")  # noqa: TRY004  (a reader of files catches ValueError)
        fields = {name: value for name, value in data.items() if name != "schema"}
        result = cls.model_validate({"schema_": data.get("schema"), **fields})
        if result.exit_code != EXIT_CODES[result.verdict]:
            raise ValueError(f"verdict {result.verdict!r} and exit code {result.exit_code} contradict each other")
        return result


def no_sources() -> dict[SourceName, Source]:
    """Every source, none of them seen."""
    return {name: Source() for name in SOURCE_NAMES}
