"""Coming to a Ray cluster: it is there or it is not, and that is known within seconds."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

from soakrig.errors import PreflightRefusedError

AUTO, LOCAL = "auto", "local"
KNOCK_S = 5.0
_INSTALL = "pip install 'soakrig[ray]'"


def in_words(error: BaseException) -> str:
    """One line of what Ray or a failed call says in many: the cause, as far as there is one."""
    name, text = type(error).__name__, str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    traceback = name.startswith("RayTaskError") or "Traceback (most recent call last)" in text
    cause = next((line for line in lines if "because" in line), lines[-1 if traceback else 0])
    return f"{name}: {cause}"[:300]


def import_ray() -> Any:
    """The module. Raises ``PreflightRefusedError`` where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise PreflightRefusedError(
            f"executor ray needs ray, which cannot be imported ({error})", remedy=f"{_INSTALL}, on every node."
        ) from error
    return ray


def connect(ray: Any, address: str | None) -> bool:
    """Come to the cluster; False where this process was there already. Raises ``PreflightRefusedError``."""
    if ray.is_initialized():
        return False
    where = address or os.environ.get("RAY_ADDRESS") or AUTO
    if where == LOCAL or "://" in where:
        raise PreflightRefusedError(
            f"the address of the Ray cluster is {where}; HOST:PORT of a running cluster's head was expected",
            remedy="For this host alone: executor local. Ray's client protocol (ray://) cannot choose hosts.",
        )
    try:
        _knock(_found(ray) if where == AUTO else where)
        with _keeping_sigterm():  # told the address, Ray would not look for its token: it has to find it by itself
            ray.init(where, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise PreflightRefusedError(
            f"no Ray cluster answers at {where}: {in_words(_first_cause(error))}",
            remedy="`ray start --head` begins one, `ray start --address=HEAD:PORT` adds a host, this one too. "
            "RAY_ADDRESS names it. For this host alone: executor local.",
        ) from error
    _quiet(ray)
    return True


def _first_cause(error: BaseException) -> BaseException:
    """What Ray has wrapped: "failed to connect" may be a token that is missing."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _found(ray: Any) -> str:
    """The cluster that "auto" means. Asked for beforehand: at one that is no more ``ray.init`` waits for minutes."""
    try:
        ask: Callable[..., str | None] = ray._private.services.canonicalize_bootstrap_address  # noqa: SLF001
    except AttributeError:
        return AUTO  # another version of Ray: then it waits
    return ask(AUTO) or AUTO


def _knock(where: str) -> None:
    """Raises ``OSError`` or ``ValueError``."""
    if where != AUTO:
        host, _, port = where.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()


@contextmanager
def _keeping_sigterm() -> Generator[None]:
    """``ray.init`` puts its own handler in place of the caller's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _quiet(ray: Any) -> None:
    """What Ray prints of nodes that die goes to standard output, where ``--json`` has its one object. There is no
    switch for it; we hear of it by the calls that fail."""
    with suppress(AttributeError):
        ray._private.worker.print_to_stdstream = _nothing  # noqa: SLF001


def _nothing(*_args: Any, **_more: Any) -> None:
    pass
