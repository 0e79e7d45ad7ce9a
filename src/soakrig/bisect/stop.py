"""How a campaign is asked to end, from a signal handler or another thread, while a launch is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Stop:
    """Asked once: no more launches, and the one under way ends after its turn. Asked again: it ends at once."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[str] = []
        self._hooks: list[Callable[[str], None]] = []

    def ask(self, how: str) -> None:
        """Ask for the end; ``how`` is told in the record ("Ctrl-C")."""
        with self._lock:
            self._calls.append(how)
            hooks = list(self._hooks)
        self.event.set()
        for hook in hooks:
            hook(how)

    @property
    def why(self) -> str:
        """Who asked first; empty while nobody has."""
        return self._calls[0] if self._calls else ""

    @contextmanager
    def telling(self, hook: Callable[[str], None]) -> Generator[None]:
        """Call ``hook`` at every call of ``ask`` while the block lasts, and at once for those that came before it."""
        with self._lock:
            self._hooks.append(hook)
            before = list(self._calls)
        try:
            for how in before:
                hook(how)
            yield
        finally:
            with self._lock:
                self._hooks.remove(hook)
