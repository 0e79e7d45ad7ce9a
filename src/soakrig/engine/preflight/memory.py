"""Host memory: enough for what is offloaded and what loading takes on top, and allowed to be locked."""

from __future__ import annotations

from pathlib import Path

from soakrig.engine.preflight.finding import GIB, Finding, gib, ok, refused, unknown
from soakrig.engine.preflight.gpu import wants_gpu
from soakrig.engine.preflight.machine import Machine
from soakrig.engine.registry_entry import Entry

_BIG = 1 << 60
"""Above it a cgroup's number means "no limit" (v1 shows the largest multiple of a page)."""


def check_host_ram(entry: Entry, machine: Machine) -> Finding:
    """``host_need_gib`` against what is available: MemAvailable, or less where this process's cgroup has a limit.

    Swap is not counted: pinned pages cannot go there.
    """
    name = "host-ram"
    try:
        whole = entry.host_need
    except ValueError as error:
        return unknown(name, str(error), "Correct it in the registry.")
    if whole is None:
        return unknown(name, "the registry does not say how much host memory it takes", "Set host_ram_gib.")
    try:
        available, where = _available(machine)
    except (OSError, ValueError, KeyError) as error:
        return unknown(name, f"{machine.proc / 'meminfo'} cannot be read: {error}")
    need, has = whole.total.to("GiB"), available / GIB
    listed = " + ".join(f"{part.to('GiB'):g} {part.source}" for part in whole.parts)
    parts = f" ({listed})" if len(whole.parts) > 1 else ""
    text = f"{need:g} GiB needed{parts}, {has:.1f} GiB {where}"
    if has < need:
        remedy = "Stop what holds memory (`soak engine list`), free /dev/shm, or offload less."
        return refused(name, text, remedy, needs=need, has=has, unit="GiB")
    return ok(name, text, needs=need, has=has, unit="GiB")


def _available(machine: Machine) -> tuple[int, str]:
    """Bytes, and where they were seen."""
    if machine.stated_ram is not None:
        return machine.stated_ram, "stated"
    memory = meminfo(machine)
    available, where = memory["MemAvailable"], "available"
    left = cgroup_room(machine)
    if left is not None and left < available:
        available, where = left, "left below this cgroup's limit"
    swap = memory.get("SwapTotal", 0)
    return available, f"{where}, " + ("no swap" if not swap else f"{gib(swap)} of swap, which pinned memory cannot use")


def check_memlock(entry: Entry, machine: Machine) -> Finding:
    """The limit on locked memory against what will be pinned: what is offloaded, where a card reads it."""
    name = "memlock"
    try:
        pinned = entry.offload_gib
    except ValueError as error:
        return unknown(name, str(error), "Correct it in the registry.")
    if not pinned or not wants_gpu(entry, machine):
        return ok(name, "nothing is pinned")
    try:
        limit = memlock(machine)
        free = machine.may_lock
    except (OSError, ValueError) as error:
        return unknown(name, f"the limit on locked memory cannot be read: {error}")
    if limit is None:
        return ok(name, "unlimited")
    text = f"{pinned:g} GiB will be pinned, {gib(limit)} may be locked"
    if free:
        return ok(name, f"{text}, which does not bind this process (CAP_IPC_LOCK)")
    if limit < pinned * GIB:
        remedy = "ulimit -l unlimited; LimitMEMLOCK=infinity in a unit; docker run --ulimit memlock=-1."
        return refused(name, text, remedy, needs=pinned, has=limit / GIB, unit="GiB")
    return ok(name, text, needs=pinned, has=limit / GIB, unit="GiB")


def meminfo(machine: Machine) -> dict[str, int]:
    """proc(5), meminfo: bytes by name. Raises OSError, ValueError."""
    found: dict[str, int] = {}
    for line in machine.read("meminfo").splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words:
            found[key] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def memlock(machine: Machine) -> int | None:
    """Bytes that a process may lock (the soft limit), None where there is no limit. Raises OSError, ValueError."""
    for line in machine.read("self", "limits").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return None if soft == "unlimited" else int(soft)
    raise ValueError("there is no line 'Max locked memory' in self/limits")


def cgroup_room(machine: Machine) -> int | None:
    """Bytes that this process's cgroups still allow, of all limits above it the tightest; None where there is none.

    cgroup v2 has memory.max and memory.current, v1 memory.limit_in_bytes and memory.usage_in_bytes.
    """
    try:
        lines = machine.read("self", "cgroup").splitlines()
    except OSError:
        return None
    base = machine.sys / "fs/cgroup"
    rooms: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for root in (base, base / "unified"):
                rooms += _rooms(root, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            rooms += _rooms(base / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(rooms, default=None)


def _rooms(root: Path, path: str, limit_name: str, used_name: str) -> list[int]:
    found: list[int] = []
    folder = root / path.lstrip("/")
    while True:
        try:
            limit = (folder / limit_name).read_text().strip()
            if limit != "max" and int(limit) < _BIG:
                # Page cache counts as used and gives way, so the kernel's "inactive_file" is added back.
                found.append(max(0, int(limit) - int((folder / used_name).read_text()) + _inactive(folder)))
        except (OSError, ValueError):
            pass  # this level has no limit, or is outside this container
        if folder == root or root not in folder.parents:
            return found
        folder = folder.parent


def _inactive(folder: Path) -> int:
    try:
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0
