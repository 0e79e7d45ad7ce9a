"""The hand on an engine that this tool started: hit it, see what is left of it, end the rest, start it again."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from soakrig.clock import Clock, RealClock
from soakrig.engine import keeper
from soakrig.engine.launcher import EngineProcess
from soakrig.engine.shm import SharedMemory
from soakrig.errors import UsageError
from soakrig.reproducers.vram import vram_used
from soakrig.soak.target import Target

GRACE_S = 10.0
_LOOK_S = 0.1


@dataclass
class EngineControl:
    """Make it before the engine is started: shared memory that is there by then is somebody else's.

    ``launch`` starts one and waits until it is ready; it is told the how manieth this is, from 1. A context manager:
    leaving it ends the engine. Every method blocks. ``vram``: look at the GPUs' memory before a start.
    ``give_up``: asked by ``launch`` and ``wait_end`` while they wait; a text ends the wait. ``stuck``: what even
    SIGKILL did not end, of all launches, in words.
    """

    launch: Callable[[int], EngineProcess]
    clock: Clock = field(default_factory=RealClock)
    engine: EngineProcess | None = None
    starts: int = 0
    vram: bool = False
    give_up: Callable[[], str] = lambda: ""
    vram_before: float | str | None = None
    stuck: list[str] = field(default_factory=list[str])
    _shm: SharedMemory = field(default_factory=SharedMemory)

    def start(self) -> Target:
        """Start an engine. Raises as ``launch``."""
        self.start_engine()
        return self.target

    def start_engine(self) -> EngineProcess:
        """The same, for who has to know the process itself."""
        self._shm = SharedMemory()
        if self.vram:
            self.vram_before = vram_used(self.clock)
        self.starts += 1
        self.engine = self.launch(self.starts)
        return self.engine

    @property
    def target(self) -> Target:
        """How to reach the engine that runs."""
        engine = self._running()
        return Target(
            engine.base_url,
            pid=engine.pid,
            engine_log=engine.log_path,
            exit_status=engine.exit_status,
            launched=True,
            keeper_pid=engine.keeper_pid,
        )

    def survivors(self) -> list[keeper.Stat]:
        """What still runs of this launch. A look at the shared memory that they have is taken along."""
        engine = self._running()
        found = [
            stat for stat in keeper.descendants([engine.keeper_pid], keeper.every_stat()) if keeper.is_running(stat)
        ]
        self._shm.look(stat.pid for stat in found)
        return found

    def part(self) -> keeper.Stat | None:
        """The process that does the work behind the server: of those below the engine's root the one with the most
        memory; None where the root is alone."""
        engine = self._running()
        below = [stat for stat in keeper.descendants([engine.pid], keeper.every_stat()) if keeper.is_running(stat)]
        return max(below, key=lambda stat: _resident_pages(stat.pid), default=None)

    def hit(self, number: signal.Signals, pid: int | None = None) -> None:
        """Send a signal to one process of the launch, its root where none is named."""
        engine = self._running()
        if pid is not None and pid not in {stat.pid for stat in self.survivors()}:
            raise UsageError(f"pid {pid} is no process of this launch")
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid if pid is None else pid, number)

    def wait_end(self, seconds: float) -> list[keeper.Stat]:
        """Until nothing of the launch runs, at most ``seconds`` and until ``give_up``; what still does then."""
        never = threading.Event()
        end = self.clock.monotonic() + seconds
        while (left := self.survivors()) and self.clock.monotonic() < end and not self.give_up():
            self.clock.wait(never, _LOOK_S)
        return left

    def clean(self, grace: float = GRACE_S) -> list[str]:
        """End all of it; what even SIGKILL did not end, in words (empty as a rule)."""
        engine, self.engine = self.engine, None
        if engine is None:
            return []
        left = [f"process {one.pid} ({one.name}) in state {one.state}" for one in engine.stop(grace)]
        self.stuck += left
        return left

    def shared_memory(self) -> list[str]:
        """Names under /dev/shm that the launch made and that are still there."""
        return self._shm.left()

    def __enter__(self) -> EngineControl:
        return self

    def __exit__(self, *_: object) -> None:
        self.clean()

    def _running(self) -> EngineProcess:
        if self.engine is None:
            raise UsageError("no engine runs under this control")
        return self.engine


def _resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])  # proc(5): the second field
    except (OSError, IndexError):
        return 0
