"""A target: how to reach an engine, and what of it can be watched."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soakrig.errors import UsageError


@dataclass(slots=True)
class Target:
    """``base_url`` has no ``/v1`` and no slash at its end.

    ``pid``: the engine's first process, where known; ``exit_status`` asks for its exit status (negative: a signal;
    None: running or unknown). ``launched``: this tool started it, and
    ``keeper_pid`` is the parent of what it leaves behind. ``api_key`` is sent and never recorded.
    """

    base_url: str
    model: str = ""
    pid: int | None = None
    engine_log: Path | None = None
    exit_status: Callable[[], int | None] = lambda: None
    launched: bool = False
    keeper_pid: int | None = None
    api_key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def parse_url(text: str) -> str:
    """The base URL in its one form. Raises ``UsageError`` when it is no http URL."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number, a bracket that is not closed
        sound = False
    if not sound or any(mark in text for mark in "?#@"):
        raise UsageError(
            f"--url {text!r} is no URL of a server; expected http://HOST:PORT",
            remedy="Example: http://127.0.0.1:8000 (a key goes into a variable that --api-key-env names).",
        )
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def check_pid(pid: int) -> int:
    """``pid`` when there is such a process. Raises ``UsageError`` otherwise."""
    if pid <= 0 or not os.path.isdir(f"/proc/{pid}"):  # noqa: PTH112
        raise UsageError(f"--pid {pid}: there is no such process", remedy="`pgrep -af vllm` lists candidates.")
    return pid
