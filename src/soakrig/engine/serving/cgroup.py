"""A cgroup (v2) of its own for each served model, where this user may make one: no process can leave it unseen."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

PREFIX = "soakrig-"


def mount(proc: Path = Path("/proc")) -> Path | None:
    """Where the v2 hierarchy is mounted (proc(5), mountinfo), None where it is not."""
    try:
        lines = (proc / "self" / "mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        if after.split(" ", 1)[0] == "cgroup2":
            return Path(before.split(" ")[4].encode().decode("unicode_escape"))
    return None


def own(proc: Path = Path("/proc"), pid: int | str = "self") -> str | None:
    """The v2 path of a process, as in ``0::/PATH`` of its cgroup file."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    return next((line[3:] for line in lines if line.startswith("0::")), None)


class Cgroup:
    """One cgroup by its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pids(self) -> list[int]:
        """Processes in it; empty where it is gone."""
        try:
            return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def enter(self) -> None:
        """Move this process in. Raises OSError."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def kill(self) -> None:
        """SIGKILL to everything in it (cgroup.kill, Linux 5.14); nothing where the kernel has none."""
        with contextlib.suppress(OSError):
            (self.folder / "cgroup.kill").write_text("1")

    def remove(self) -> bool:
        """Whether it is gone now; one with a process in it stays. A zombie counts until it is reaped, so this tries
        for a little."""
        for _ in range(20):
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return True
            except OSError:
                time.sleep(0.02)
            else:
                return True
        return False


def make(name: str, mark: str) -> tuple[Cgroup, Cgroup] | str:
    """A new cgroup for a model below this process's own, entered, and the one that was left; or why there is none."""
    root, path = mount(), own()
    if root is None or path is None:
        return "there is no cgroup v2 here"
    here = root / path.lstrip("/")
    new = Cgroup(here / f"{PREFIX}{name}-{mark[-8:]}")
    try:
        new.folder.mkdir()
    except OSError as error:
        return f"{here} is not ours to make a cgroup in: {error.strerror}"
    try:
        new.enter()
    except OSError as error:
        new.remove()
        return f"{new.folder} cannot be entered: {error.strerror}"
    return new, Cgroup(here)
