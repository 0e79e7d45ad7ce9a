"""Writes what happens in one launch into the journal, each thing before the next is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from soakrig.bisect.journal import Journal
from soakrig.bisect.journal_rows import RunRow, Turn
from soakrig.bisect.launch_result import LaunchResult

WEDGED = "wedged"
"""The note on a run of which something could not be ended."""


class Ledger:
    """The teller of one launch (``arm_launch.Teller``). ``changed`` is called after each entry, with a text for people
    where there is one, ``progress`` with how far a start has come; ``left``: what could not be ended."""

    def __init__(
        self,
        journal: Journal,
        run: RunRow,
        folder: str,
        changed: Callable[[str], None],
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._journal, self._run, self._folder, self._changed = journal, run, folder, changed
        self._progress = progress
        self.left: list[str] = []

    def started(self, engine: Mapping[str, Any]) -> None:
        self._journal.note("engine", self._run, **engine)

    def ready(self, facts: Mapping[str, Any]) -> None:
        self._journal.move(self._run, "ready", detail=facts)
        self._changed("")

    def probing(self) -> None:
        self._journal.move(self._run, "probing", folder=self._folder)
        self._changed("")

    def turn(self, turn: Turn) -> None:
        self._journal.turn(self._run, turn)
        self._changed("")

    def ended(self, result: LaunchResult) -> None:
        """The result, and that the engine is about to be stopped."""
        exposure = result.exposure if result.result in ("faulted", "clean") else None
        self._journal.move(
            self._run, result.result, exposure=exposure, signature=result.signature, reason=result.reason,
            folder=self._folder,
        )  # fmt: skip
        if result.result != "host_lost":
            self._journal.move(self._run, "teardown")
        self._changed("")

    def gone(self, left: list[str]) -> None:
        """Settled where nothing is left; else the run stays in teardown, for a later resume."""
        self.left = left
        if left:
            self._journal.note(WEDGED, self._run, left=left)
        else:
            self._journal.move(self._run, "settled")

    def say(self, text: str) -> None:
        self._changed(text)

    def progress(self, text: str) -> None:
        self._progress(text)
