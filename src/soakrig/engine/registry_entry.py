"""One model of the registry: what its table in models.toml may say, and what follows from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from soakrig.engine.gateway.policies import Policies
from soakrig.engine.launch_values import LaunchValues, check_condition, flag_key, flag_value
from soakrig.engine.launcher import MARK
from soakrig.engine.planning.fit import Need, host_need, kv_cache
from soakrig.engine.planning.quantity import Figure

NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}\Z")
MADE_HERE = "tiny-moe"
"""The checkpoint that this tool makes itself."""
CONTEXT, KV_CAP, UTILISATION = "--max-model-len", "--kv-cache-memory-bytes", "--gpu-memory-utilization"
SHUTDOWN, SERVED_NAME = "--shutdown-timeout", "--served-model-name"
OFFLOAD_FLAG, OFFLOAD_VARIABLE = "--cpu-offload-gb", "CPU_OFFLOAD_GB"
STOP_MARGIN_S = 5.0
"""What an engine gets beyond its own ``--shutdown-timeout`` before it is killed: it has to unpin its memory, too."""
STOP_S = 10.0
_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _text(value: Any) -> Any:
    """A number as its text; anything else is for pydantic to judge. True is no number here: 1 or "true"?"""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Setting = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Text = Annotated[str, BeforeValidator(_text), Field(pattern=r"^[^\x00]*$")]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A text without control characters: a path, or a name that clients send and logs show."""
Flag = Annotated[str, Field(pattern=r"^--[^\x00=\s]+(=[^\x00]*)?$")]
Count = Annotated[int, Field(ge=1, lt=1 << 48)]
Gib = Annotated[float, Field(ge=0, lt=1 << 20)]


class Fatal(BaseModel):
    """A combination that is known to kill or to spoil this model. ``when``: name (``--flag``, ``--flag.key`` inside its
    JSON, or a variable) -> condition (``launch_values``); all have to hold. ``source``: who saw it."""

    model_config = _STRICT

    name: Annotated[str, Field(min_length=1)]
    when: Annotated[dict[str, str], Field(min_length=1)]
    why: Annotated[str, Field(min_length=1)]
    source: str = ""

    @field_validator("when")
    @classmethod
    def _conditions(cls, when: dict[str, str]) -> dict[str, str]:
        return {name: check_condition(text) for name, text in when.items()}


class Canary(BaseModel):
    """The generation that has to be answered before the model counts as ready.

    ``expect``: a regular expression that has to be found in the answer. ``accept``: ``sense`` refuses an empty answer
    and one that repeats one token; ``anything`` takes any token, for models that were never trained.
    """

    model_config = _STRICT

    prompt: Annotated[str, Field(min_length=1)] = "Answer with one word: ready."
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 16
    expect: str = ""
    accept: Literal["sense", "anything"] = "sense"
    timeout_s: Annotated[float, Field(gt=0, lt=1e5)] = 60.0

    @field_validator("expect")
    @classmethod
    def _compiles(cls, text: str) -> str:
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"{text!r} is no regular expression: {error}") from error
        return text


class Entry(BaseModel):
    """A model as the registry has it; docs/serving.md has a line for each key. Sizes are in tokens, bytes or GiB as the
    names say; ``name`` is the table's name."""

    model_config = _STRICT

    name: str
    backend: Literal["embedded", "vllm"]
    checkpoint: Line = ""
    python: Line = ""
    own_offload: bool = False
    directory: Line = ""
    served_name: Line = ""
    slot: Line = "main"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    flags: Annotated[tuple[Flag, ...], BeforeValidator(_listed)] = ()
    settings: dict[Setting, Text] = {}
    context: Count
    validated_context: Count | None = None
    longest_prefill: Count | None = None
    kv_bytes_per_token: Count | None = None
    host_ram_gib: Gib | None = None
    transient_gib: Gib = 0.0
    shm_gib: Gib | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    profile_offload_gib: Gib | None = None
    shutdown_timeout: Annotated[int, Field(ge=0, le=3600)] | None = None
    start_timeout: Annotated[float, Field(gt=0, lt=1e6)] | None = None
    canary: Canary = Canary()
    policies: Policies = Policies()
    fatal: Annotated[tuple[Fatal, ...], BeforeValidator(_listed)] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not NAME.match(self.name):
            raise ValueError("a name has small letters, digits, dots, dashes and underscores, 64 at most")
        if self.backend == "embedded":
            given = [key for key in ("checkpoint", "python", "own_offload") if getattr(self, key)]
            if given:
                raise ValueError(f"{given[0]} is for backend vllm; the embedded engine brings its own")
        elif not self.checkpoint:
            raise ValueError("backend vllm needs a checkpoint: a folder, a hub's name, or tiny-moe")
        if self.directory and not self.directory.startswith(("/", "~/")):
            raise ValueError(f"directory {self.directory!r} is relative to nothing; it begins with / or ~/")
        if MARK in self.settings:
            raise ValueError(f"{MARK} is how this tool finds its processes again, and no setting of a model")
        if self.longest_prefill and self.validated_context and self.longest_prefill > self.validated_context:
            raise ValueError(
                f"longest_prefill {self.longest_prefill} is above validated_context {self.validated_context}"
            )
        owners = {CONTEXT: "context", SERVED_NAME: "served_name", "--port": "port"}
        if self.backend == "vllm":
            owners |= {SHUTDOWN: "shutdown_timeout", UTILISATION: "gpu_memory_utilization"}
        for flag in self.flags:
            for name, key in owners.items():
                if flag_key(flag) == flag_key(name):
                    raise ValueError(f"{flag} is what the key {key} says; give {key} instead")
        return self

    @property
    def model_name(self) -> str:
        """The name that clients ask for."""
        return self.served_name or self.name

    @property
    def kv_cap_bytes(self) -> int | None:
        """Bytes of KV cache that the context comes to; None where the registry has no bytes per token."""
        return None if self.kv_bytes_per_token is None else int(kv_cache(self.context, self.kv_bytes_per_token).value)

    @property
    def rendered_flags(self) -> tuple[str, ...]:
        """The flags that follow from the keys, then the table's own."""
        own = [f"{SERVED_NAME}={self.model_name}", f"{CONTEXT}={self.context}"]
        if self.backend == "vllm":
            if self.kv_cap_bytes is not None and flag_value(self.flags, KV_CAP) is None:
                own.append(f"{KV_CAP}={self.kv_cap_bytes}")
            if self.gpu_memory_utilization is not None:
                own.append(f"{UTILISATION}={self.gpu_memory_utilization:g}")
            if self.shutdown_timeout is not None:
                own.append(f"{SHUTDOWN}={self.shutdown_timeout}")
        return (*own, *self.flags)

    @property
    def values(self) -> LaunchValues:
        """Settings and rendered flags, by name."""
        return LaunchValues(self.settings, self.rendered_flags)

    @property
    def offload_gib(self) -> float:
        """GiB of weights that leave the device, 0 where none do. Raises ValueError for a text that is no number."""
        for name in (OFFLOAD_VARIABLE, OFFLOAD_FLAG):
            if (value := self.values.number(name)) is not None:
                return value
        return 0.0

    @property
    def host_need(self) -> Need | None:
        """Host memory that a launch takes: as declared, else what is offloaded and ``transient_gib``; None where the
        registry knows neither. Raises ValueError as ``offload_gib``."""
        if self.host_ram_gib is not None:
            return Need((Figure.of(self.host_ram_gib, "GiB", "measured", "as declared"),))
        if not self.offload_gib:
            return None
        return host_need(Figure.of(self.offload_gib, "GiB"), Figure.of(self.transient_gib, "GiB"))

    @property
    def host_need_gib(self) -> float | None:
        """The same in GiB."""
        return None if self.host_need is None else self.host_need.total.to("GiB")

    @property
    def stop_s(self) -> float:
        """Seconds between asking the engine to end and killing it."""
        return STOP_S if self.shutdown_timeout is None else self.shutdown_timeout + STOP_MARGIN_S

    def with_context(self, context: int | None) -> Self:
        """The same model at another context; the KV cap follows."""
        return self if context is None else self.model_copy(update={"context": context})


def expand(text: str, home: str) -> str:
    """A path with ``~/`` in front as one under ``home``."""
    return str(Path(home) / text[2:]) if text.startswith("~/") else text
