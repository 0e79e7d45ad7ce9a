"""The machine as preflights see it: roots to read, and facts that were read elsewhere. Tests fake it with files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from soakrig.engine.bundled import EMBEDDED, Order, installation_of
from soakrig.engine.ports import refuse_if_taken
from soakrig.engine.vllm.installation import Installation
from soakrig.errors import PreflightRefusedError

CAP_IPC_LOCK = 14


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has memory of a card. ``bytes`` None: the driver does not tell how much. ``compute``: it computes
    there; a display's processes do not."""

    pid: int
    name: str = ""
    bytes: int | None = None
    compute: bool = True

    def __str__(self) -> str:
        held = "" if self.bytes is None else f" {self.bytes / (1 << 30):.1f} GiB"
        return f"pid {self.pid}{f' ({self.name})' if self.name else ''}{held}"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as NVML shows it. Memory in bytes, used by whomever; None where the card does not tell."""

    index: int
    uuid: str
    name: str
    used: int | None
    total: int | None
    holders: tuple[Holder, ...] | None = None

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"

    @property
    def unattributed(self) -> int | None:
        """Bytes in use that no process shown holds; None where that cannot be told."""
        if self.used is None or self.holders is None or any(one.bytes is None for one in self.holders):
            return None
        return max(0, self.used - sum(one.bytes or 0 for one in self.holders))


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The cards, in NVML's order; None where nobody could be asked, and ``why`` says so. ``driver``: its version."""

    cards: tuple[Card, ...] | None = None
    why: str = "NVML was not asked"
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Serving:
    """A model that is on this machine now, ready or not. ``slot``: as the registry has it, "" for none."""

    name: str
    pid: int
    slot: str = ""
    pids: frozenset[int] = frozenset()


def space(path: Path) -> tuple[int, int]:
    """Total and free bytes of the file system that ``path`` is on. Raises OSError."""
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def port_refusal(port: int) -> PreflightRefusedError | None:
    """Why TCP ``port`` of 127.0.0.1 cannot be taken, or None."""
    try:
        refuse_if_taken(port)
    except PreflightRefusedError as error:
        return error
    return None


@dataclass(frozen=True)
class Machine:
    """Roots of ``/proc``, ``/sys`` and shared memory, and what was found out elsewhere.

    ``installation``: the vLLM that would be started, or why there is none; None for the embedded engine. ``serving``:
    what is served now. ``launch_folder``: where an engine without a ``directory`` runs.
    ``stated_ram`` and ``stated_shm``: bytes that somebody says are free, in place of looking.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")  # noqa: S108  (it is looked at, not written to)
    gpu: GpuFacts = GpuFacts()
    caller: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    installation: Installation | str | None = None
    serving: tuple[Serving, ...] = ()
    launch_folder: Path = Path("/")
    stated_ram: int | None = None
    stated_shm: int | None = None
    space: Callable[[Path], tuple[int, int]] = space
    port_refusal: Callable[[int], PreflightRefusedError | None] = port_refusal

    def read(self, *parts: str) -> str:
        """A file below ``proc``. Raises OSError."""
        return self.proc.joinpath(*parts).read_text("utf-8", "replace")

    @property
    def home(self) -> str:
        return self.caller.get("HOME") or str(Path.home())

    @property
    def may_lock(self) -> bool:
        """Whether this process may lock any amount of memory (CAP_IPC_LOCK). Raises OSError."""
        for line in self.read("self", "status").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) & (1 << CAP_IPC_LOCK))
        return False


def look_for_engine(order: Order) -> Installation | str | None:
    """``Machine.installation`` of an order."""
    if order.name == EMBEDDED:
        return None
    try:
        return installation_of(order)
    except PreflightRefusedError as error:
        return str(error)
