"""The run folder: made once, appended to, readable after any cut.

``manifest.json``, ``events.jsonl``, ``kernel.log``, ``engine.log``, ``requests/``, ``evidence/``, ``result.json``; and
``latest`` beside the run folders. Folders are 0700 and files 0600: a run holds what was sent and answered.
"""

from __future__ import annotations

import asyncio
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout

from soakrig.errors import RecordError, StoreError
from soakrig.record.events import Event, dump, parse
from soakrig.record.judge import Judge
from soakrig.record.manifest import Manifest
from soakrig.record.result import Result

EVENTS, MANIFEST, RESULT, LOCK = "events.jsonl", "manifest.json", "result.json", ".lock"


def new_run_id(reproducer: str, now: float | None = None) -> str:
    """``20261129-150435-agent-loop-3f9a``: sorts by start, names the load, does not collide."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{stamp}-{reproducer}-{secrets.token_hex(2)}"


@dataclass
class _Write:
    name: str
    data: bytes
    done: asyncio.Future[None] | None
    loop: asyncio.AbstractEventLoop | None


class RunStore:
    """Writes one run. ``append`` may be called from any thread; ``commit`` waits until the disk has it.

    Writing happens in a thread of its own, so that a slow disk does not stop the load's clock; events that wait
    together are synced together. After the first failure (full disk, say) nothing more is written, ``failed`` holds
    the reason, and every ``commit`` raises ``StoreError``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: StoreError | None = None
        self._lock = FileLock(str(folder / LOCK), mode=0o600)
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        try:
            self._lock.acquire(timeout=0)
            self._fds = {EVENTS: self._open(EVENTS)}
        except (OSError, Timeout) as error:
            raise _cannot_write(folder, error) from error
        self._thread = threading.Thread(target=self._work, name="run-store", daemon=True)
        self._thread.start()

    @classmethod
    def create(cls, runs_dir: Path, manifest: Manifest) -> RunStore:
        """Make the folder of a new run, write its manifest and point ``latest`` at it."""
        folder = runs_dir / manifest.run_id
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)  # the engine's log may be there already
            (folder / "requests").mkdir(mode=0o700)
            store = cls(folder)
            store.write_json(MANIFEST, manifest.model_dump(mode="json"))
            _point_latest(runs_dir, folder.name)
        except OSError as error:
            raise _cannot_write(folder, error) from error
        return store

    def append(self, event: Event) -> None:
        """Queue an event; it is on disk after the next ``commit`` (or a moment later anyway)."""
        self._queue.put(_Write(EVENTS, dump(event), None, None))

    def write_lines(self, name: str, lines: list[bytes]) -> None:
        """Queue whole lines for another file of the folder, synced like events and before any later ``commit``."""
        self._queue.put(_Write(name, b"\n".join(lines) + b"\n", None, None))

    async def commit(self, event: Event) -> None:
        """Append an event and wait until it is synced. Raises ``StoreError`` when it cannot be."""
        if self.failed is not None:
            raise self.failed
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put(_Write(EVENTS, dump(event), done, loop))
        await done

    def write_json(self, name: str, data: Any) -> Path:
        """Write a small JSON file whole or not at all."""
        path = self.folder / name
        try:
            return write_private(path, orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        except OSError as error:
            raise _cannot_write(path, error) from error

    def check(self) -> None:
        """Raise ``StoreError`` for a folder that was deleted or moved while the run went on: what is written then
        reaches nobody."""
        path = self.folder / EVENTS
        try:
            same = path.stat().st_ino == os.fstat(self._fds[EVENTS]).st_ino
        except OSError:
            same = False
        if self.failed is None and not same:
            self.failed = StoreError(
                f"{path} is not the file that this run wrote: the folder was deleted or moved in mid-run",
                remedy="Keep run folders where they are while a run goes on.",
            )
        if self.failed is not None:
            raise self.failed

    def close(self) -> None:
        """Write out what is queued and release the folder."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            for fd in self._fds.values():
                os.close(fd)
            self._lock.release()

    def _open(self, name: str) -> int:
        return os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _write(self, items: list[_Write]) -> None:
        """Other files first: an event never speaks of what is not on disk."""
        parts: dict[str, list[bytes]] = {}
        for item in items:
            parts.setdefault(item.name, []).append(item.data)
        for name in sorted(parts, key=lambda n: n == EVENTS):
            if name not in self._fds:
                self._fds[name] = self._open(name)
            _write_all(self._fds[name], b"".join(parts[name]))
            os.fdatasync(self._fds[name])

    def _work(self) -> None:
        while True:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            items = [item for item in batch if item is not None]
            if items and self.failed is None:
                try:
                    self._write(items)
                except OSError as error:
                    self.failed = _cannot_write(self.folder / EVENTS, error)
            for item in items:
                if item.done is not None and item.loop is not None:
                    self._answer(item.loop, item.done)
            if len(items) < len(batch):
                return

    def _answer(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        failed = self.failed

        def settle() -> None:
            if done.done():
                return
            if failed is not None:
                done.set_exception(failed)
            else:
                done.set_result(None)

        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop is gone: nobody waits any more
            return


class RunReader:
    """Reads a run folder, finished, running or cut off."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            raw = (folder / MANIFEST).read_bytes()
            self.manifest = Manifest.model_validate_json(raw)
        except (OSError, ValueError) as error:
            raise RecordError(
                f"{folder} is no run folder: {MANIFEST} cannot be read ({_short(error)})",
                remedy="Give a folder below the runs directory, its name, or 'latest'.",
            ) from error

    def events(self) -> Iterator[Event]:
        """Every whole event. A cut last line (kill, power loss) ends the reading; a broken line inside is an error."""
        path = self.folder / EVENTS
        try:
            stream = path.open("rb")
        except OSError as error:
            raise RecordError(f"{path} cannot be read ({_short(error)})") from error
        with stream:
            for number, line in enumerate(stream, 1):
                if not line.endswith(b"\n") or line.startswith(b"\0"):
                    return
                yield parse(line, where=f"{path.name} line {number}")

    def running(self) -> bool:
        """Whether some process still writes this run. A lock that cannot be opened (another user's run, a read-only
        disk) is held by nobody who could write here."""
        if not (self.folder / LOCK).exists():
            return False
        lock = FileLock(str(self.folder / LOCK), mode=0o600)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        except OSError:
            return False
        lock.release()
        return False

    def judge(self) -> Judge:
        """A judge that has seen every event."""
        judge = Judge(self.manifest)
        for event in self.events():
            judge.feed(event)
        return judge

    def stored_result(self) -> Result | None:
        """``result.json`` as it stands, None where the run left none."""
        path = self.folder / RESULT
        try:
            return Result.from_json(orjson.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RecordError(
                f"{path} cannot be read ({_short(error)})", remedy="`soak report --rejudge` derives it again."
            ) from error


def find_run(runs_dir: Path, name: str) -> Path:
    """The folder of a run by path, name, unique start of a name, or ``latest``. Raises ``RecordError``."""
    try:
        for path in (Path(name), runs_dir / name):
            if name and (path / MANIFEST).exists():
                return path.resolve() if path.is_symlink() else path
        known = sorted(path.parent for path in runs_dir.glob(f"*/{MANIFEST}") if not path.parent.is_symlink())
    except OSError as error:
        raise RecordError(f"{runs_dir} cannot be read ({_short(error)})", remedy="Whose runs are they?") from error
    hits = [path for path in known if name and path.name.startswith(name)]
    if len(hits) == 1:
        return hits[0]
    what = f"{len(hits)} runs begin with {name!r}" if hits else f"there is no run {name!r} in {runs_dir}"
    names = ", ".join(path.name for path in known[-5:])
    raise RecordError(what, remedy=f"Runs: {names or 'none yet; `soak run` makes one'}.")


def write_private(path: Path, data: bytes) -> Path:
    """Write a 0600 file whole or not at all (write beside, sync, rename)."""
    beside = path.with_name(f".{path.name}.part")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    beside.replace(path)
    return path


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _point_latest(runs_dir: Path, name: str) -> None:
    beside, latest = runs_dir / f".latest-{secrets.token_hex(4)}", runs_dir / "latest"
    beside.symlink_to(name)
    try:
        beside.replace(latest)
    except OSError as error:
        beside.unlink()
        raise StoreError(
            f"{latest} cannot be pointed at the new run: {_short(error)}", remedy="Move away what stands there."
        ) from error


def _cannot_write(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"cannot write {path}: {_short(error)}",
        remedy="Free space or give another --runs-dir; what was written before stays readable.",
    )


def _short(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
