"""Deadlines of a launch's phases, as a campaign's file has them: seconds, or a text such as 90m."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from soakrig.errors import UsageError
from soakrig.record.duration import parse_duration


def _seconds(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_duration(value)
        except UsageError as error:
            raise ValueError(f"{error.message}; 8h, 90m or 1h30m was expected") from error
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, lt=1e9)]


class Limits(BaseModel):
    """Deadlines of the phases of a launch, in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    start: Annotated[Seconds, Field(gt=0)] | None = None
    run: Annotated[Seconds, Field(gt=0)] | None = None
    stall: Annotated[Seconds, Field(gt=0)] = 120.0
    first_byte: Annotated[Seconds, Field(gt=0)] = 1800.0
    teardown: Annotated[Seconds, Field(gt=0)] = 120.0
    cooldown: Seconds = 0.0
    max_bad: int = Field(default=1, ge=1, lt=1 << 31)
