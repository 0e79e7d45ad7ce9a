"""The watchers of one run: which of them a target allows, and what the load asks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from soakrig.clock import Clock
from soakrig.record.signal import SourceState
from soakrig.soak.target import Target
from soakrig.soak.watch import proc
from soakrig.soak.watch.engine_log import EngineLogWatcher
from soakrig.soak.watch.kernel_log import KernelLogWatcher
from soakrig.soak.watch.metrics import MetricsWatcher
from soakrig.soak.watch.nvml import NvmlWatcher
from soakrig.soak.watch.process import ProcessWatcher
from soakrig.soak.watch.watcher import Watcher


@dataclass
class Watchers:
    """``absent``: sources that this target does not offer, with what would allow them."""

    target: Target
    clock: Clock
    watchers: list[Watcher] = field(default_factory=list[Watcher])
    absent: list[SourceState] = field(default_factory=list[SourceState])
    metrics: MetricsWatcher | None = None
    create_time: float | None = None

    @property
    def process_alive(self) -> Callable[[], tuple[bool, str]] | None:
        """Asks whether the engine's process lives, None where it is not known."""
        pid = self.target.pid
        if pid is None:
            return None
        return lambda: self._process_alive(pid)

    def progressing(self, within_s: float) -> bool | None:
        """Whether the engine's own counters moved in the last ``within_s`` seconds; None where it cannot be told."""
        if self.metrics is None:
            return None
        progress = self.metrics.progress()
        if progress.changed_at_monotonic is None or progress.scraped_at_monotonic is None:
            return None
        return self.clock.monotonic() - progress.changed_at_monotonic < within_s

    def exit_status(self) -> int | None:
        """How the engine's process ended, where it did and somebody knows."""
        return self.target.exit_status()

    def _process_alive(self, pid: int) -> tuple[bool, str]:
        status = self.target.exit_status()
        if status is not None:
            return False, f"process {pid} ended with {_how(status)}"
        return proc.is_alive(pid, self.create_time)


def all_watchers(target: Target, kernel_log: str, clock: Clock, on_raw: Callable[[str], None]) -> Watchers:
    """Build them; nothing is opened yet. Raises ``UsageError`` for an impossible ``kernel_log``."""
    made = engine_watchers(target, clock)
    made.watchers[:0] = [KernelLogWatcher(kernel_log, clock, on_raw), NvmlWatcher(clock)]
    return made


def engine_watchers(target: Target, clock: Clock) -> Watchers:
    """Those of one engine alone, without the machine's."""
    metrics = MetricsWatcher(target.base_url, clock)
    made = Watchers(target, clock, metrics=metrics)
    made.watchers = [metrics]
    if target.pid is not None:
        made.create_time = proc.create_time(target.pid)
        made.watchers.append(
            ProcessWatcher(
                target.pid,
                clock,
                create_time=made.create_time,
                exit_status=target.exit_status,
                keeper_pid=target.keeper_pid,
            )
        )
    else:
        made.absent.append(SourceState("process", "absent", "the engine's process is not known (give --pid)"))
    if target.engine_log is not None:
        made.watchers.append(EngineLogWatcher(target.engine_log, clock, from_start=target.launched))
    else:
        made.absent.append(SourceState("engine_log", "absent", "the engine's log is not known (give --engine-log)"))
    return made


def _how(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {-status}"
