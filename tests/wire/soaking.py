"""Soak a loopback server in-process, with an empty file as the kernel log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soakrig.clock import RealClock
from soakrig.record.events import Event
from soakrig.record.judge import Judge
from soakrig.record.manifest import Plan
from soakrig.record.result import Result
from soakrig.reproducers.agent_loop import AGENT_LOOP
from soakrig.reproducers.reproducer import LoadOptions
from soakrig.soak.client import Timeouts
from soakrig.soak.run import RunSpec, SoakRun
from soakrig.soak.target import Target
from wire import loopback


def spec(
    folder: Path,
    *,
    turns: int = 3,
    options: LoadOptions | None = None,
    stall: float = 0.6,
    first_byte: float = 0.0,
    **more: Any,
) -> RunSpec:
    options = options or LoadOptions(tools=2, max_tokens=64)
    kernel_log = folder / "kernel-source.log"
    kernel_log.touch()
    base: dict[str, Any] = {
        "reproducer": "agent-loop",
        "plan": Plan(conversations=options.conversations, turns=turns),
        "conversations": lambda probe: AGENT_LOOP.load(options, probe),
        "timeouts": Timeouts(connect=2.0, stall=stall, first_byte=max(first_byte, stall)),
        "kernel_log": str(kernel_log),
        "runs_dir": folder / "runs",
        "settle_clean_s": 0.15,
        "settle_bad_s": 0.15,
        "retry_s": 0.05,
    }
    return RunSpec(**{**base, **more})


def is_canary(x: loopback.Exchange) -> bool:
    """Whether a request is the tool's own question and none of a conversation."""
    return b'"tools"' not in x.body


async def soak_async(
    handler: loopback.Handler,
    run_spec: RunSpec,
    *,
    route: loopback.Route = loopback.models,
    observer: Callable[[Event, Judge], None] = lambda event, judge: None,
    started: Callable[[SoakRun], None] = lambda run: None,
    **target: Any,
) -> tuple[Result, SoakRun]:
    async with loopback.serve(handler, route) as url:
        run = SoakRun(run_spec, Target(url, **target), RealClock(), observer)
        started(run)
        return await run.run(), run


def soak(handler: loopback.Handler, run_spec: RunSpec, **more: Any) -> tuple[Result, SoakRun]:
    result, run = asyncio.run(soak_async(handler, run_spec, **more))
    if run.error is not None:
        raise run.error
    return result, run
