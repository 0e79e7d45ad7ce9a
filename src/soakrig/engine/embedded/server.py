"""The server process: takes the port, starts the worker, serves, and takes the worker down with it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import psutil
import uvicorn
import uvloop

from soakrig.engine.offload.plan import OffloadPlan
from soakrig.errors import EngineStartError, PreflightRefusedError

from .app import Routes
from .config import LOG_FORMAT
from .flags import Flags
from .service import Service
from .settings import Settings

HOST = "127.0.0.1"
GRACE_SECONDS = 1
"""How long streams may go on after SIGTERM."""
KEEP_ALIVE_SECONDS = 75
"""Longer than a client thinks between two turns, so that it does not meet a connection just being closed."""
BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn with our own signals: it would end the process by the signal, before the worker is taken down."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()


def bind(port: int) -> socket.socket:
    """A socket on 127.0.0.1. Raises PreflightRefusedError naming who holds the port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PreflightRefusedError(
                f"port {port} is taken{_holder(port)}",
                remedy="stop that process, or give another --port (0 takes a free one)",
            ) from error
        raise PreflightRefusedError(
            f"port {port} cannot be taken: {error.strerror}", remedy="give another --port"
        ) from error
    return listener


def _holder(port: int) -> str:
    """`` by NAME (pid N)`` where the system says it, else nothing."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
                and connection.pid
            ):
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def write_port_file(path: Path, port: int) -> None:
    """The port number and a line end, there at once or not at all. Raises EngineStartError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(f"{port}\n", encoding="ascii")
        part.replace(path)
    except OSError as error:
        raise EngineStartError(f"--port-file {path} cannot be written: {error.strerror}") from error


async def serve(flags: Flags, settings: Settings, plan: OffloadPlan) -> None:
    """Serve until SIGTERM or SIGINT. Raises PreflightRefusedError (port) or EngineStartError (model)."""
    log = logging.getLogger("soakrig.engine")
    listener = bind(flags.port)
    port = listener.getsockname()[1]
    service = Service(flags.config, settings, plan)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        if service.simulated:
            log.warning("SIMULATED: a fault is planted by SOAKRIG_PLANT; nothing that this engine does is evidence")
        for warning in plan.warnings:
            log.warning("%s", warning)
        if not await _ready_or_stopped(service, stopped):
            return

        def on_ready() -> None:
            log.info("ready on http://%s:%d (worker pid %d)", HOST, port, service.link.pid)
            if flags.port_file is not None:
                write_port_file(flags.port_file, port)

        config = uvicorn.Config(
            Routes(service).app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        server = _Server(config, on_ready)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        stopping = asyncio.ensure_future(stopped.wait())
        dying = asyncio.ensure_future(_say_death(service, log))
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        for task in (stopping, dying):
            task.cancel()
    finally:
        await service.link.stop()
        service.close()
        listener.close()


async def _ready_or_stopped(service: Service, stopped: asyncio.Event) -> bool:
    ready = asyncio.ensure_future(service.link.ready())
    stopping = asyncio.ensure_future(stopped.wait())
    await asyncio.wait((ready, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not ready.done():
        ready.cancel()
        return False
    ready.result()
    return True


async def _say_death(service: Service, log: logging.Logger) -> None:
    await service.link.died()
    log.error("EngineDeadError: %s; the server stays up and answers 503", service.link.how_ended)


def run(flags: Flags, settings: Settings) -> None:
    """Serve on a fresh loop; blocks until the engine is stopped. Raises what ``serve`` raises, and UsageError for
    settings that this model cannot have."""
    plan = OffloadPlan.build(settings, flags.config.model_shape)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=LOG_FORMAT)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(flags, settings, plan))
