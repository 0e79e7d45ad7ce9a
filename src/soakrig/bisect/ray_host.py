"""The far end of the Ray executor: carries launches out on a node of the cluster and tells of them, step by step.

Knows nothing of Ray: ``ray_executor`` makes it an actor, one for each card. What a launch tells waits here until the
driver has it in the journal: ``next`` hands one event out, and the ``next`` after it says that it is written.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import tempfile
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

import soakrig
from soakrig.bisect.arm_launch import ArmLaunch, ArmLauncher, Teller
from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.journal_rows import Turn
from soakrig.bisect.launch_result import LaunchResult
from soakrig.bisect.locks import lock_gpu
from soakrig.bisect.machine import machine_state
from soakrig.bisect.stop import Stop
from soakrig.clock import RealClock
from soakrig.engine.leftovers import end_leftovers
from soakrig.errors import SoakrigError
from soakrig.soak.fingerprint import host_facts

OVER = "over"
"""The event after the last; its data is empty, or says what the launch ended with that it could not tell."""
POLL_S = 2.0
"""``next`` returns without an event after so long."""
WRITTEN_S = 600.0
"""A driver that has not written an event by then is taken for gone: the launch ends."""


class Event(NamedTuple):
    """One call of a teller as plain data. ``name``: of its method, or ``OVER``."""

    name: str
    data: Any = None


def replay(event: Event, tell: Teller) -> None:
    """Make the call that ``event`` stands for. Raises what ``tell`` raises."""
    match event.name:
        case "turn":
            tell.turn(Turn(**event.data))
        case "ended":
            tell.ended(LaunchResult(**event.data))
        case "probing":
            tell.probing()
        case "started" | "ready" | "gone" | "say" | "progress":
            getattr(tell, event.name)(event.data)
        case _:
            raise ValueError(f"event {event.name!r}: expected a method of Teller")


class NotWrittenError(Exception):
    """The driver could not write an event, or is gone."""


@dataclass
class _Item:
    event: Event
    written: threading.Event = field(default_factory=threading.Event)
    refused: str = ""


class _QueueTeller:
    """A teller whose calls return once the driver has written them."""

    def __init__(self, items: queue.SimpleQueue[_Item], where: Mapping[str, Any]) -> None:
        self._items, self._where = items, where

    def started(self, engine: Mapping[str, Any]) -> None:
        self._put("started", {**engine, **self._where})

    def ready(self, facts: Mapping[str, Any]) -> None:
        self._put("ready", dict(facts))

    def probing(self) -> None:
        self._put("probing")

    def turn(self, turn: Turn) -> None:
        self._put("turn", asdict(turn))

    def ended(self, result: LaunchResult) -> None:
        self._put("ended", asdict(result))

    def gone(self, left: list[str]) -> None:
        self._put("gone", left)

    def say(self, text: str) -> None:
        self._items.put(_Item(Event("say", text)))  # nothing hangs on it

    def progress(self, text: str) -> None:
        self._items.put(_Item(Event("progress", text)))

    def _put(self, name: str, data: Any = None) -> None:
        item = _Item(Event(name, data))
        self._items.put(item)
        if not item.written.wait(WRITTEN_S):
            raise NotWrittenError(f"{name} was not written within {WRITTEN_S:g} s")
        if item.refused:
            raise NotWrittenError(item.refused)


class LaunchHost:
    """A node and one of its cards. Its methods may be called at the same time, from several threads."""

    def __init__(self) -> None:
        self._launcher = ArmLauncher()
        self._environment = node_environment()
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._handed: _Item | None = None
        self._stop = Stop()
        self._thread: threading.Thread | None = None
        self._elsewhere: Path | None = None
        self._locks: list[FileLock] = []
        threading.Thread(target=_leave_with_raylet, name="raylet's end", daemon=True).start()

    def hello(self, card: str | None) -> dict[str, Any]:
        """Who this is, after taking the lock of ``card`` (CUDA_VISIBLE_DEVICES, None for no card): host, boot_id, pid,
        soakrig (version) and ``refused``, which says why the card cannot be had."""
        refused = ""
        try:
            if card is not None and not self._locks:
                self._locks += [lock_gpu(one.uuid) for one in self._launcher.read_cards(card) or []]
        except SoakrigError as error:
            refused = error.message
        return {
            "host": socket.gethostname(), "boot_id": str(host_facts()["boot_id"]), "pid": os.getpid(),
            "soakrig": soakrig.__version__, "refused": refused,
        }  # fmt: skip

    def machine(self) -> dict[str, Any]:
        """As ``machine_state`` has it."""
        return machine_state(RealClock())

    def clear(self, mark: str) -> list[str]:
        """End what an earlier launch with ``mark`` left here; what could not be ended, in words."""
        return [f"process {one.pid} ({one.name}) in state {one.state}" for one in end_leftovers(mark)]

    def begin(
        self, campaign: Mapping[str, Any], arm: str, number: int, folder: str, mark: str, card: str | None
    ) -> None:
        """Start a launch, fields as of ``ArmLaunch``, from the environment of this node's login; ``next`` tells of it.
        Raises ``RuntimeError`` while another one runs."""
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("a launch runs here already, one at a time was expected")
        here, why = self._folder(Path(folder))
        launch = ArmLaunch(Campaign.from_json(campaign), arm, number, here, mark, card, self._environment)
        where = {"host": socket.gethostname(), "worker": os.getpid(), "folder": str(launch.runs_dir / launch.run_id)}
        self._items, self._handed, self._stop = queue.SimpleQueue(), None, Stop()
        teller = _QueueTeller(self._items, where)
        if why:
            teller.say(f"{why}: the run folders of {where['host']} are in {launch.runs_dir}")
        self._thread = threading.Thread(
            target=self._work, args=(launch, teller, self._stop, self._items), name="launch", daemon=True
        )
        self._thread.start()

    def next(self, refused: str = "") -> Event | None:
        """The next event, None where there is none for ``POLL_S`` seconds. The one before it is written, or was
        ``refused`` for that reason: then the launch ends after a teardown."""
        if self._handed is not None:
            self._handed.refused = refused
            self._handed.written.set()
            self._handed = None
        try:
            self._handed = self._items.get(timeout=POLL_S)
        except queue.Empty:
            return None
        return self._handed.event

    def stop(self, how: str) -> None:
        """As ``Stop.ask``."""
        self._stop.ask(how)

    def _work(self, launch: ArmLaunch, teller: Teller, stop: Stop, items: queue.SimpleQueue[_Item]) -> None:
        text = ""
        try:
            self._launcher.run(launch, teller, stop)
        except NotWrittenError:
            pass  # the driver knows it, or is gone
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
        items.put(_Item(Event(OVER, text)))

    def _folder(self, wanted: Path) -> tuple[Path, str]:
        """``wanted`` where it can be made and written here, else a folder of our own, and why."""
        runs = wanted / "runs"
        try:
            runs.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(runs, os.W_OK | os.X_OK):
                return wanted, ""
            why = f"{runs} cannot be written here"
        except OSError as error:
            why = f"{runs} cannot be made here ({error.strerror or error})"
        if self._elsewhere is None:
            self._elsewhere = Path(tempfile.mkdtemp(prefix=f"soakrig-{wanted.name}-"))
        return self._elsewhere, why


def node_environment() -> dict[str, str]:
    """The environment that this node's login gave to ``ray start``: its raylet has it as it was. Ray's workers have
    more (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES, RAY_*), which no engine may get."""
    try:
        data = Path(f"/proc/{_raylet()}/environ").read_bytes()
    except (OSError, ValueError):
        return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    pairs = (os.fsdecode(one).partition("=") for one in data.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}


def _raylet() -> int:
    """Pid of this node's raylet. Raises ``ValueError`` outside of a Ray worker."""
    return int(os.environ.get("RAY_RAYLET_PID", ""))


def _leave_with_raylet() -> None:
    """End this process once its raylet has died; the keepers then end the engines. Ray's own worker stays for as long
    as nobody has reaped the raylet."""
    try:
        descriptor = os.pidfd_open(_raylet())
    except ProcessLookupError:
        os._exit(1)
    except (OSError, ValueError):
        return  # a kernel without pidfd
    select.select([descriptor], [], [])
    os._exit(1)
