"""The run folder when writing fails, comes in pieces, or comes in batches; seen at the calls to the system."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from builders import T0, manifest, source, turns
from soakrig.errors import StoreError
from soakrig.record.events import Note, dump
from soakrig.record.request_log import RequestLog, read_requests
from soakrig.record.store import EVENTS, RunReader, RunStore

PATIENCE_S = 10.0
BODY = b'{"model":"m","messages":[{"role":"user","content":"a"}]}'


def note(text: str) -> Note:
    return Note(T0, T0, text)


def fine(call: str, name: str, data: bytes) -> None:
    """Nothing goes wrong."""


class Calls:
    """The store's calls to the system in order: ``("write", "events.jsonl")``. ``before`` may raise or block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.made: list[tuple[str, str]] = []
        self.before: Callable[[str, str, bytes], None] = fine
        self._folder = f"{folder.resolve()}/"
        self._write, self._sync = os.write, os.fdatasync
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "fdatasync", self.sync)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._note("write", fd, bytes(data))
        return self._write(fd, data)

    def sync(self, fd: int) -> None:
        self._note("sync", fd, b"")
        self._sync(fd)

    def _note(self, call: str, fd: int, data: bytes) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.startswith(self._folder):
            name = Path(path).name
            self.before(call, name, data)
            self.made.append((call, name))


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, tmp_path)


class Held:
    """Holds the first write until ``go``, so that what is queued meanwhile is written as one batch."""

    def __init__(self, store: RunStore, calls: Calls, then: Callable[[str, str, bytes], None] = fine) -> None:
        self._held, self._go = threading.Event(), threading.Event()
        self._then = then
        calls.made.clear()
        calls.before = self._before
        store.append(note("first"))
        assert self._held.wait(PATIENCE_S)

    def go(self) -> None:
        self._go.set()

    def _before(self, call: str, name: str, data: bytes) -> None:
        if b"first" in data:
            self._held.set()
            self._go.wait(PATIENCE_S)
        self._then(call, name, data)


def test_other_files_are_on_disk_before_the_events_that_speak_of_them(tmp_path: Path, calls: Calls) -> None:
    store = RunStore.create(tmp_path, manifest())
    held = Held(store, calls)
    store.append(note("it speaks of a kernel line"))
    store.write_lines("kernel.log", [b"Xid"])
    store.write_lines("requests/c0000.jsonl", [b"{}"])
    store.append(note("and of a request"))
    held.go()
    store.close()
    assert calls.made[:2] == [("write", EVENTS), ("sync", EVENTS)]
    rest = calls.made[2:]
    assert rest[-2:] == [("write", EVENTS), ("sync", EVENTS)]
    assert sorted(rest[:-2]) == [
        ("sync", "c0000.jsonl"), ("sync", "kernel.log"), ("write", "c0000.jsonl"), ("write", "kernel.log"),
    ]  # fmt: skip


def test_a_commit_returns_after_the_sync_and_not_before(tmp_path: Path, calls: Calls) -> None:
    async def main() -> None:
        store = RunStore.create(tmp_path, manifest())
        calls.made.clear()
        await store.commit(note("one"))
        assert calls.made == [("write", EVENTS), ("sync", EVENTS)]
        store.write_lines("kernel.log", [b"Xid"])
        await store.commit(note("two"))
        assert set(calls.made[2:]) == {(call, name) for call in ("write", "sync") for name in ("kernel.log", EVENTS)}
        store.close()

    asyncio.run(main())


def full(call: str, name: str, data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_for(broken_call: str, broken_name: str) -> Callable[[str, str, bytes], None]:
    def before(call: str, name: str, data: bytes) -> None:
        if (call, name) == (broken_call, broken_name):
            full(call, name, data)

    return before


@pytest.mark.parametrize("broken", ["write", "sync"])
def test_after_a_failure_nothing_is_written_and_every_commit_raises(tmp_path: Path, calls: Calls, broken: str) -> None:
    async def main() -> None:
        store = RunStore.create(tmp_path, manifest())
        await store.commit(note("kept"))
        calls.before = full_for(broken, EVENTS)
        with pytest.raises(StoreError, match="No space left on device"):
            await store.commit(note("lost"))
        calls.before = fine  # there is space again, and a gap in the record all the same
        calls.made.clear()
        store.append(note("not written"))
        store.write_lines("kernel.log", [b"not written"])
        for _ in range(2):
            with pytest.raises(StoreError, match="No space left on device"):
                await store.commit(note("not written"))
        store.close()
        assert calls.made == []
        assert store.failed is not None
        assert not (store.folder / "kernel.log").exists()
        assert b"not written" not in (store.folder / EVENTS).read_bytes()
        assert next(RunReader(store.folder).events()) == note("kept")

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_every_commit_that_waits_learns_of_the_failure(tmp_path: Path, calls: Calls) -> None:
    async def main() -> list[BaseException | None]:
        store = RunStore.create(tmp_path, manifest())
        queued = threading.Event()

        def hold(call: str, name: str, data: bytes) -> None:
            queued.wait(PATIENCE_S)
            full(call, name, data)

        calls.before = hold
        waiting = [asyncio.ensure_future(store.commit(note(f"{n}"))) for n in range(5)]
        await asyncio.sleep(0)
        queued.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        store.close()
        return found

    found = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert [type(error) for error in found] == [StoreError] * 5


def test_an_event_is_not_written_when_what_it_speaks_of_could_not_be(tmp_path: Path, calls: Calls) -> None:
    async def main() -> None:
        store = RunStore.create(tmp_path, manifest())
        held = Held(store, calls, full_for("sync", "kernel.log"))
        store.write_lines("kernel.log", [b"Xid"])
        commit = asyncio.ensure_future(store.commit(note("speaks of it")))
        await asyncio.sleep(0)
        held.go()
        with pytest.raises(StoreError):
            await commit
        store.close()
        assert b"speaks of it" not in (store.folder / EVENTS).read_bytes()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_write_that_takes_a_part_only_is_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    events = turns(1, 5)
    store = RunStore.create(tmp_path, manifest())

    def short(fd: int, data: bytes | memoryview) -> int:
        return write(fd, bytes(data)[:7])

    monkeypatch.setattr(os, "write", short)
    for event in events:
        store.append(event)
    store.close()
    assert (store.folder / EVENTS).read_bytes() == b"".join(map(dump, events))


def test_a_line_of_nul_bytes_ends_the_reading(tmp_path: Path) -> None:
    """What power loss leaves where blocks were given to the file and never written."""
    store = RunStore.create(tmp_path, manifest())
    events = turns(1, 2)
    for event in events:
        store.append(event)
    store.close()
    path = store.folder / EVENTS
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 512 + b'"}\n' + dump(source("nvml", "live")))
    assert list(RunReader(store.folder).events()) == events


def test_a_line_of_nul_bytes_ends_a_request_log_as_well(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, manifest())
    log = RequestLog(store)
    for turn in (1, 2):
        log.sent(0, turn, 0, b'{"model":"m"', [b'{"role":"user","content":"a"}'], {}, BODY)
    store.close()
    path = store.folder / "requests" / "c0000.jsonl"
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    path.write_bytes(whole[:last] + b"\0" * 64 + b"\n" + whole[last:])
    assert [request.turn for request in read_requests(store.folder)] == [1]
