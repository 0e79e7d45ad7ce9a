"""The served models on this machine, found among its processes: nothing is remembered.

Every process of a launch carries ``SOAKRIG_LAUNCH=serve/NAME/...`` in its environment. One that wrote a title over it
is found by its parents, its session or its cgroup; where to look for those two comes from the model's folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from soakrig.engine import keeper
from soakrig.engine.launcher import MARK
from soakrig.engine.serving import cgroup
from soakrig.engine.serving.folder import KIND, EngineFolder, Hint

SUPERVISOR = "soakrig.engine.serving.supervisor"
SERVING, STOPPING = b"soakrig-serve", b"soakrig-stop"
"""Names that a supervisor gives itself (prctl(2), PR_SET_NAME): what it does is seen in the process table."""


@dataclass(frozen=True)
class Launch:
    """One launch of a model. ``supervisor``, ``keeper`` and ``root`` (the engine's first process) are None where they
    are gone; ``stats``: all that is left of it."""

    name: str
    mark: str
    stats: tuple[keeper.Stat, ...]
    supervisor: keeper.Stat | None = None
    keeper: keeper.Stat | None = None
    root: keeper.Stat | None = None
    hint: Hint | None = field(default=None, compare=False)

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(stat.pid for stat in self.stats)

    @property
    def engine_pids(self) -> list[int]:
        """Without supervisor and keeper."""
        ours = {one.pid for one in (self.supervisor, self.keeper) if one is not None}
        return [stat.pid for stat in self.stats if stat.pid not in ours]

    @property
    def pid(self) -> int:
        """The engine's root where it is there, else the supervisor, else whatever is left."""
        found = self.root or self.supervisor or self.keeper or self.stats[0]
        return found.pid


def new_mark(name: str, token: str) -> str:
    """The mark of one launch of ``name``."""
    return f"{KIND}{name}/{token}"


def name_of(mark: str) -> str:
    """The model that a mark is of, "" where it is no served model's."""
    kind, _, rest = mark.partition("/")
    return rest.rpartition("/")[0] if kind + "/" == KIND else ""


def find_launches(root: Path) -> list[Launch]:
    """Every launch of which a process is left, by name; ``root``: where the models' folders are."""
    stats = [stat for stat in keeper.every_stat() if keeper.is_running(stat) and stat.pid != os.getpid()]
    by_mark: dict[str, dict[int, keeper.Stat]] = {}
    for stat in stats:
        if name_of(mark := _mark(stat.pid)):
            by_mark.setdefault(mark, {})[stat.pid] = stat
    hints = _hints(root)
    for hint in hints:
        found = {stat.pid: stat for stat in stats if _hinted(hint, stat)}
        if found:
            by_mark.setdefault(hint.mark, {}).update(found)
    launches: list[Launch] = []
    for mark, members in by_mark.items():
        members |= {stat.pid: stat for stat in keeper.descendants(members, stats)}
        hint = next((one for one in hints if one.mark == mark), None)
        launches.append(_launch(mark, list(members.values()), hint))
    return sorted(launches, key=lambda one: (one.name, one.mark))


def find_launch(name: str, root: Path) -> Launch | None:
    """The newest launch of a model of which a process is left."""
    found = [one for one in find_launches(root) if one.name == name]
    return max(found, key=lambda one: max(stat.ticks for stat in one.stats)) if found else None


def members(mark: str, root: Path) -> list[keeper.Stat]:
    """What is left of one launch now."""
    return [stat for one in find_launches(root) if one.mark == mark for stat in one.stats]


def _launch(mark: str, stats: list[keeper.Stat], hint: Hint | None) -> Launch:
    stats.sort(key=lambda stat: stat.ticks)
    supervisor = next((stat for stat in stats if SUPERVISOR.encode() in _cmdline(stat.pid)), None)
    kept = next((stat for stat in stats if stat.name == "soakrig-keeper"), None)
    root = None
    if hint is not None and hint.pid:
        root = next((stat for stat in stats if (stat.pid, stat.ticks) == (hint.pid, hint.ticks)), None)
    elif kept is not None:
        root = next((stat for stat in stats if stat.ppid == kept.pid and stat.session == stat.pid), None)
    return Launch(name_of(mark), mark, tuple(stats), supervisor, kept, root, hint)


def _hints(root: Path) -> list[Hint]:
    try:
        names = [path.name for path in root.iterdir() if path.is_dir()]
    except OSError:
        return []
    hints = (EngineFolder(name, root).hint() for name in names)
    return [hint for hint in hints if hint is not None]


def _hinted(hint: Hint, stat: keeper.Stat) -> bool:
    if hint.pid and stat.session == hint.pid and stat.ticks >= hint.ticks:
        # A number is not given away while a session has it; with another leader it is another session.
        leader = keeper.read_stat(hint.pid)
        return leader is None or leader.ticks == hint.ticks
    return bool(hint.cgroup) and cgroup.own(pid=stat.pid) == hint.cgroup


def _mark(pid: int) -> str:
    prefix = f"{MARK}={KIND}".encode()
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
        for line in file.read().split(b"\0"):
            if line.startswith(prefix):
                return line[len(MARK) + 1 :].decode("utf-8", "replace")
    return ""


def _cmdline(pid: int) -> bytes:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
        return file.read()
    return b""


def listening(pids: Sequence[int]) -> set[int]:
    """TCP ports that these processes listen on, at 127.0.0.1 or any address."""
    found: set[int] = set()
    for pid in pids:
        with suppress(psutil.Error):
            for row in psutil.Process(pid).net_connections(kind="tcp"):
                if row.status == psutil.CONN_LISTEN and row.laddr:
                    found.add(row.laddr.port)
    return found


def port_of(launch: Launch) -> tuple[int, bool]:
    """The port, and whether anybody listens there. 0 where nothing tells."""
    open_ports = listening(launch.engine_pids)
    wanted = launch.hint.port if launch.hint is not None else 0
    if wanted:
        return wanted, wanted in open_ports
    return (min(open_ports), True) if open_ports else (0, False)


def held_bytes(pids: Sequence[int]) -> int:
    """Memory that would come back if these processes ended: their proportional share of anonymous and shared memory
    (proc(5), smaps_rollup). What may not be read counts as nothing."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:  # noqa: PTH123
            for line in file:
                if line.startswith((b"Pss_Anon:", b"Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
    return total
