"""The campaign file (TOML), merged with the command line into the effective campaign.

::

    engine = "embedded"                 # embedded, tiny-moe, vllm
    model = ""                          # a checkpoint's folder, for vllm alone
    reproducer = "agent-loop"
    turns = 60                          # of each launch, per conversation; left out: the reproducer's own
    budget = "8h"                       # no launch begins after it
    confidence = 0.99                   # that no arm is wrongly cleared
    at_least = 2                        # the factor that CLEARED has to show
    signature = "Xid 31 ..."            # the fault that is looked for; left out: the control's commonest
    unit = "turns"                      # of exposure, or output_tokens
    kernel_log = "auto"                 # as of `soak run`
    port = 0                            # of every launch; 0 takes a free one
    executor = "local"                  # or ray: one arm at a time on each card of a cluster
    notify = ["json://127.0.0.1:8080"]  # apprise URLs
    allow_reboot = 0                    # reboots of a wedged host that the campaign may order
    flags = ["--threads=1"]             # fixed in every arm
    pairs = [["VLLM_MOE_DMA_STAGING", "--max-num-seqs"]]

    [load]                              # what `soak run` sets by options; left out: the reproducer's own
    tools = 50

    [load.parameters]                   # what `soak run` sets by --param

    [limits]
    start = "30m"                       # until the engine answers; left out: the engine's own
    run = "2h"                          # of the turns of one launch; left out: each turn has its own limits
    stall = "2m"                        # silence that makes a turn hung
    first_byte = "30m"
    teardown = "2m"                     # until nothing is left of an engine; then the host is wedged
    cooldown = "0s"                     # pause between two launches
    max_bad = 1                         # turns that are not ok until a launch ends

    [settings]                          # fixed in every arm
    OMP_NUM_THREADS = "1"

    [variables]                         # the control's value first; whole numbers may go without quotes
    VLLM_MOE_DMA_STAGING = [1, 0]
    VLLM_MOE_HOT_SLOTS = [{ unset = true }, 8]
    "--max-num-seqs" = [8, 1]           # "" is the bare flag, { unset = true } leaves it out

Any other key is refused by name. Unlike on the command line, values need no escapes here.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from soakrig.bisect.arms import PlannedArm, plan_arms
from soakrig.bisect.launch_result import Unit, turn_signature
from soakrig.bisect.limits import Limits, Seconds
from soakrig.bisect.registry_engine import write_out
from soakrig.bisect.variables import Variable, check_settings, check_variables, flag_key
from soakrig.bisect.verdicts import Rule
from soakrig.clock import RealClock
from soakrig.engine.bundled import EMBEDDED, Order
from soakrig.errors import RecordError, UsageError
from soakrig.record.manifest import Plan
from soakrig.record.outcome import CONTENT, OutcomeName
from soakrig.record.redaction import HIDDEN, is_secret, redact_flags, redact_settings
from soakrig.reproducers.agent_loop import AGENT_LOOP
from soakrig.reproducers.registry import find_reproducer
from soakrig.reproducers.reproducer import LoadOptions
from soakrig.soak.agent.tools import tools as tool_definitions
from soakrig.soak.conversation import AtLimit
from soakrig.soak.watch.kernel_log import KernelLogWatcher

UNSET = {"unset": True}
"""A value that is not set, in TOML and in JSON."""
_DEFAULT = LoadOptions()


def _text(value: Any) -> Any:
    """A whole number as its digits; anything else is for pydantic to judge. True is no number here: 1 or "true"?"""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _value(value: Any) -> Any:
    return None if value == UNSET else _text(value)


Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Text = Annotated[str, BeforeValidator(_text), Field(pattern=r"^[^\x00]*$")]
Flag = Annotated[str, Field(pattern=r"^-[^\x00]+$")]
"""With its value, as one word: ``--flag=value``."""
OneValue = Annotated[str | None, BeforeValidator(_value)]


class Load(BaseModel):
    """What is said of the load, as ``LoadOptions`` has it; the defaults are those of most reproducers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    conversations: int = Field(default=_DEFAULT.conversations, ge=1, lt=1 << 31)
    tools: int = _DEFAULT.tools
    seed: int = Field(default=_DEFAULT.seed, ge=0, lt=1 << 31)
    max_tokens: int = Field(default=_DEFAULT.max_tokens, ge=1, lt=1 << 31)
    temperature: float = Field(default=_DEFAULT.temperature, ge=0, le=5)
    context_limit: int | None = Field(default=_DEFAULT.context_limit, ge=1, lt=1 << 31)
    at_limit: AtLimit = _DEFAULT.at_limit
    result_scale: float = Field(default=_DEFAULT.result_scale, gt=0, lt=1e9)
    parameters: dict[str, bool | int | float | str] = {}

    @property
    def given(self) -> dict[str, Any]:
        """What somebody said of it; the rest is the reproducer's own business."""
        return self.model_dump(exclude_unset=True)


class Campaign(BaseModel):
    """The effective campaign: everything that decides which arms run and how. Immutable.

    ``turns``: cap of a launch, per conversation; where nobody says it, ``planned`` has the reproducer's own.
    ``budget``: seconds. ``confidence``: that no arm is wrongly cleared. ``at_least``: the factor that CLEARED has to
    show. ``signature``: the fault that is looked for, None for the control's commonest. ``registry``: the model of the
    registry that ``engine``, ``model``, ``python``, ``own_offload``, ``settings`` and ``flags`` were written out of.
    ``settings``, ``flags``: fixed in every arm. ``variables``: name -> values, the control's first, None for unset.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1] = 1
    engine: str = EMBEDDED
    model: str = ""
    registry: str = ""
    python: str = ""
    own_offload: bool = False
    reproducer: str = AGENT_LOOP.name
    load: Load = Load()
    limits: Limits = Limits()
    turns: int = Field(default=60, ge=1, lt=1 << 31)
    budget: Annotated[Seconds, Field(gt=0)] = 8 * 3600.0
    confidence: float = Field(default=0.99, ge=0.5, lt=1)
    at_least: float = Field(default=2.0, ge=1, le=100)
    signature: Annotated[str, Field(min_length=1)] | None = None
    unit: Unit = "turns"
    kernel_log: str = "auto"
    port: int = Field(default=0, ge=0, lt=65536)
    executor: Literal["local", "ray"] = "local"
    notify: list[str] = []
    allow_reboot: int = Field(default=0, ge=0, le=100)
    settings: dict[Name, Text] = {}
    flags: list[Flag] = []
    variables: dict[str, list[OneValue]] = {}
    pairs: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = []

    @cached_property
    def arms(self) -> tuple[PlannedArm, ...]:
        """The planned arms, the control first. Raises ``UsageError`` as ``plan_arms`` does."""
        pairs = [(one, other) for one, other in self.pairs]
        return plan_arms(self.parsed, settings=self.settings, flags=self.flags, pairs=pairs)

    @property
    def parsed(self) -> tuple[Variable, ...]:
        """The variables. Raises ``UsageError`` for a name or values that cannot be."""
        return tuple(Variable(name, tuple(values)) for name, values in self.variables.items())

    @property
    def cap(self) -> float:
        """Exposure of a launch that reaches its end; of output tokens, the most that it can reach."""
        turns = self.planned.total_turns
        return float(turns if self.unit == "turns" else turns * self.options.max_tokens)

    @property
    def planned(self) -> Plan:
        """What one launch does that reaches its end. Raises ``UsageError`` for turns of a reproducer that alone says
        how many there are; its own number is what ``to_json`` keeps."""
        reproducer, options = find_reproducer(self.reproducer), self.options
        said = self.turns if "turns" in self.model_fields_set else None
        if reproducer.plan is not None and said == reproducer.plan(options).turns:
            said = None
        return reproducer.planned(options, said, None)

    @property
    def options(self) -> LoadOptions:
        """For the reproducer's ``load``. Raises ``UsageError`` for what means nothing to it."""
        given = self.load.given
        return find_reproducer(self.reproducer).options(given, given.pop("parameters", {}))

    @property
    def tolerated(self) -> frozenset[OutcomeName]:
        """Outcomes that are no fault here: what the model wrote, unless the fault that is looked for is just that."""
        hunted = (self.signature,) if self.signature else find_reproducer(self.reproducer).signature
        return frozenset(name for name in CONTENT if not any(one.startswith(turn_signature(name)) for one in hunted))

    @property
    def rule(self) -> Rule:
        """When evidence is enough. Add-back arms are not among those that share the error: none of them is a cause."""
        judged = sum(arm.role in ("one", "all_off", "pair") for arm in self.arms)
        return Rule(confidence=self.confidence, arms=judged, at_least=self.at_least)

    def arm(self, name: str) -> PlannedArm:
        """The arm of that name. Raises ``RecordError``: a journal may be of another version's making."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise RecordError(f"the campaign has no arm {name!r}", remedy="Was its journal made by another version?")

    def order(self, arm: PlannedArm, *, caller: Mapping[str, str] | None = None, mark: str = "") -> Order:
        """What to launch for an arm, from the environment of ``caller`` (None: this process's)."""
        environment = arm.environment(os.environ if caller is None else caller)
        return Order(
            self.engine, arm.settings, arm.flags, self.model, self.port, self.limits.start, environment, mark,
            self.python, self.own_offload, self.registry,
        )  # fmt: skip

    def check(self) -> Self:
        """Itself, after everything that can be known before a launch was looked at. Raises ``UsageError``: no engine,
        reproducer or variable of that name, settings of an arm that its engine would refuse."""
        reproducer = find_reproducer(self.reproducer)
        if why := reproducer.not_in_bisect:
            what = f"{self.reproducer} cannot be the load of a bisect: {why}"
            raise UsageError(what, remedy="`soak repro list` names the others.")
        options = self.options
        if reproducer.check is not None:
            reproducer.check(options, "launched")
        _ = self.planned
        KernelLogWatcher(self.kernel_log, RealClock())
        tool_definitions(options.tools)
        for arm in self.arms:
            self.order(arm)
        known = "" if self.own_offload else self.engine  # such a build has variables of its own
        check_variables(known, self.parsed)
        for arm in self.arms:
            try:
                check_settings(known, arm.settings, arm.flags)
            except UsageError as error:
                raise UsageError(f"arm {arm.name}: {error.message}", remedy=error.remedy) from error
        return self

    def to_json(self) -> dict[str, Any]:
        """The whole of it, secrets too, as ``from_json`` reads it: for the journal."""
        data, options = self.as_said() | {"turns": self.planned.turns}, self.options
        data["load"] = {name: getattr(options, name) for name in find_reproducer(self.reproducer).uses}
        if options.parameters:
            data["load"]["parameters"] = dict(options.parameters)
        return data

    def as_said(self) -> dict[str, Any]:
        """The same with load and turns as far as anybody said them: what the reproducer usually has is not there."""
        data = self.model_dump(mode="json")
        if "turns" not in self.model_fields_set:
            del data["turns"]
        data["variables"] = {
            name: [UNSET if value is None else value for value in values] for name, values in self.variables.items()
        }
        data["load"] = self.load.given
        return data

    def shown(self) -> dict[str, Any]:
        """The same for people and reports: secret values hidden."""
        data: dict[str, Any] = self.to_json() | {
            "settings": redact_settings(self.settings),
            "flags": redact_flags(self.flags),
        }
        data["notify"] = [HIDDEN for _ in self.notify]
        for name in filter(is_secret, self.variables):
            data["variables"][name] = [value if value == UNSET else HIDDEN for value in data["variables"][name]]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` gave. Raises ``UsageError``."""
        if "minimize" in data:
            raise UsageError(
                "that is a minimisation, not a campaign", remedy="`soak repro minimize DIR` goes on with it."
            )
        return cls._read(data, "the campaign")

    @classmethod
    def _read(cls, data: Mapping[str, Any], where: str) -> Self:
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise _refusal(error, where) from error


_TABLES: dict[str, type[BaseModel]] = {"load": Load, "limits": Limits}


def read_campaign(path: Path) -> Campaign:
    """The campaign that a file asks for, with defaults for what it does not say; not checked yet, as the command line
    may add to it. Raises ``UsageError`` naming the file, the key, what was read and what was expected."""
    try:
        data = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", remedy="Give a campaign file.") from error
    except ValueError as error:  # UnicodeDecodeError and TOMLDecodeError
        raise UsageError(f"{path} is no TOML: {error}", remedy="Correct the file at that place.") from error
    return Campaign._read(data, str(path))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def merge_campaign(
    base: Campaign,
    given: Mapping[str, Any],
    *,
    load: Mapping[str, Any] | None = None,
    parameters: Mapping[str, str] | None = None,
    limits: Mapping[str, Any] | None = None,
    settings: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    variables: Sequence[Variable] = (),
    pairs: Sequence[tuple[str, str]] = (),
) -> Campaign:
    """``base`` (a file's, or ``Campaign()``) with what the command line says, which wins; checked.

    ``given``: scalar fields by name; ``load`` and ``limits``: likewise, of those tables; None stands for what was not
    given. ``parameters`` (the reproducer's) and ``settings`` replace by name, ``flags`` and ``variables`` by what they
    set, in the file's place of it; what is new comes last. ``pairs`` are added. An engine other than the file's drops
    the file's model.
    """
    data = base.as_said()
    said = {name: value for name, value in given.items() if value is not None}
    if said.get("engine", base.engine) != base.engine:
        data |= {"model": "", "python": "", "own_offload": False}
    data |= said
    data["load"] |= {name: value for name, value in (load or {}).items() if value is not None}
    if parameters:
        data["load"]["parameters"] = {**data["load"].get("parameters", {}), **parameters}
    data["limits"] |= {name: value for name, value in (limits or {}).items() if value is not None}
    data["settings"] |= settings or {}
    replaced = {flag_key(flag) for flag in flags if flag.startswith("-")}
    data["flags"] = [flag for flag in base.flags if flag_key(flag) not in replaced] + list(flags)
    data["variables"] = _merged(base.parsed, variables)
    data["pairs"] += [list(pair) for pair in pairs]
    whole = write_out(data, [*base.parsed, *variables])
    return Campaign._read(whole, "the command line").check()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _merged(old: Sequence[Variable], new: Sequence[Variable]) -> dict[str, list[Any]]:
    by_key = {one.key: one for one in old}
    for one in new:
        by_key[one.key] = one
    return {one.name: [UNSET if value is None else value for value in one.values] for one in by_key.values()}


def _refusal(error: ValidationError, where: str) -> UsageError:
    """Every fault of a file in one error."""
    found = error.errors()
    remedies = [near for one in found if (near := _near(one))]
    keys = ", ".join(name for name in Campaign.model_fields if name != "format")
    remedy = (
        " ".join(dict.fromkeys(remedies))
        or f"Keys: {keys}; of [load]: {', '.join(Load.model_fields)}; of [limits]: {', '.join(Limits.model_fields)}."
    )
    return UsageError(f"{where}: " + "; ".join(dict.fromkeys(_told(one) for one in found)), remedy=remedy)


def _told(one: ErrorDetails) -> str:
    key = ".".join(str(part) for part in one["loc"] if not str(part).startswith("function-"))
    if one["type"] == "extra_forbidden":
        return f"{key} is no key of a campaign"
    why = one["msg"].removeprefix("Value error, ")
    return f"{key} = {one['input']!r}: {why[:1].lower()}{why[1:]}"


def _near(one: ErrorDetails) -> str:
    if one["type"] != "extra_forbidden":
        return ""
    *above, name = (str(part) for part in one["loc"])
    known = _TABLES.get(".".join(above), Campaign).model_fields
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"{'.'.join([*above, near[0]])} was probably meant."
    table = next((table for table, model in _TABLES.items() if not above and name in model.model_fields), "")
    return f"{name} belongs under [{table}]." if table else ""
