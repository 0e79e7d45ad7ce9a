"""Who holds a TCP port of this machine."""

from __future__ import annotations

import errno
import os
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from soakrig.errors import PreflightRefusedError, UsageError


class Holder(NamedTuple):
    """The process that listens on a port; ``pid`` and ``name`` are None where this user may not see them."""

    pid: int | None
    name: str | None


def holder(port: int) -> Holder | None:
    """Who listens on TCP ``port`` at any address of this machine, or None.

    Raises UsageError for a number that is no port.
    """
    _check(port)
    try:
        rows = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        rows = []
    listening = [row for row in rows if row.status == psutil.CONN_LISTEN and row.laddr and row.laddr.port == port]
    # Of several processes that share a socket, the oldest one is the server: its workers got the socket from it.
    for pid in sorted({row.pid for row in listening if row.pid is not None}, key=_age):
        try:
            return Holder(pid, psutil.Process(pid).name())
        except psutil.Error:
            continue
    return Holder(None, None) if listening else None


def refuse_if_taken(port: int) -> None:
    """Return when TCP ``port`` of 127.0.0.1 can be bound; port 0 (any free one) always can.

    Raises PreflightRefusedError that names the holder, and UsageError for a number that is no port.
    """
    _check(port)
    if port == 0:
        return
    with socket.socket() as probe:
        # As servers do: a connection in TIME_WAIT does not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EACCES:
                raise PreflightRefusedError(
                    f"port {port} of 127.0.0.1 is reserved for root", remedy="choose a port above 1023"
                ) from error
            if error.errno != errno.EADDRINUSE:
                raise PreflightRefusedError(f"port {port} of 127.0.0.1 cannot be used: {error}") from error
        else:
            return
    who = holder(port)
    if who is None or who.pid is None:
        text = "a process that this user may not see"
        remedy = f"find it with `sudo ss -ltnp 'sport = :{port}'`, or choose another port"
    else:
        text = f"pid {who.pid} ({who.name})"
        remedy = f"stop pid {who.pid}, or choose another port"
    raise PreflightRefusedError(f"port {port} of 127.0.0.1 is taken by {text}", remedy=remedy)


def _age(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return float("inf")


def _check(port: int) -> None:
    if not 0 <= port <= 65535:
        raise UsageError(f"{port} is not a TCP port", remedy="a port is a number from 0 (any free one) to 65535")


def stranger(pid: int, base_url: str) -> str:
    """A doubt, in words, where another process than ``pid`` serves a loopback URL; empty where none is known.

    It fits when ``pid`` listens there itself, started the one that does in the same session, or was started by it.
    Anything else may still be right (docker-proxy, a gateway), so that it is said and not refused.
    """
    parts = urlsplit(base_url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return ""
    found = holder(parts.port or (443 if parts.scheme == "https" else 80))
    if found is None or found.pid is None or found.pid == pid:
        return ""
    try:
        one = psutil.Process(found.pid)
        family = {child.pid for child in one.children(recursive=True)}
        family |= {up.pid for up in one.parents() if os.getsid(up.pid) == os.getsid(found.pid)}
    except (psutil.Error, OSError):
        return ""
    if pid in family:
        return ""
    return (
        f"pid {found.pid} ({found.name}) listens at {base_url}, not --pid {pid}: right for an engine behind a proxy, "
        "else another process is watched than answers"
    )
