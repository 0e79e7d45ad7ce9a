"""Ending what an earlier process of this tool launched: its keeper does that by itself, this makes sure."""

from __future__ import annotations

import time

from soakrig.engine import keeper
from soakrig.engine.launcher import MARK, Leftover

KEEPER_S = 25.0
"""A keeper whose tool has died ends the engine within about so long (its grace, and what SIGKILL takes)."""
_STEP_S = 0.1


def marked(mark: str) -> list[keeper.Stat]:
    """Processes of the launch with that mark, its keeper among them, and what they started."""
    wanted = f"{MARK}={mark}".encode()
    stats = keeper.every_stat()
    found = [stat for stat in stats if keeper.is_running(stat) and wanted in _environment(stat.pid)]
    pids = {stat.pid for stat in found}
    return found + [stat for stat in keeper.descendants(pids, stats) if stat.pid not in pids]


def end_leftovers(mark: str, *, patience_s: float = KEEPER_S) -> list[Leftover]:
    """Wait until nothing of that launch is left, for ``patience_s`` seconds, then kill the rest; returns what could not
    be ended (empty as a rule)."""
    end = time.monotonic() + patience_s
    while marked(mark) and time.monotonic() < end:
        time.sleep(_STEP_S)
    left = keeper.end_tree(lambda: marked(mark), 0, 0.0, _pause)
    return [Leftover(stat.pid, stat.name, stat.state) for stat in left]


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return file.read().split(b"\0")
    except OSError:
        return []


def _pause(seconds: float) -> float | None:
    time.sleep(seconds)
    return None
