"""The process that owns a served model: ``python -P -m soakrig.engine.serving.supervisor``, its order on its input.

It outlives the terminal that it was started from, and nothing of the engine outlives it: the keeper below it sees to
that. On standard output it tells, one JSON object a line, how far the start has come (``progress``, ``note``), then
``ready`` or ``failed``, and ``ended`` at last; whoever read that may go away. SIGTERM stops the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from soakrig.engine import keeper
from soakrig.engine.bundled import Order, launch_bundled, preview
from soakrig.engine.launcher import EngineProcess
from soakrig.engine.registry import order_for
from soakrig.engine.registry_entry import Entry, expand
from soakrig.engine.serving import cgroup
from soakrig.engine.serving.canary import ask
from soakrig.engine.serving.folder import HINT, SHM, STOP, EngineFolder, Hint, boot_id
from soakrig.engine.serving.processes import SERVING, STOPPING
from soakrig.engine.shm import FOLDER as SHM_FOLDER
from soakrig.engine.shm import SharedMemory
from soakrig.engine.vllm.launch import free_port
from soakrig.errors import EngineStartError, SoakrigError, StoreError
from soakrig.record.redaction import redact_flags, redact_settings

LOOK_S = 1.0
CANARY_TRIES = 2
PROGRESS_LENGTH = 160
"""vLLM logs its whole configuration in one line."""


class Task(BaseModel):
    """What to serve. ``owner``: the process that must not be outlived, 0 for nobody; ``forced``: the refusals that were
    overridden, for the record."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entry: Entry
    mark: str
    root: str
    owner: int = 0
    forced: list[dict[str, Any]] = []


class Supervisor:
    """One served model, from its start to its end."""

    def __init__(self, task: Task, out: int) -> None:
        self._task, self._entry, self._out = task, task.entry, out
        self._folder = EngineFolder(task.entry.name, Path(task.root))
        self._stop, self._why = threading.Event(), ""
        self._shm = SharedMemory()
        self._groups: tuple[cgroup.Cgroup, cgroup.Cgroup] | None = None
        self._owner_fd, self._orphan = -1, False
        if task.owner:
            with contextlib.suppress(OSError):
                self._owner_fd = os.pidfd_open(task.owner)
            # It may have ended before this line, and its number may be somebody else's by now: a child knows.
            self._orphan = os.getppid() != task.owner

    def ask_to_stop(self, number: int, frame: object) -> None:
        """Signal handler."""
        self._why = self._why or signal.Signals(number).name
        self._stop.set()

    def run(self) -> int:
        """Serve until asked to stop or until the engine ends; the exit status."""
        try:
            engine = self._start()
        except (SoakrigError, OSError) as raised:
            error = raised if isinstance(raised, SoakrigError) else self._unwritten(raised)
            self._log(f"not started: {error.message}")
            self._record("failed", error=error.message)
            self._leave_cgroup()
            self._say("failed", {"kind": type(error).__name__, "message": error.message, "remedy": error.remedy})
            return error.exit_code
        while not self._stop.wait(LOOK_S) and engine.alive() and not self._owner_gone():
            self._look(engine)
        return self._end(engine)

    def _unwritten(self, error: OSError) -> StoreError:
        return StoreError(
            f"{error.filename or self._folder.path} cannot be written: {error.strerror or error}",
            remedy="Make room there, or set XDG_STATE_HOME to a folder that can be written.",
        )

    def _start(self) -> EngineProcess:
        began = time.monotonic()
        self._folder.rotate()
        self._enter_cgroup()
        port = self._entry.port or free_port()
        order = order_for(self._entry, port=port, mark=self._task.mark)
        self._keep_hint(port)
        argv, env = preview(order, self._folder.path / "engine.port")
        self._record("start", port=port, context=self._entry.context, argv=redact_flags(argv), env=redact_settings(env),
                     forced=self._task.forced)  # fmt: skip
        for one in self._task.forced:
            self._log(f"forced past {one['name']}: {one['text']}")
        engine = self._launch(order)
        try:
            self._keep_hint(port, engine)
            answer = self._canary(engine)
        except BaseException:
            engine.stop(min(self._entry.stop_s, 10.0))
            raise
        seconds = time.monotonic() - began
        self._log(f"ready on {engine.base_url} after {seconds:.1f} s, pid {engine.pid}; its canary: {answer!r}")
        self._record("ready", pid=engine.pid, seconds=round(seconds, 3))
        self._say("ready", {"url": engine.base_url, "pid": engine.pid, "port": port, "seconds": round(seconds, 3)})
        return engine

    def _launch(self, order: Order) -> EngineProcess:
        def note(text: str) -> None:
            self._log(text)
            if "takes the place of" not in text:  # the registry's word against the launcher's own is no news
                self._say("note", text)

        return launch_bundled(
            order,
            self._folder.path,
            note,
            lambda text: self._say("progress", text[:PROGRESS_LENGTH]),
            give_up=self._given_up,
        )

    def _canary(self, engine: EngineProcess) -> str:
        """The text of a sensible answer. Raises ``EngineStartError``."""
        self._say("progress", "asking for a first answer")
        why = ""
        for _ in range(CANARY_TRIES):
            answer = ask(engine.base_url, self._entry.model_name, self._entry.canary)
            if given_up := self._given_up():
                raise EngineStartError(f"the engine was given up before it was ready: {given_up}")
            if answer.verdict == "sensible":
                return answer.text[:200]
            why = f"{answer.verdict}: {answer.text}"
            if not engine.alive():
                break
        raise EngineStartError(
            f"{self._entry.name} came up and its canary was not answered sensibly ({why})",
            remedy=f"Broken kernels answer like this without an error; the engine's log is {self._folder.engine_log}",
        )

    def _end(self, engine: EngineProcess) -> int:
        keeper.prctl(keeper.PR_SET_NAME, STOPPING)
        asked = self._stop.is_set() or self._owner_gone()
        if asked:
            why = f"asked to stop ({self._why or 'whoever started it is gone'})"
        else:
            why = f"the engine ended by itself, exit status {engine.exit_status()}"
        self._look(engine)
        grace = self._grace()
        self._log(f"{why}; it has {grace:g} s")
        left = engine.stop(grace)
        self._shm.free()
        if not any(Path(SHM_FOLDER, name).exists() for name in self._shm.ours):
            self._folder.remove(SHM)
        if not left:
            self._folder.remove(HINT)
        rest = [f"pid {one.pid} ({one.name}) in state {one.state}" for one in left]
        self._log(f"ended: {', '.join(rest) if rest else 'nothing is left'}")
        self._record("ended", why=why, left=rest)
        self._leave_cgroup()
        self._say("ended", {"why": why, "left": rest, "asked": asked})
        return 0 if asked and not rest else 1

    def _grace(self) -> float:
        asked = self._folder.read(STOP)
        self._folder.remove(STOP)
        if isinstance(asked, dict) and asked.get("mark") == self._task.mark:
            return float(asked["grace"])
        return self._entry.stop_s

    def _given_up(self) -> str:
        if self._stop.is_set():
            return f"asked to stop ({self._why})"
        return "whoever started it is gone" if self._owner_gone() else ""

    def _owner_gone(self) -> bool:
        return self._orphan or (self._owner_fd >= 0 and bool(select.select([self._owner_fd], [], [], 0)[0]))

    def _look(self, engine: EngineProcess) -> None:
        """Write down which shared memory is this launch's: once everything was killed, nobody can be asked."""
        if self._shm.news():
            known = self._shm.ours
            self._shm.look(stat.pid for stat in keeper.descendants([engine.keeper_pid], keeper.every_stat()))
            if self._shm.ours != known:
                with contextlib.suppress(OSError):  # as in _record; the next object is another chance
                    self._folder.write(SHM, self._shm.ours)

    def _enter_cgroup(self) -> None:
        made = cgroup.make(self._entry.name, self._task.mark)
        if isinstance(made, str):
            self._log(f"no cgroup of its own ({made}): its processes are known by session and parents")
        else:
            self._groups = made

    def _leave_cgroup(self) -> None:
        if self._groups is not None:
            new, old = self._groups
            with contextlib.suppress(OSError):
                old.enter()
            new.remove()

    def _keep_hint(self, port: int, engine: EngineProcess | None = None) -> None:
        stat = keeper.read_stat(engine.pid) if engine is not None else None
        group = (cgroup.own() or "") if self._groups is not None else ""
        pid, ticks = (stat.pid, stat.ticks) if stat is not None else (0, 0)
        self._folder.write_hint(Hint(self._task.mark, boot_id(), pid, ticks, port, group))

    def _record(self, event: str, **facts: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end a model that serves
            self._folder.record({"event": event, "time": time.time(), "mark": self._task.mark, **facts})

    def _log(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
        with contextlib.suppress(OSError):
            self._folder.log(f"{stamp} [{os.getpid()}] {text}")

    def _say(self, what: str, data: Any) -> None:
        if self._out < 0:
            return
        try:
            os.write(self._out, json.dumps({what: data}).encode() + b"\n")
        except OSError:  # whoever listened has seen enough
            self._out = -1


def main() -> int:
    """Read the task, serve, and return the exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    keeper.prctl(keeper.PR_SET_NAME, SERVING)
    task = Task.model_validate_json(sys.stdin.buffer.read())
    out = os.dup(1)
    os.set_inheritable(out, False)
    os.dup2(2, 1)
    supervisor = Supervisor(task, out)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.ask_to_stop)
    if task.entry.directory:
        os.chdir(expand(task.entry.directory, os.environ.get("HOME", "")))
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
