"""The gateway as a process: a socket, uvicorn, and an end on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Callable, Generator
from typing import Any

import uvicorn

from soakrig.engine.gateway.app import Gateway
from soakrig.engine.ports import refuse_if_taken
from soakrig.errors import PreflightRefusedError, UsageError

LOOPBACK = "127.0.0.1"
GRACE_S = 2
"""How long answers may go on after SIGTERM."""
KEEP_ALIVE_S = 75
BACKLOG = 2048
BROKEN = "ASGI callable returned without completing response."


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which end the process by the signal."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _not_broken(record: logging.LogRecord) -> bool:
    return record.getMessage() != BROKEN  # said of every connection that is broken on purpose


def check_host(host: str, api_key: str) -> None:
    """Raises UsageError where an address other than loopback would be open to anybody."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise UsageError(f"--host {host!r} is no IP address", remedy="Give an address of this machine.") from error
    if not loopback and not api_key:
        raise UsageError(
            f"--host {host} lets other machines in, and there is no API key",
            remedy="Add --api-key-env NAME, the environment variable that holds the key; or leave --host out.",
        )


def bind(host: str, port: int, *, option: str = "--host") -> socket.socket:
    """A socket there; ``option`` is what named it. Raises UsageError for a number that is no port,
    PreflightRefusedError where it is taken."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is no TCP port", remedy="A port is a number from 0 (any free one) to 65535.")
    if host in (LOOPBACK, "localhost"):
        refuse_if_taken(port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK if host == "localhost" else host, port))
    except OSError as error:
        listener.close()
        raise PreflightRefusedError(
            f"{host}:{port} cannot be taken: {error.strerror}", remedy=f"give another {option} or --port"
        ) from error
    return listener


def http_server(gateway: Gateway, ready: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """uvicorn over the gateway; ``ready`` is called once connections are taken, ``should_exit`` ends it."""
    logging.getLogger("uvicorn.error").addFilter(_not_broken)
    config = uvicorn.Config(
        gateway.app(),
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        date_header=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    return Server(config, ready)


async def serve(gateway: Gateway, listener: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT; ``ready`` as in ``http_server``."""
    server = http_server(gateway, ready)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await server.serve(sockets=[listener])
    finally:
        await gateway.aclose()
        listener.close()


def run(gateway: Gateway, listener: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """``serve`` on a fresh loop; blocks."""
    factory: Any = None
    if sys.platform == "linux":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(gateway, listener, ready))
