"""``soak doctor``: what this host can and cannot watch, and how to allow it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from rich.table import Table

from soakrig.cli.output import emit_json
from soakrig.clock import RealClock
from soakrig.errors import WatcherError
from soakrig.reports.terminal import LastingConsole

State = Literal["ok", "partial", "no"]
_STYLES = {"ok": "green", "partial": "yellow", "no": "red"}
_GIB = 1 << 30
_CAP_IPC_LOCK = 14
LITTLE_DISK, NO_DISK, LITTLE_SHM = 5 * _GIB, _GIB // 4, _GIB


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table. ``needed``: without it no run on this host can end in pass."""

    name: str
    state: State
    detail: str
    remedy: str = ""
    needed: bool = False


def check_kernel_log(choice: str = "auto") -> Check:
    """Whether the kernel log can be read, by opening it."""
    from soakrig.soak.watch.kernel_log import KernelLogWatcher

    watcher = KernelLogWatcher(choice, RealClock())
    try:
        state = watcher.open()
    except WatcherError as error:
        return Check("kernel log", "no", error.message, error.remedy, needed=True)
    watcher.close()
    return Check("kernel log", "ok" if state.state == "live" else "partial", state.detail, needed=True)


def check_nvml() -> Check:
    """Whether NVML answers; a machine without a GPU has none, and does not need one."""
    from soakrig.soak.watch.nvml import NvmlWatcher

    watcher = NvmlWatcher(RealClock())
    try:
        state = watcher.open()
    except WatcherError as error:
        remedy = "only where there is an NVIDIA GPU: install its driver; in a container, run it with --gpus all"
        return Check("NVML", "no", error.message, remedy)
    watcher.close()
    return Check("NVML", "ok" if state.state == "live" else "partial", state.detail)


def check_processes(root: Path = Path("/proc")) -> Check:
    """Whether processes of other users can be looked into."""
    try:
        mounts = (root / "self" / "mounts").read_text().splitlines()
    except OSError as error:
        return Check("processes", "no", f"{root} cannot be read: {error.strerror}", "mount /proc")
    options = next((line.split()[3] for line in mounts if line.split()[1:3] == ["/proc", "proc"]), "")
    hidden = next((option for option in options.split(",") if option.startswith("hidepid=")), "")
    if os.geteuid() == 0:
        return Check("processes", "ok", "root: states, open files and wait channels of every process")
    if hidden and hidden not in ("hidepid=0", "hidepid=off"):
        remedy = "run soak as the engine's user, or mount -o remount,hidepid=0 /proc"
        return Check(
            "processes", "partial", f"/proc is mounted with {hidden}: only this user's processes exist", remedy
        )
    detail = "states of every process; open files and wait channels of this user's only"
    return Check("processes", "partial", detail, "run soak as the engine's user or as root")


def check_ptrace(path: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> Check:
    """Whether a hung engine's stacks could be dumped (py-spy and gdb trace the process)."""
    try:
        scope = int(path.read_text())
    except FileNotFoundError:
        return Check("ptrace", "ok", "no Yama here: a process may trace those of its own user")
    except (OSError, ValueError) as error:
        return Check("ptrace", "partial", f"{path} cannot be read: {error}")
    if scope == 0 or (scope < 3 and os.geteuid() == 0):
        return Check("ptrace", "ok", f"ptrace_scope {scope}: stacks of a hung engine can be dumped")
    if scope == 3:
        return Check(
            "ptrace", "no", "ptrace_scope 3: nobody may trace until the next boot", f"set it in {path} at boot"
        )
    return Check("ptrace", "partial", f"ptrace_scope {scope}: only root can dump another process's stacks",
                 "run py-spy with sudo, or sysctl kernel.yama.ptrace_scope=0")  # fmt: skip


def check_cgroup(root: Path = Path("/")) -> Check:
    """The memory limit of this process's cgroup: an engine above it is killed without a word of its own."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError as error:
        return Check("cgroup", "no", f"the cgroup cannot be read: {error.strerror}")
    base = root / "sys/fs/cgroup"
    places: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places += [base / path.lstrip("/") / "memory.max", base / "memory.max"]
        elif "memory" in controllers.split(","):
            folder = base / "memory"
            places += [folder / path.lstrip("/") / "memory.limit_in_bytes", folder / "memory.limit_in_bytes"]
    for place in places:
        try:
            text = place.read_text().strip()
        except OSError:
            continue
        if text == "max" or int(text) >= psutil.virtual_memory().total:
            return Check("cgroup", "ok", "no memory limit below the machine's own")
        return Check("cgroup", "ok", f"memory limit {int(text) / _GIB:.1f} GiB: the kernel log tells when it kills")
    detail = "no memory controller is visible, so a limit cannot be told"
    return Check("cgroup", "partial", detail, "in a container, mount /sys/fs/cgroup read-only")


def check_disk(runs_dir: Path) -> Check:
    """Room for run folders: evidence that cannot be written makes a run inconclusive."""
    place = next(folder for folder in (runs_dir.absolute(), *runs_dir.absolute().parents) if folder.is_dir())
    if not os.access(place, os.W_OK | os.X_OK):
        return Check("disk", "no", f"{place} is not writable", "give a writable folder with --runs-dir", needed=True)
    free = psutil.disk_usage(str(place)).free
    state: State = "no" if free < NO_DISK else "partial" if free < LITTLE_DISK else "ok"
    remedy = "" if state == "ok" else "free some space, or give a folder on another disk with --runs-dir"
    return Check("disk", state, f"{free / _GIB:.1f} GiB free for run folders in {place}", remedy, needed=True)


def check_memlock() -> Check:
    """Whether host memory can be locked: experts that wait in host memory are pinned."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", "ok", "unlimited")
    shown = f"{soft / (1 << 20):.0f} MiB"
    if _has_capability(_CAP_IPC_LOCK):
        return Check("memlock", "ok", f"limit {shown}, which does not bind this process (CAP_IPC_LOCK)")
    remedy = "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else "LimitMEMLOCK=infinity in the unit"
    return Check("memlock", "partial", f"limit {shown}: large pinned buffers may be refused",
                 f"{remedy}; in docker --ulimit memlock=-1")  # fmt: skip


def check_shm(place: Path = Path("/dev/shm")) -> Check:  # noqa: S108  (it is looked at, not written to)
    """Shared memory, by which the processes of vLLM and NCCL talk; a container's default of 64 MiB is too little."""
    remedy = "docker run --shm-size=16g, or --ipc=host"
    if not place.is_dir():
        return Check("shared memory", "no", f"{place} is not there", remedy)
    total = psutil.disk_usage(str(place)).total
    if total < LITTLE_SHM:
        return Check("shared memory", "partial", f"only {total / (1 << 20):.0f} MiB in {place}", remedy)
    return Check("shared memory", "ok", f"{total / _GIB:.1f} GiB in {place}")


def examine(runs_dir: Path, kernel_log: str = "auto") -> list[Check]:
    """All checks, in the table's order. A check that breaks becomes a line of its own; the others go on."""
    checks: tuple[tuple[str, bool, Callable[[], Check]], ...] = (
        ("kernel log", True, lambda: check_kernel_log(kernel_log)),
        ("NVML", False, check_nvml),
        ("processes", False, check_processes),
        ("ptrace", False, check_ptrace),
        ("cgroup", False, check_cgroup),
        ("disk", True, lambda: check_disk(runs_dir)),
        ("memlock", False, check_memlock),
        ("shared memory", False, check_shm),
    )
    found: list[Check] = []
    for name, needed, check in checks:
        try:
            found.append(check())
        except (OSError, ValueError) as error:
            found.append(Check(name, "no", f"could not be checked: {type(error).__name__}: {error}", needed=needed))
    return found


def exit_code(checks: list[Check]) -> int:
    """0 when everything that a verdict needs is there, else 2."""
    return 2 if any(check.needed and check.state == "no" for check in checks) else 0


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
    runs_dir: Annotated[Path, typer.Option(help="Where run folders are to be made.")] = Path("runs"),
    kernel_log: Annotated[
        str,
        typer.Option("--kernel-log", metavar="auto|kmsg|journal|dmesg|PATH", help="Which kernel log to try."),
    ] = "auto",
) -> None:
    """Say what this host can and cannot watch, and how to allow it.

    Exit status: 0 when all that a verdict needs is there (kernel log, room for the run folder), 2 otherwise.
    """
    checks = examine(runs_dir, kernel_log)
    code = exit_code(checks)
    if as_json:
        rows = [asdict(check) for check in checks]
        emit_json({"checks": rows, "exit_code": code})
    else:
        _show(checks, code)
    raise typer.Exit(code)


def _show(checks: list[Check], code: int) -> None:
    console = LastingConsole(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("what", "state", "what was found, and what to do"):
        table.add_column(title, overflow="fold", no_wrap=title != "what was found, and what to do")
    for check in checks:
        words = check.detail + (f"\n-> {check.remedy}" if check.remedy and check.state != "ok" else "")
        table.add_row(check.name, f"[{_STYLES[check.state]}]{check.state}[/]", _plain(words))
    console.print(table)
    ending = "A run on this host can end in a verdict." if code == 0 else "A run on this host can only be inconclusive."
    console.print(ending, markup=False)


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def _has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & (1 << number))
    return False
