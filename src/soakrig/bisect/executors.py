"""Where launches run: this host, or the hosts of a cluster, each card a stratum with controls of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from filelock import FileLock

from soakrig.bisect.arm_launch import ArmLaunch, ArmLauncher, Teller
from soakrig.bisect.locks import lock_gpu
from soakrig.bisect.machine import machine_state
from soakrig.bisect.stop import Stop
from soakrig.engine.leftovers import end_leftovers


@dataclass(frozen=True)
class Stratum:
    """A host and card. ``name``: empty for this host. ``card``: what CUDA_VISIBLE_DEVICES is there, None leaves it.
    ``boot_id``: of the host now, empty for this one's."""

    name: str = ""
    card: str | None = None
    boot_id: str = ""


class Executor(Protocol):
    """Carries launches out in its strata, one at a time in each; may be called from a thread for each."""

    @property
    def strata(self) -> Sequence[Stratum]:
        """The places, at least one."""
        ...

    def machine(self, stratum: Stratum) -> dict[str, Any]:
        """State of the host and its cards, JSON."""
        ...

    def run(self, launch: ArmLaunch, stratum: Stratum, tell: Teller, stop: Stop) -> None:
        """One launch, whole, as ``ArmLauncher.run``. A lost host makes it void."""
        ...

    def clear(self, mark: str, stratum: Stratum) -> list[str]:
        """End what an earlier process launched with ``mark``; what is left, in words."""
        ...

    def close(self) -> None:
        """Let go of cards and hosts."""
        ...


class LocalExecutor:
    """This host, with the cards that ``visible`` names as CUDA_VISIBLE_DEVICES does (None: as this process's has it).
    Holds a lock on each card.

    Raises ``PreflightRefusedError`` where another campaign has a card.
    """

    def __init__(self, launcher: ArmLauncher | None = None, *, visible: str | None = None) -> None:
        self.launcher = launcher or ArmLauncher()
        self._locks: list[FileLock] = []
        try:
            for card in self.launcher.read_cards(visible) or []:
                self._locks.append(lock_gpu(card.uuid))
        except BaseException:
            self.close()
            raise

    @property
    def strata(self) -> Sequence[Stratum]:
        """One: this host."""
        return [Stratum()]

    def machine(self, stratum: Stratum) -> dict[str, Any]:
        """As ``machine_state`` has it."""
        return machine_state(self.launcher.clock)

    def run(self, launch: ArmLaunch, stratum: Stratum, tell: Teller, stop: Stop) -> None:
        """In this process."""
        self.launcher.run(launch, tell, stop)

    def clear(self, mark: str, stratum: Stratum) -> list[str]:
        """By the mark that every process of a launch carries in its environment."""
        return [f"process {one.pid} ({one.name}) in state {one.state}" for one in end_leftovers(mark)]

    def close(self) -> None:
        """Release the cards."""
        for lock in self._locks:
            lock.release()
