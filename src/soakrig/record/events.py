"""The events of a run, one JSON object a line in ``events.jsonl``.

``time`` is seconds since the epoch (for people), ``mono`` seconds of the monotonic clock of the machine that ran it
(for arithmetic). Everything that a verdict says is derived from these lines alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from soakrig.errors import RecordError
from soakrig.record.finding import Finding
from soakrig.record.outcome import OutcomeName
from soakrig.record.signal import Signal, SourceName, SourceState

_STRICT = ConfigDict(extra="forbid")


@dataclass(slots=True)
class TurnSent:
    """A request is about to leave. ``context_tokens`` is what the tool expects the prompt to measure (an estimate)."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    time: float
    mono: float
    conversation: int
    turn: int
    context_tokens: int
    body_bytes: int
    kind: Literal["sent"] = "sent"


@dataclass(slots=True)
class TurnDone:
    """A turn is over. Times are seconds from the request's sending; None where the thing never came.

    ``counted`` says where ``output_tokens`` comes from: the engine's ``usage``, or ``deltas`` counted by the tool.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    time: float
    mono: float
    conversation: int
    turn: int
    outcome: OutcomeName
    why: str = ""
    status: int | None = None
    finish_reason: str | None = None
    duration_s: float = 0.0
    ttft_s: float | None = None
    first_answer_s: float | None = None
    last_token_s: float | None = None
    gap_max_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted: Literal["usage", "deltas"] = "deltas"
    deltas: int = 0
    response_bytes: int = 0
    tool_calls: int = 0
    context_tokens: int = 0
    accepted: list[str] = field(default_factory=list[str])
    kind: Literal["turn"] = "turn"


@dataclass(slots=True)
class SignalSeen:
    """A watcher saw something."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    time: float
    mono: float
    signal: Signal
    kind: Literal["signal"] = "signal"


@dataclass(slots=True)
class SampleTaken:
    """Figures of one moment from one source."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    time: float
    mono: float
    source: SourceName
    values: dict[str, float]
    kind: Literal["sample"] = "sample"


@dataclass(slots=True)
class SourceChanged:
    """A source came, went, or lost records."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    time: float
    mono: float
    state: SourceState
    kind: Literal["source"] = "source"


@dataclass(slots=True)
class EngineChecked:
    """The engine was asked whether it lives (None: it could not be found out). Written when it was found dead, and once
    at the end of a run.

    ``conversation`` and ``turn`` name the turn after which it was asked; ``how`` says by what evidence.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    time: float
    mono: float
    alive: bool | None
    how: str
    exit_status: int | None = None
    conversation: int | None = None
    turn: int | None = None
    kind: Literal["engine"] = "engine"


@dataclass(slots=True)
class ToolLagged:
    """The tool's own event loop stood still for ``seconds`` longer than asked: its fault, not the engine's."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    time: float
    mono: float
    seconds: float
    kind: Literal["lag"] = "lag"


@dataclass(slots=True)
class Note:
    """Something a reader of the run should know and no verdict depends on."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    time: float
    mono: float
    text: str
    kind: Literal["note"] = "note"


@dataclass(slots=True)
class FindingMade:
    """A reproducer's own judge found something out."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    time: float
    mono: float
    finding: Finding
    kind: Literal["finding"] = "finding"


@dataclass(slots=True)
class EngineSwitched:
    """This tool ended the engine, or started it again, because the load asks for it: no fault of the engine's.

    ``pid``: of the one that was started, where known; ``how``: in words.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    time: float
    mono: float
    action: Literal["ended", "started"]
    how: str = ""
    pid: int | None = None
    kind: Literal["switch"] = "switch"


EndReason = Literal[
    "completed", "engine_dead", "fault", "too_many_bad", "interrupted", "stopped", "store", "tool_error"
]


@dataclass(slots=True)
class RunEnded:
    """The last event of a run that was not cut off."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    time: float
    mono: float
    reason: EndReason
    detail: str = ""
    kind: Literal["end"] = "end"


Event = (
    TurnSent
    | TurnDone
    | SignalSeen
    | SampleTaken
    | SourceChanged
    | EngineChecked
    | EngineSwitched
    | ToolLagged
    | FindingMade
    | Note
    | RunEnded
)

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def dump(event: Event) -> bytes:
    """The event as one line of JSON with its newline."""
    return orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)


def parse(line: bytes | str, *, where: str = "line") -> Event:
    """One line of ``events.jsonl``. Raises ``RecordError`` naming ``where`` when it is no event of ours."""
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        first: Any = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RecordError(
            f"{where} is no event of a run: {first['msg']}" + (f" at {place}" if place else ""),
            remedy="The file may come from a newer soakrig, or may have been edited.",
        ) from error
