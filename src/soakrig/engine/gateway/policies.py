"""What the gateway may do for one model. Every policy is off unless it is turned on by name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, ValidationError, field_validator

from soakrig.errors import UsageError

Tokens = Annotated[StrictInt, Field(ge=1, lt=1 << 31)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ThinkingBudget(_Table):
    """``thinking_token_budget`` of a request: the least of ``fixed`` tokens and ``share`` of its output budget."""

    fixed: Tokens
    share: Annotated[StrictFloat, Field(gt=0.0, le=1.0)] = 1.0


class Preset(_Table):
    """What a model alias stands for: defaults that fill gaps of a request and replace nothing in it."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    reasoning_effort: str | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _is_json(cls, table: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(table, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"this is no JSON, and requests are: {error}") from error
        return table


class Policies(_Table):
    """One model's policies; ``docs/gateway.md`` shows each by an example."""

    restore_reasoning: StrictBool = False
    min_output_tokens: Tokens | None = None
    thinking_token_budget: ThinkingBudget | None = None
    presets: dict[Annotated[str, Field(min_length=1)], Preset] = Field(default_factory=dict[str, Preset])
    effort_words: dict[str, str] = Field(default_factory=dict[str, str])
    """Word that a client sends as its effort -> word that the model's template knows."""
    sanitize_tool_tags: StrictBool = False
    mirror_content: StrictBool = False
    capture: StrictBool = False
    """The first of two consents; the other is a folder to write to."""

    @property
    def edits_answers(self) -> bool:
        """Whether an answer has to be read, so that it has to come unpacked."""
        return self.restore_reasoning or self.sanitize_tool_tags or self.mirror_content

    @property
    def edits_requests(self) -> bool:
        """Whether a request may be changed."""
        return bool(
            self.restore_reasoning
            or self.min_output_tokens
            or self.thinking_token_budget
            or self.presets
            or self.effort_words
            or self.sanitize_tool_tags
        )


def read_policies(table: Mapping[str, Any], where: str) -> Policies:
    """A table as policies. Raises UsageError that names the key, what was expected, and the nearest known name."""
    try:
        return Policies.model_validate(dict(table))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        names = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            known = _fields(names[:-1])
            near = difflib.get_close_matches(names[-1], known, n=1)
            meant = f"; {near[0]} was probably meant" if near else ""
            raise UsageError(
                f"{where}: {'.'.join(names)} is no policy{meant}", remedy=f"Known here: {', '.join(known)}."
            ) from error
        got = f" ({first['input']!r:.80} was read)" if first["type"] != "missing" else ""
        raise UsageError(f"{where}: {'.'.join(names)}: {first['msg']}{got}") from error


def parse_policies(texts: Sequence[str]) -> Policies:
    """``NAME`` or ``NAME=VALUE`` of the command line; VALUE is JSON (a number, an object), or a plain word.

    ``thinking_token_budget`` also takes ``FIXED`` and ``FIXED,SHARE``. Raises UsageError as ``read_policies``.
    """
    table: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name in table:
            raise UsageError(f"--policy {name} is given twice", remedy="Give it once.")
        table[name] = _value(name, value) if equals else True
    return read_policies(table, "--policy")


def _value(name: str, text: str) -> Any:
    if name == "thinking_token_budget" and not text.lstrip().startswith("{"):
        fixed, comma, share = text.partition(",")
        try:
            return {"fixed": int(fixed), "share": float(share) if comma else 1.0}
        except ValueError as error:
            raise UsageError(f"--policy {name}={text}: expected FIXED or FIXED,SHARE, as in 10000,0.75") from error
    try:
        return json.loads(text)
    except ValueError:
        return text


def _fields(path: Sequence[str]) -> list[str]:
    """Known keys of the table at ``path`` within the policies."""
    if path[:1] == ["presets"]:
        return list(Preset.model_fields)
    if path[:1] == ["thinking_token_budget"]:
        return list(ThinkingBudget.model_fields)
    return list(cast(dict[str, Any], Policies.model_fields))
