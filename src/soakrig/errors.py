"""Every exception that soakrig raises on purpose.

SoakrigError                     exit 70 unless a subclass says otherwise
  UsageError                     64  the call is wrong: option, gate, name, transcript line
  PreflightRefusedError          3   the machine cannot do what was asked: port taken, engine missing
  EngineStartError               1   the engine was started and did not become ready
  TargetError                    64  the URL answers, but not as an OpenAI-compatible server
  InconclusiveError              2   something that has to be seen could not be seen
    StoreError                   2   the run folder cannot be written (full disk, permissions)
    WatcherError                 2   a watcher cannot read its source
  RecordError                    64  a run folder cannot be read as one

A message says what was read, what was expected and what to do next.
"""

from __future__ import annotations


class SoakrigError(Exception):
    """Root of the tree.

    ``message`` says what happened and what was read, ``remedy`` what to do next (may be empty). ``exit_code`` is the
    process's exit status when nothing catches the error.
    """

    exit_code = 70

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message


class UsageError(SoakrigError):
    """The call is wrong; nothing was sent and nothing was started."""

    exit_code = 64


class PreflightRefusedError(SoakrigError):
    """The machine cannot do what was asked; nothing was started."""

    exit_code = 3


class EngineStartError(SoakrigError):
    """The engine was started and died or stayed silent before it was ready; ``exit_status`` where it died."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "", exit_status: int | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.exit_status = exit_status


class TargetError(SoakrigError):
    """Something answers at the target's URL, but not as an OpenAI-compatible server."""

    exit_code = 64


class InconclusiveError(SoakrigError):
    """Something that a verdict needs could not be seen or kept."""

    exit_code = 2


class StoreError(InconclusiveError):
    """The run folder cannot be written."""


class WatcherError(InconclusiveError):
    """A watcher cannot read its source; its message becomes the source's ``detail``."""


class RecordError(SoakrigError):
    """A run folder, or a file in one, cannot be read as what it should be."""

    exit_code = 64
