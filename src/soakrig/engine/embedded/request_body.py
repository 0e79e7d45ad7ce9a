"""What a client may send: the request bodies of the OpenAI-compatible endpoints, checked by name.

An unknown field is refused. A field that OpenAI or vLLM know but this engine does not implement is taken only with a
value that asks for nothing.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "use_beam_search": (None, False),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "return_token_ids": (None, False),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "chat_template": (None,),
    "documents": (None, []),
    "priority": (None, 0),
    "allowed_token_ids": (None,),
    "thinking_token_budget": (None,),
}
"""Field -> the values that change nothing."""
IGNORED = {
    "user", "metadata", "store", "service_tier", "request_id", "prompt_cache_key", "safety_identifier", "cache_salt",
    "reasoning_effort", "include_reasoning", "verbosity", "truncate_prompt_tokens",
}  # fmt: skip
"""Fields that say something about the caller, or that ask for an effort which random weights do not have."""
_IGNORED_VALUES: dict[str, tuple[Any, ...]] = {"truncate_prompt_tokens": (None,), "include_reasoning": (None, True)}


class RequestError(Exception):
    """A request that is refused, as the OpenAI error object and its status."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: Any = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": status if code is None else code}
        }


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Body):
    """``stream_options``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ContentPart(_Body):
    """One part of a message whose content is a list; text only."""

    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    """Name and JSON arguments of a call in the history."""

    name: str
    arguments: str


class ToolCall(_Body):
    """A call in the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Message(_Body):
    """One message; reasoning is taken under both names."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(_Body):
    """A function on offer; ``parameters`` is its JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """One entry of ``tools``."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(_Body):
    """The name in a ``tool_choice`` object."""

    name: str


class NamedTool(_Body):
    """``tool_choice`` as an object."""

    type: Literal["function"] = "function"
    function: NamedFunction


class Generation(_Body):
    """What both endpoints share. ``top_k`` 0 and -1 both mean all."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    stop: list[str] = Field(default_factory=list[str])
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("temperature", "top_p", "top_k", "stream", "min_tokens", "ignore_eos", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        return [] if value is None else [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _streamed_only(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs is not available with stream: true")
        return self


class ChatRequest(Generation):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, value: Any) -> Any:
        return False if value is None else value

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError(f"tools holds the name {next(n for n in names if names.count(n) > 1)!r} more than once")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required, but there are no tools")
        thinking = (self.chat_template_kwargs or {}).get("enable_thinking", True)
        if not isinstance(thinking, bool):
            raise ValueError("chat_template_kwargs.enable_thinking is true or false")  # noqa: TRY004 - pydantic's contract
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def thinking(self) -> bool:
        return bool((self.chat_template_kwargs or {}).get("enable_thinking", True))


class CompletionRequest(Generation):
    """The body of ``/v1/completions``."""

    prompt: str | list[Annotated[int, Field(ge=0)]] | list[str]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], str):
            if len(value) > 1:
                raise ValueError("one prompt a request; a list of several is not implemented")
            return value[0]
        return value


class TokenizeRequest(_Body):
    """The body of ``/tokenize``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages was expected")
        return self


Model = TypeVar("Model", bound=_Body)


def parse(raw: bytes, model: type[Model]) -> Model:
    """A request body as ``model``. Raises RequestError (400) naming the field and what was expected."""
    try:
        body: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is a JSON {type(body).__name__}, an object was expected")
    fields = cast(dict[str, Any], body)
    for name in [name for name in fields if name not in model.model_fields]:
        value = fields.pop(name)
        allowed = NEUTRAL.get(name) or _IGNORED_VALUES.get(name)
        if name in NEUTRAL or name in _IGNORED_VALUES:
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed or ()):
                raise RequestError(
                    f"{name} is not implemented by this engine; only {allowed!r} is accepted, {value!r} was sent",
                    param=name,
                )
        elif name not in IGNORED:
            known = [*model.model_fields, *NEUTRAL, *IGNORED]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; {near[0]} was probably meant" if near else ""
            raise RequestError(f"{name} is no field of this request{hint}", param=name, code="unknown_parameter")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        count = error.error_count()
        more = f" (and {count - 1} more)" if count > 1 else ""
        raise RequestError(f"{where + ': ' if where else ''}{first['msg']}{more}", param=where or None) from error
