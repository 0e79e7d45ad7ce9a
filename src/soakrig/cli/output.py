"""Standard output: one JSON object, and a reader that may go away without changing how a command ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import orjson

from soakrig.errors import UsageError


def emit_json(data: Any) -> bool:
    """Write one JSON object and a newline to standard output; False when nobody reads it any more."""
    return emit(orjson.dumps(data).decode())


def emit(text: str) -> bool:
    """Write a line to standard output. A closed pipe at its other end is no error of ours: False is returned."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        forget_stdout()
        return False
    return True


def write_page(path: Path, text: str, option: str = "") -> None:
    """A report where the user wants it. ``option``: the one that named the path. Raises ``UsageError``."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        named = f"{option} {path}".strip()
        raise UsageError(
            f"{named} cannot be written: {error.strerror or error}", remedy="Give another path."
        ) from error


def forget_stdout() -> None:
    """Send what is still written to standard output nowhere; else the interpreter would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def open_closed_streams() -> None:
    """Give closed standard streams a place to go to: the next file opened would get their number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115, PTH123
