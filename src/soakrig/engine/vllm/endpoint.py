"""The entry point of group ``vllm.endpoint_plugins``: what the API server of vLLM tells of the offload core.

``GET /soakrig/ping``: a round trip to every worker with a deadline, since ``/health`` only reads a flag.
``GET /soakrig/settings``, ``GET /soakrig/offload``: as in the embedded engine. ``/metrics`` gets ``soakrig:moe_*``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import REGISTRY
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import soakrig
from soakrig.engine.offload.counters import Window, no_counters
from soakrig.engine.offload.metrics import OffloadMetrics
from soakrig.engine.offload.plan import OffloadPlan

from .parts import installed_version
from .settings import VllmSettings

DEADLINE_S = 5.0
"""How long a round trip may take before the engine is called silent."""
REFRESH_S = 1.0
"""How often the counters on ``/metrics`` are fetched from the worker."""


class SilentEngineError(Exception):
    """The workers did not answer in time, or the engine is dead; the message says which."""


class EndpointPlugin:
    """Made once by the API server; ``attach_router`` and ``init_state`` are vLLM's contract."""

    name = "soakrig"
    required_tasks = None

    def __init__(self) -> None:
        self._settings = VllmSettings.from_environment()
        self._engine: Any = None
        self._newest: Window | None = None
        self._refreshing: asyncio.Task[None] | None = None

    def attach_router(self, app: Any) -> None:
        """Add our routes."""
        for path, handler in (
            ("/soakrig/ping", self.ping),
            ("/soakrig/settings", self.settings),
            ("/soakrig/offload", self.offload),
        ):
            app.router.add_route(path, _guarded(handler), methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep the way to the engine, and start to fetch counters where there are any."""
        self._engine = engine_client
        if engine_client is None or not self._settings.asked:
            return
        first = await self._ask("soakrig_report")
        plan = OffloadPlan.from_json(first["plan"])
        newest = await self._ask("soakrig_newest")
        self._newest = Window(0, newest["step"], newest["counters"])
        names = getattr(args, "served_model_name", None) or [getattr(args, "model", "vllm")]
        REGISTRY.register(OffloadMetrics(str(names[0]), plan, self._window))
        self._refreshing = asyncio.create_task(self._refresh())

    async def ping(self, request: Request) -> Response:
        """200 and ``{"alive": true, "seconds"}``, or 503 and why not. ``?deadline=`` in seconds."""
        deadline = _seconds(request.query_params.get("deadline"))
        began = time.monotonic()
        try:
            await self._ask("check_health", deadline)
        except SilentEngineError as error:
            return JSONResponse({"alive": False, "seconds": time.monotonic() - began, "error": str(error)}, 503)
        return JSONResponse({"alive": True, "seconds": time.monotonic() - began})

    async def settings(self, request: Request) -> Response:
        """The effective settings, as the worker has them, and what they came to for this model."""
        plant = self._settings.plant
        body: dict[str, Any] = {
            "engine": "vllm",
            "version": soakrig.__version__,
            "vllm": " ".join(map(str, installed_version())),
            "pid": os.getpid(),
            "installed": self._settings.asked,
            "settings": self._settings.report(),
            "plant": plant.report() if plant is not None else None,
            "simulated": plant is not None,
        }
        if self._settings.asked:
            found = await self._ask("soakrig_report")
            plan = OffloadPlan.from_json(found["plan"])
            body |= {"settings": found["settings"], "offload": {**plan.report(), "memory": found["memory"]}}
        return JSONResponse(body)

    async def offload(self, request: Request) -> Response:
        """Counters and rates, per layer and in total, of the whole life or of a window of engine steps."""
        if not self._settings.asked:
            return JSONResponse({"error": {"message": "nothing asked for the offload core", "code": 404}}, 404)
        found = await self._ask("soakrig_window", args=(dict(request.query_params),))
        return JSONResponse(found, 400 if "error" in found else 200)

    async def _ask(self, method: str, deadline: float = DEADLINE_S, args: tuple[Any, ...] = ()) -> Any:
        """What the first worker answers. Raises SilentEngineError."""
        if self._engine is None:
            raise SilentEngineError("this server has no engine")
        try:
            # The timeout of collective_rpc itself is not kept on this side.
            answers = await asyncio.wait_for(self._engine.collective_rpc(method, deadline, args), deadline)
        except TimeoutError as error:
            raise SilentEngineError(f"no worker answered within {deadline:g} s") from error
        except Exception as error:
            raise SilentEngineError(f"{type(error).__name__}: {error}") from error
        return answers[0]

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            with contextlib.suppress(SilentEngineError):
                found = await self._ask("soakrig_newest")
                self._newest = Window(0, found["step"], found["counters"])

    def _window(self) -> Window:
        return self._newest if self._newest is not None else Window(0, 0, no_counters(0))


def _seconds(text: str | None) -> float:
    try:
        found = float(text) if text is not None else DEADLINE_S
    except ValueError:
        return DEADLINE_S
    return found if 0.0 < found <= 600.0 else DEADLINE_S


def _guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except SilentEngineError as error:
            return JSONResponse({"error": {"message": str(error), "type": "ServiceUnavailable", "code": 503}}, 503)

    return run
