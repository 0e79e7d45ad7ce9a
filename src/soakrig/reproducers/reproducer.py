"""A reproducer: a named load shape with the signature it is known to provoke."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from soakrig.engine.bundled import Order
from soakrig.errors import SoakrigError, UsageError
from soakrig.record.finding import Finding
from soakrig.record.manifest import Plan
from soakrig.reproducers.engine_control import EngineControl
from soakrig.reproducers.parameters import AnyParameter, Value, read_parameters
from soakrig.soak.conversation import AtLimit, Conversation
from soakrig.soak.probe import Probe
from soakrig.soak.stage import Stage

Way = Literal["launched", "pid", "url"]
"""How a run has its engine: started by this tool, attached with its process known, or by its URL alone."""


@dataclass(frozen=True)
class LoadOptions:
    """What an operator may set of any load; ``parameters``: the reproducer's own, checked."""

    conversations: int = 1
    tools: int = 50
    seed: int = 0
    max_tokens: int = 512
    temperature: float = 0.7
    context_limit: int | None = None
    at_limit: AtLimit = "restart"
    result_scale: float = 1.0
    parameters: Mapping[str, Value] = field(default_factory=dict[str, Value])

    def recorded(self) -> dict[str, Any]:
        """What a manifest keeps as ``load``; seed and conversations stand there by themselves."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("seed", "conversations")}
        return {**found, "parameters": dict(self.parameters)}


GENERAL = tuple(one.name for one in fields(LoadOptions) if one.name != "parameters")
"""Names of the options that are no reproducer's own."""


@dataclass
class Scene:
    """What a procedure works on: the run as its load sees it, the options, and the engine's control where this tool
    started it."""

    stage: Stage
    options: LoadOptions
    control: EngineControl | None = None

    async def start_again(self, how: str) -> bool:
        """Start an engine in place of the one that the load has ended, and attach it. False where that did not come
        about: a fault of the engine's, unless the run was over by then."""
        stage, control = self.stage, self.control
        assert control is not None
        try:
            await stage.take_up(await asyncio.to_thread(control.start), how)
        except SoakrigError as error:
            if not stage.over:
                text = f"the engine did not come up again: {error.message.splitlines()[0]}"
                stage.find(Finding("restart", text, says="fault"))
            return False
        return not stage.over


Procedure = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True)
class Reproducer:
    """``load`` makes the conversations once the target is known; the texts are for `soak repro show`.

    ``signature``: the start of the fault signatures that count as its fault. ``cap``: turns of each conversation,
    where nobody says how many. ``uses``: which general options mean something to it; ``usual``: their values where
    nobody sets them. ``procedure``: what drives the run, where it is more than its conversations; ``plan``: how many
    turns that comes to (--turns and --for are then refused). ``needs``: what it cannot do without, in words; ``check``
    refuses where that is missing. ``not_in_bisect``: why a bisect cannot use it, empty where it can. ``order``:
    completes or refuses what is to be launched, in a bisect too. ``start_failed``: findings of a start that failed,
    from its error and the engine's log. ``vram``: the GPUs' memory from before the start is wanted.
    """

    name: str
    summary: str
    provokes: str
    seen: str
    costs: str
    clean_means: str
    signature: tuple[str, ...]
    load: Callable[[LoadOptions, Probe], Sequence[Conversation]]
    cap: int = 60
    parameters: tuple[AnyParameter, ...] = ()
    uses: tuple[str, ...] = GENERAL
    usual: LoadOptions = LoadOptions()
    procedure: Procedure | None = None
    plan: Callable[[LoadOptions], Plan] | None = None
    needs: str = ""
    check: Callable[[LoadOptions, Way], None] | None = None
    not_in_bisect: str = ""
    order: Callable[[LoadOptions, Order], Order] | None = None
    start_failed: Callable[[str], list[Finding]] | None = None
    vram: bool = False

    def options(self, given: Mapping[str, Any], parameters: Mapping[str, Value] | None = None) -> LoadOptions:
        """The options of a load: what was given (None: not given) over what is usual here.

        Raises ``UsageError`` for an option that means nothing to this reproducer and for a wrong parameter.
        """
        said = {name: value for name, value in given.items() if value is not None}
        for name in said:
            if name not in self.uses:
                raise UsageError(
                    f"--{name.replace('_', '-')} means nothing to {self.name}",
                    remedy=f"`soak repro show {self.name}` lists what does.",
                )
        return replace(self.usual, **said, parameters=read_parameters(self.name, self.parameters, parameters or {}))

    def planned(self, options: LoadOptions, turns: int | None, seconds: float | None) -> Plan:
        """The exposure of a run. Raises ``UsageError`` where the reproducer alone says how long it is."""
        if self.plan is None:
            cap = None if seconds is not None else turns or self.cap
            return Plan(conversations=options.conversations, turns=cap, seconds=seconds)
        if turns is not None or seconds is not None:
            raise UsageError(
                f"--{'turns' if turns is not None else 'for'} means nothing to {self.name}: it has a plan of its own",
                remedy=f"`soak repro show {self.name}` lists its parameters.",
            )
        return self.plan(options)

    def drive(
        self, options: LoadOptions, control: EngineControl | None = None
    ) -> Callable[[Stage], Awaitable[None]] | None:
        """What ``RunSpec.procedure`` takes; None for a plain load."""
        procedure = self.procedure
        if procedure is None:
            return None

        async def driven(stage: Stage) -> None:
            if control is None:
                return await procedure(Scene(stage, options))
            before = control.give_up
            control.give_up = lambda: "the run has ended" if stage.over else before()  # no wait outlasts the run
            try:
                await procedure(Scene(stage, options, control))
            finally:
                control.give_up = before

        return driven

    def is_its(self, signature: str | None) -> bool:
        """Whether a fault of that signature is the one that this load is known to provoke."""
        return signature is not None and signature.startswith(self.signature)

    def shown(self) -> dict[str, Any]:
        """Everything that `soak repro show` says, as plain data."""
        usual = {name: getattr(self.usual, name) for name in self.uses}
        return {
            "name": self.name,
            "summary": self.summary,
            "provokes": self.provokes,
            "seen": self.seen,
            "costs": self.costs,
            "clean_means": self.clean_means,
            "signature": list(self.signature),
            "cap": "its own plan" if self.plan is not None else self.cap,
            "options": {name: value for name, value in usual.items() if value is not None},
            "parameters": [one.shown() for one in self.parameters],
            "needs": self.needs or "an OpenAI-compatible engine, started or attached",
            "in_a_bisect": f"no: {self.not_in_bisect}" if self.not_in_bisect else "yes",
        }
