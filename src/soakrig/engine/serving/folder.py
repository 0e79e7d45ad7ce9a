"""Where a served model leaves its logs and what is known of its last launch: $XDG_STATE_HOME/soakrig/engines/NAME."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from soakrig.errors import PreflightRefusedError, StoreError

ENGINE_LOG, SUPERVISOR_LOG, LAUNCHES, HINT, SHM, STOP = (
    "engine.log", "supervisor.log", "launches.jsonl", "launch.json", "shm.json", "stop.json",
)  # fmt: skip
KEPT_LOGS = 5
LOCK_S = 5.0


def engines_folder(environ: Mapping[str, str] | None = None) -> Path:
    """``$XDG_STATE_HOME/soakrig/engines``, or the same under ``~/.local/state``."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME", "")
    state = Path(base) if base.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".local" / "state"
    return state / "soakrig" / "engines"


@dataclass(frozen=True, slots=True)
class Hint:
    """Where to look for a launch whose processes have lost their mark (a title written over their environment): its
    session and cgroup. What is there is looked at; this file alone proves nothing. ``ticks``: start of the engine's
    root (proc(5), field 22 of stat); ``boot_id``: the boot that these numbers are of."""

    mark: str
    boot_id: str
    pid: int = 0
    ticks: int = 0
    port: int = 0
    cgroup: str = ""


class EngineFolder:
    """The folder of one model (0700; its files 0600)."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        self.name = name
        self.path = (root or engines_folder()) / name

    def make(self) -> None:
        """Raises ``StoreError`` where it cannot be written."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be made: {error.strerror or error}",
                remedy="Set XDG_STATE_HOME to a folder that can be written.",
            ) from error

    @property
    def engine_log(self) -> Path:
        return self.path / ENGINE_LOG

    @property
    def supervisor_log(self) -> Path:
        return self.path / SUPERVISOR_LOG

    def rotate(self) -> None:
        """Begin a new engine.log; the last ``KEPT_LOGS`` stay as engine.log.1 and so on."""
        for number in range(KEPT_LOGS - 1, -1, -1):
            old = self.path / (f"{ENGINE_LOG}.{number}" if number else ENGINE_LOG)
            if old.exists():
                old.replace(self.path / f"{ENGINE_LOG}.{number + 1}")
        self.engine_log.touch(mode=0o600)

    def record(self, launch: dict[str, Any]) -> None:
        """Append one launch, or what became of one."""
        self._append(LAUNCHES, json.dumps(launch))

    def launches(self) -> list[dict[str, Any]]:
        """Every launch on record, oldest first; lines that were cut off are left out."""
        return list(self._lines(LAUNCHES))

    def write(self, name: str, data: Any) -> None:
        """A small JSON file, whole or not at all. Raises OSError."""
        part = self.path / f".{name}.{os.getpid()}"
        try:
            with open(part, "w", opener=_private, encoding="utf-8") as file:
                json.dump(data, file)
            part.replace(self.path / name)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def read(self, name: str) -> Any:
        """Its data, None where it is not there or is none of ours."""
        try:
            return json.loads((self.path / name).read_text("utf-8"))
        except (OSError, ValueError):
            return None

    def remove(self, name: str) -> None:
        """Forget a small file."""
        (self.path / name).unlink(missing_ok=True)

    def write_hint(self, hint: Hint) -> None:
        """Keep where this launch can be found."""
        self.write(HINT, asdict(hint))

    def hint(self) -> Hint | None:
        """The last launch's, where it is of this boot."""
        data = self.read(HINT)
        try:
            found = Hint(**data)
        except TypeError:
            return None
        return found if found.boot_id == boot_id() else None

    def log(self, text: str) -> None:
        """A line of the supervisor's log."""
        self._append(SUPERVISOR_LOG, text)

    def _append(self, name: str, line: str) -> None:
        with open(self.path / name, "a", opener=_private, encoding="utf-8") as file:
            file.write(line + "\n")

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        try:
            lines = (self.path / name).read_text("utf-8", "replace").splitlines()
        except OSError:
            return
        for line in lines:
            try:
                found: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def lock(root: Path) -> FileLock:
    """Held while models are started and stopped, so that two commands do not take one slot. Raises ``StoreError``, and
    ``PreflightRefusedError`` where another command holds it."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = FileLock(str(root / ".lock"), mode=0o600)
        held.acquire(timeout=LOCK_S)
    except Timeout as error:
        raise PreflightRefusedError(
            f"another `soak engine` starts or stops a model now ({root / '.lock'})", remedy="Wait until it is done."
        ) from error
    except OSError as error:
        raise StoreError(f"{root} cannot be written: {error.strerror or error}",
                         remedy="Set XDG_STATE_HOME to a folder that can be written.") from error  # fmt: skip
    return held


def boot_id() -> str:
    """The kernel's name for this boot: pids and ticks of another one mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
