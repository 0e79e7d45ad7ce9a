"""The verbs of serving: start, stop, switch, and what is on this machine now."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from soakrig.clock import Clock, RealClock
from soakrig.engine import keeper
from soakrig.engine.launcher import MARK, Leftover
from soakrig.engine.preflight.checks import CHECKS, LASTING, MEMORY, check_names, refuse, run_checks
from soakrig.engine.preflight.finding import Finding, gib
from soakrig.engine.preflight.machine import GpuFacts, Machine, Serving, look_for_engine
from soakrig.engine.preflight.memory import meminfo
from soakrig.engine.registry import Registry, order_for
from soakrig.engine.registry_entry import STOP_S, Entry, expand
from soakrig.engine.serving import cgroup, memory_back
from soakrig.engine.serving.folder import HINT, SHM, STOP, EngineFolder, engines_folder, lock
from soakrig.engine.serving.memory_back import Held, Level
from soakrig.engine.serving.processes import (
    SUPERVISOR,
    Launch,
    find_launch,
    find_launches,
    held_bytes,
    members,
    new_mark,
)
from soakrig.engine.serving.state import ModelState, leaked, state_of
from soakrig.engine.serving.supervisor import Task
from soakrig.engine.shm import FOLDER as SHM_FOLDER
from soakrig.errors import EngineStartError, PreflightRefusedError, SoakrigError, StoreError, UsageError

_KINDS: dict[str, type[SoakrigError]] = {
    kind.__name__: kind for kind in (UsageError, PreflightRefusedError, EngineStartError, StoreError)
}
KILL_S = keeper.REST_GRACE + keeper.KILL_WAIT + 5.0
"""What a supervisor takes beyond the engine's grace before it is no longer waited for."""
NOBODYS_BYTES = 1 << 30
"""Card memory that no process shown holds and that is told; a driver keeps some hundred MiB itself."""
_POLL = 0.05


@dataclass
class Host:
    """This machine and the registry. ``gpu``: asks NVML anew; ``note``: is told lines that stay, ``progress`` how far a
    start has come."""

    registry: Registry
    gpu: Callable[[], GpuFacts] = GpuFacts
    root: Path = field(default_factory=engines_folder)
    note: Callable[[str], None] = lambda text: None
    progress: Callable[[str], None] = lambda text: None
    clock: Clock = field(default_factory=RealClock)

    def machine(self, entry: Entry, launches: Sequence[Launch], gpu: GpuFacts | None = None) -> Machine:
        """The machine as the preflights of ``entry`` see it."""
        known = self.registry.models
        serving = (
            Serving(one.name, one.pid, known[one.name].slot if one.name in known else "", one.pids) for one in launches
        )
        folder = EngineFolder(entry.name, self.root)
        return Machine(
            gpu=self.gpu() if gpu is None else gpu,
            installation=look_for_engine(order_for(entry)),
            serving=tuple(serving),
            launch_folder=folder.path,
        )

    def states(self, names: Iterable[str] | None = None, timeout: float | None = None) -> list[ModelState]:
        """How each model is; None: every one of the registry, and any that is here without being in it."""
        launches = {one.name: one for one in find_launches(self.root)}
        wanted = [*self.registry.models, *(launches.keys() - self.registry.models.keys())] if names is None else names
        return [
            state_of(name, self.registry.models.get(name), launches.get(name), self.root, timeout) for name in wanted
        ]


@dataclass(frozen=True)
class Started:
    """A model that is ready. ``lines``: what its supervisor tells from here on."""

    entry: Entry
    url: str
    pid: int
    seconds: float
    findings: list[Finding]
    process: subprocess.Popen[bytes]
    lines: Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Stopped:
    """What stopping came to. ``left``: processes that SIGKILL did not end; ``nobodys``: card memory that no process
    shown holds; ``freed``: shared memory that was leaked."""

    model: str
    was_running: bool
    killed: bool = False
    left: list[Leftover] = field(default_factory=list[Leftover])
    freed: list[str] = field(default_factory=list[str])
    nobodys: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "left": [one._asdict() for one in self.left]}


def preflight(
    host: Host, entry: Entry, force: Iterable[str] = (), names: Iterable[str] = tuple(CHECKS)
) -> list[Finding]:
    """Every preflight of ``entry`` on this machine now."""
    check_names(force)
    return run_checks(entry, host.machine(entry, find_launches(host.root)), force=force, names=names)


def serve(host: Host, entry: Entry, *, force: Iterable[str] = (), owner: int = 0) -> Started:
    """Check, start and wait until the model has answered. ``owner``: a process that it must not outlive, 0 for none.

    Raises ``PreflightRefusedError`` with every refusal that was not forced, else what the start raises.
    """
    held = lock(host.root)
    try:
        spawned = _spawn(host, entry, force, owner)
    finally:
        held.release()
    return _ready(host, spawned)


@dataclass(frozen=True)
class _Spawned:
    entry: Entry
    findings: list[Finding]
    process: subprocess.Popen[bytes]


def _spawn(host: Host, entry: Entry, force: Iterable[str], owner: int) -> _Spawned:
    """Check, and start the supervisor: from then on its processes show that the slot is taken."""
    folder = EngineFolder(entry.name, host.root)
    if find_launch(entry.name, host.root) is None:
        _tidy(folder, host)
    findings = preflight(host, entry, force)
    for one in findings:
        if one.state == "unknown":
            host.note(f"not known, {one.name}: {one.text}")
        elif one.forced:
            host.note(f"forced past {one.name}: {one.text}")
    refuse(entry.name, findings)
    folder.make()
    mark = new_mark(entry.name, uuid.uuid4().hex)
    forced = [one.to_json() for one in findings if one.forced]
    task = Task(entry=entry, mark=mark, root=str(host.root), owner=owner, forced=forced)
    where = Path(expand(entry.directory, os.environ.get("HOME", ""))) if entry.directory else folder.path
    with open(folder.supervisor_log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", SUPERVISOR],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                cwd=where, env={**os.environ, MARK: mark},
            )  # fmt: skip
        except OSError as error:
            raise EngineStartError(f"the supervisor could not be started in {where}: {error}") from error
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(task.model_dump_json().encode())
        process.stdin.close()
    return _Spawned(entry, findings, process)


def _ready(host: Host, spawned: _Spawned) -> Started:
    """Wait until it is. Raises what the supervisor tells; then it has ended."""
    entry, process = spawned.entry, spawned.process
    lines = _lines(process)
    try:
        ready = _until_ready(host, EngineFolder(entry.name, host.root), process, lines)
    except BaseException:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(entry.stop_s + KILL_S)
        raise
    return Started(entry, ready["url"], ready["pid"], ready["seconds"], spawned.findings, process, lines)


def _until_ready(
    host: Host, folder: EngineFolder, process: subprocess.Popen[bytes], lines: Iterator[dict[str, Any]]
) -> dict[str, Any]:
    for line in lines:
        if "progress" in line:
            host.progress(line["progress"])
        elif "note" in line:
            host.note(line["note"])
        elif "ready" in line:
            return line["ready"]
        elif "failed" in line:
            told = line["failed"]
            kind = _KINDS.get(told["kind"], EngineStartError)
            raise kind(told["message"], remedy=told["remedy"])
    status = process.wait()
    raise EngineStartError(
        f"the supervisor of {folder.name} ended without a word, exit status {status}",
        remedy=f"Its log is {folder.supervisor_log}",
    )


def _lines(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def stop(host: Host, name: str, shutdown_timeout: float | None = None) -> Stopped:
    """Ask the model to end, kill what has not ended after ``shutdown_timeout`` seconds (None: as the registry says),
    name what is left, and free the shared memory that it leaked."""
    held = lock(host.root)
    try:
        return _stop(host, name, shutdown_timeout)
    finally:
        held.release()


def _stop(host: Host, name: str, shutdown_timeout: float | None) -> Stopped:
    began = time.monotonic()
    folder = EngineFolder(name, host.root)
    launch = find_launch(name, host.root)
    if launch is None:
        return Stopped(name, was_running=False, freed=_tidy(folder, host))
    entry = host.registry.models.get(name)
    grace = shutdown_timeout if shutdown_timeout is not None else entry.stop_s if entry is not None else STOP_S
    if launch.supervisor is not None:
        try:
            folder.write(STOP, {"mark": launch.mark, "grace": grace})
        except OSError as error:  # a full disk is a reason to stop a model, not one to keep it
            host.note(f"{folder.path} cannot be written ({error.strerror}): {name} is given the time of its own table")
        with contextlib.suppress(ProcessLookupError):
            os.kill(launch.supervisor.pid, signal.SIGTERM)
            os.kill(launch.supervisor.pid, signal.SIGCONT)
        _wait_gone(launch.mark, host.root, grace + KILL_S)
    killed = bool(members(launch.mark, host.root)) and launch.supervisor is not None
    root_pid = launch.root.pid if launch.root is not None else 0
    left = keeper.end_tree(
        lambda: members(launch.mark, host.root), root_pid, 0.0 if launch.supervisor else grace, _pause
    )
    if left and launch.hint is not None and launch.hint.cgroup and (mount := cgroup.mount()) is not None:
        cgroup.Cgroup(mount / launch.hint.cgroup.lstrip("/")).kill()
    freed = _tidy(folder, host) if not left else []
    folder.remove(STOP)
    return Stopped(
        name,
        was_running=True,
        killed=killed,
        left=[Leftover(stat.pid, stat.name, stat.state) for stat in left],
        freed=freed,
        nobodys=_nobodys(host.gpu()),
        seconds=round(time.monotonic() - began, 2),
    )


def switch(
    host: Host, entry: Entry, *, force: Iterable[str] = (), owner: int = 0, shutdown_timeout: float | None = None,
    deadline_s: float = memory_back.DEADLINE_S,
) -> Started:  # fmt: skip
    """Stop what is in the model's slot, wait until its memory is back, and serve the model.

    What stopping does not change is checked first, so that a model that serves is not given up for one that cannot.
    Raises as ``serve``.
    """
    held = lock(host.root)
    try:
        if find_launch(entry.name, host.root) is not None:
            raise PreflightRefusedError(
                f"{entry.name} is on this machine already", remedy=f"`soak engine status {entry.name}` says how it is."
            )
        refuse(entry.name, preflight(host, entry, force, LASTING))
        for name in _in_the_way(host, entry):
            _make_room(host, name, entry, shutdown_timeout, deadline_s)
        spawned = _spawn(host, entry, force, owner)
    finally:
        held.release()
    return _ready(host, spawned)


def _in_the_way(host: Host, entry: Entry) -> list[str]:
    found: list[str] = []
    for one in find_launches(host.root):
        known = host.registry.models.get(one.name)
        if entry.slot and known is not None and known.slot == entry.slot and one.name not in found:
            found.append(one.name)
    return found


def _make_room(host: Host, name: str, entry: Entry, shutdown_timeout: float | None, deadline_s: float) -> None:
    launch = find_launch(name, host.root)
    if launch is None:
        return
    gpu = host.gpu()
    held = Held(held_bytes(sorted(launch.pids)), memory_back.held_on_cards(gpu, launch.pids))
    before = _level(gpu)
    host.progress(f"stopping {name}, which holds {gib(held.host)} of host memory")
    done = _stop(host, name, shutdown_timeout)
    host.note(f"{name} stopped after {done.seconds:.1f} s" + (", killed" if done.killed else ""))
    if done.left:
        names = ", ".join(f"pid {one.pid} ({one.name}, state {one.state})" for one in done.left)
        raise PreflightRefusedError(
            f"{name} could not be ended: {names}",
            remedy="A process in D state waits in the kernel: it may need a reboot.",
        )

    def fits() -> bool:
        machine = host.machine(entry, find_launches(host.root), GpuFacts())
        return all(one.state != "refused" for one in run_checks(entry, machine, names=MEMORY))

    left = memory_back.wait_back(
        held, before, lambda: _level(host.gpu()), host.clock, deadline_s=deadline_s, host_fits=fits
    )
    for text in left:
        host.note(f"after {deadline_s:g} s only {text}; the preflights decide")


def _level(gpu: GpuFacts) -> Level:
    return Level(meminfo(Machine())["MemAvailable"], memory_back.used_on_cards(gpu))


def _tidy(folder: EngineFolder, host: Host) -> list[str]:
    """Free what a dead launch of this model left: shared memory in nobody's hands, its empty cgroup."""
    hint = folder.hint()
    if hint is not None and hint.cgroup and (mount := cgroup.mount()) is not None:
        cgroup.Cgroup(mount / hint.cgroup.lstrip("/")).remove()
    ledger = leaked(folder)
    freed = ledger.free()
    if freed:
        host.note(f"freed shared memory that a dead {folder.name} left: {', '.join(freed)}")
    if not any(Path(SHM_FOLDER, one).exists() for one in ledger.ours):
        folder.remove(SHM)
    folder.remove(HINT)
    return freed


def _nobodys(gpu: GpuFacts) -> list[str]:
    return [
        f"{card}: {gib(card.unattributed)} in use that no process shown holds"
        for card in gpu.cards or ()
        if card.unattributed is not None and card.unattributed > NOBODYS_BYTES
    ]


def _wait_gone(mark: str, root: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while members(mark, root) and time.monotonic() < end:
        time.sleep(_POLL)


def _pause(seconds: float) -> float | None:
    time.sleep(seconds)
    return None
