"""What is shown while an engine starts: one line that changes on a terminal, a plain line at times anywhere else."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

EVERY_S = 15.0
"""Seconds between two plain lines."""


class Starting:
    """A context manager; ``progress`` and ``note`` are what a launcher tells."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._began = self._told_at = time.monotonic()

    def __enter__(self) -> Starting:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(f"soak: {text}", style="yellow", markup=False, soft_wrap=True)

    def progress(self, text: str) -> None:
        """How far the start has come."""
        now = time.monotonic()
        line = f"starting, {now - self._began:.0f} s: {text}"
        if self._status is not None:
            self._status.update(escape(line[: self._console.width - 4]))
        elif now - self._told_at >= EVERY_S:
            self._told_at = now
            self._console.print(line, markup=False, soft_wrap=True)
