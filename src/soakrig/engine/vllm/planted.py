"""Carries out a planted fault inside a vLLM worker. For demonstrations and tests only."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, NoReturn

from soakrig.engine.embedded.plant import Plant, PlantClock
from soakrig.engine.embedded.xid_line import write_kernel_line, xid_line
from soakrig.errors import UsageError

ACTIONS = ("exit", "sigkill", "hang", "bad_expert_id")
"""What a worker can do; the others are a server's doing."""
EXIT_STATUS = 1


class WorkerPlant:
    """Watches requests arrive in a worker's steps, and strikes behind the step that a struck one first runs in.

    A turn is a request that asks for more than 16 tokens or sets no limit. Raises UsageError for an action that
    happens in a server.
    """

    def __init__(self, plant: Plant, *, holds: bool) -> None:
        if plant.action not in ACTIONS:
            raise UsageError(
                f"SOAKRIG_PLANT: {plant.action} is a server's doing, and this plug-in is in the worker",
                remedy=f"plant one of {', '.join(ACTIONS)}",
            )
        self.plant = plant
        self._clock = PlantClock(plant, holds=holds)
        self._struck: set[str] = set()
        self._due = False

    def arrive(self, scheduler_output: Any) -> None:
        """Count the requests that are new in this step, and draw for each."""
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            limit = params.max_tokens if params is not None else None
            if self._clock.turn(len(new.prompt_token_ids or ()), limit) is None:
                continue
            if self.plant.action == "bad_expert_id":
                self._struck.add(new.req_id)
                self._say()
            else:
                self._due = True

    def rows(self, scheduled: list[tuple[str, int, bool]]) -> list[int]:
        """First row of each struck request in the batch: those whose first expert is to be one that does not exist."""
        found: list[int] = []
        start = 0
        for request, count, _ in scheduled:
            if request in self._struck:
                found.append(start)
            start += count
        return found

    def gone(self, requests: list[str]) -> None:
        """These have failed."""
        self._struck.difference_update(requests)

    def strike(self) -> None:
        """Behind a step: what is due happens now."""
        if not self._due:
            return
        self._say()
        match self.plant.action:
            case "exit":
                os._exit(EXIT_STATUS)
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                _for_ever()

    def _say(self) -> None:
        if self.plant.xid is not None and self.plant.kernel_log is not None:
            write_kernel_line(self.plant.kernel_log, xid_line(self.plant.xid, os.getpid()))


def _for_ever() -> NoReturn:
    while True:
        threading.Event().wait()
