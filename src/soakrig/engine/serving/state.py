"""The state of a served model, computed each time: its processes, its port, and whether a canary is answered."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from soakrig.engine.registry_entry import Canary, Entry
from soakrig.engine.serving.canary import Answer, ask
from soakrig.engine.serving.folder import SHM, EngineFolder
from soakrig.engine.serving.processes import STOPPING, Launch, held_bytes, port_of
from soakrig.engine.shm import SharedMemory

StateName = Literal["stopped", "starting", "ready", "busy", "unresponsive", "failing", "stopping", "orphaned"]
SERVES: frozenset[str] = frozenset({"ready", "busy"})
CHANGING: frozenset[str] = frozenset({"starting", "stopping"})
LOOK_S = 10.0
"""How long a canary may take that only looks at the state."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """How a model is. ``why`` in words; ``held_bytes``: host memory that would come back; ``leaked``: shared memory of
    its dead processes, name -> bytes, in nobody's hands; ``forced``: preflights overridden at its start."""

    model: str
    state: StateName
    why: str = ""
    url: str = ""
    port: int = 0
    pid: int = 0
    supervisor: int = 0
    processes: list[int] = field(default_factory=list[int])
    uptime_s: float | None = None
    held_bytes: int = 0
    canary_s: float | None = None
    cgroup: str = ""
    leaked: Mapping[str, int] = field(default_factory=dict[str, int])
    forced: list[str] = field(default_factory=list[str])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def leaked(folder: EngineFolder) -> SharedMemory:
    """What an earlier launch wrote down as its shared memory, to be looked at or freed."""
    ledger = SharedMemory()
    known: Any = folder.read(SHM)
    if isinstance(known, dict):
        ledger.adopt({str(name): inode for name, inode in known.items() if type(inode) is int})
    return ledger


def state_of(
    name: str, entry: Entry | None, launch: Launch | None, root: Path, timeout: float | None = None
) -> ModelState:
    """The state now. ``entry`` None: the registry no longer has the model; ``timeout``: of the canary (``LOOK_S``)."""
    folder = EngineFolder(name, root)
    if launch is None:
        return ModelState(name, "stopped", last_words(folder), leaked=leaked(folder).leaked())
    port, listens = port_of(launch)
    answer: Answer | None = None
    if listens and launch.root is not None:
        model, canary = (entry.model_name, entry.canary) if entry is not None else (name, Canary(accept="anything"))
        answer = ask(f"http://127.0.0.1:{port}", model, canary, LOOK_S if timeout is None else timeout)
    state, why = _judge(launch, listens, answer)
    oldest = min(stat.ticks for stat in launch.stats)
    forced: list[str] = []
    for row in folder.launches():
        if row.get("mark") == launch.mark and row.get("event") == "start":
            forced = [one["name"] for one in row.get("forced", [])]
    return ModelState(
        name,
        state,
        why,
        url=f"http://127.0.0.1:{port}" if port else "",
        port=port,
        pid=launch.root.pid if launch.root else 0,
        supervisor=launch.supervisor.pid if launch.supervisor else 0,
        processes=sorted(launch.pids),
        uptime_s=round(time.clock_gettime(time.CLOCK_BOOTTIME) - oldest / os.sysconf("SC_CLK_TCK"), 1),
        held_bytes=held_bytes(sorted(launch.pids)),
        canary_s=round(answer.seconds, 3) if answer is not None else None,
        cgroup=launch.hint.cgroup if launch.hint else "",
        forced=forced,
    )


def _judge(launch: Launch, listens: bool, answer: Answer | None) -> tuple[StateName, str]:
    supervised = launch.supervisor is not None
    if supervised and launch.supervisor is not None and launch.supervisor.name == STOPPING.decode():
        return "stopping", "asked to stop; its processes have not all ended"
    if launch.root is None:
        if supervised:
            return "starting", "the engine is not there yet"
        return "orphaned", f"{len(launch.stats)} processes are left without the engine's first one"
    if answer is None:
        if supervised:
            return "starting", f"pid {launch.root.pid} does not listen yet"
        return "orphaned", f"pid {launch.root.pid} has no supervisor and does not listen"
    if answer.verdict == "sensible":
        lone = "" if supervised else "; its supervisor is gone, so its keeper will end it"
        return "ready", f"answered in {answer.seconds:.2f} s{lone}"
    if answer.verdict == "silent" and answer.moving:
        return "busy", f"{answer.text}, while its token counters move"
    if answer.verdict == "silent":
        return "unresponsive", f"{answer.text}, and its token counters stand still"
    return "failing", f"{answer.verdict}: {answer.text}"


def last_words(folder: EngineFolder) -> str:
    """How the last launch on record ended. Only what is not there any more is told from the record."""
    rows = folder.launches()
    if not rows:
        return "never started here"
    last = rows[-1]
    try:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last.get("time", 0)))
    except (TypeError, ValueError, OverflowError, OSError):
        when = "at some time"
    if last.get("event") == "ended":
        return f"since {when}: {last.get('why', '')}"
    if last.get("event") == "failed":
        return f"did not start {when}: {str(last.get('error', '')).splitlines()[0] if last.get('error') else ''}"
    return f"it was there after {when}, and its supervisor did not live to say how it ended"
