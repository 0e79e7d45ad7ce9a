"""Carries a planted fault out on one reply's events: writes the Xid line, then acts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

from .link import Event
from .plant import Plant
from .service import Reply, Service
from .xid_line import write_kernel_line, xid_line

AFTER_TOKENS = 4
"""Faults of a running stream strike once so many tokens are out, or at its end where it is shorter."""


class ConnectionCutError(Exception):
    """Close the connection as it is: nothing more is sent, not even the end of the body."""


class ErrorFrameError(Exception):
    """Send an error object and then the terminator, under the 200 that was already sent."""


async def events_with_fault(service: Service, reply: Reply) -> AsyncIterator[Event]:
    """The reply's events, with its planted fault if it has one.

    Raises what ``Service.events`` raises, and ConnectionCutError or ErrorFrameError where the fault says so.
    """
    if reply.planted is None or service.plant is None:
        async for event in service.events(reply):
            yield event
        return
    plant = service.plant.plant
    if reply.planted in ("empty_200", "answerless", "one_token", "bad_expert_id"):
        _mark(plant, service)
        async for event in service.events(reply):
            yield _without_answer(event) if reply.planted == "answerless" else event
        return
    tokens, struck = 0, False
    async for event in service.events(reply):
        if not struck and "finish" in event:
            struck = True
            await _strike(plant, service)
        yield event
        tokens += event.get("n", 0)
        if not struck and tokens >= AFTER_TOKENS:
            struck = True
            await _strike(plant, service)


async def _strike(plant: Plant, service: Service) -> None:
    _mark(plant, service)
    match plant.action:
        case "exit":
            service.link.plant_exit()
            await service.link.died()
        case "sigkill":
            service.link.plant_kill()
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            await asyncio.Event().wait()
        case "cut":
            raise ConnectionCutError
        case "error_frame":
            raise ErrorFrameError
        case _:
            pass


def _mark(plant: Plant, service: Service) -> None:
    if plant.xid is not None and plant.kernel_log is not None:
        write_kernel_line(plant.kernel_log, xid_line(plant.xid, service.link.pid))


def _without_answer(event: Event) -> Event:
    """Tokens still count, but neither text nor a call is left; the reply ends as if all were well."""
    if "finish" in event:
        return {**event, "finish": "stop"}
    return event if event.get("c") == "reasoning" else {**event, "c": "hidden", "t": ""}
