"""The run folder: synced, private, readable after any cut."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from builders import T0, alive, ended, judged, kernel_live, manifest, turns, xid
from soakrig.errors import RecordError, StoreError
from soakrig.record.events import dump, parse
from soakrig.record.request_log import RequestLog, body_digest, read_requests
from soakrig.record.store import EVENTS, RunReader, RunStore, find_run, new_run_id

EVENTS_OF_A_RUN = [kernel_live(), *turns(1, 3), xid(31, T0 + 2), alive(), ended()]


def written(folder: Path) -> Path:
    store = RunStore.create(folder, manifest())
    for event in EVENTS_OF_A_RUN:
        store.append(event)
    store.close()
    return store.folder


def test_what_was_written_is_read_and_judged_the_same(tmp_path: Path) -> None:
    folder = written(tmp_path)
    reader = RunReader(folder)
    assert list(reader.events()) == EVENTS_OF_A_RUN
    assert reader.judge().result() == judged(*EVENTS_OF_A_RUN).result()
    assert not reader.running()
    assert (tmp_path / "latest").resolve() == folder.resolve()


def test_a_cut_at_any_byte_is_readable(tmp_path: Path) -> None:
    folder = written(tmp_path)
    whole = (folder / EVENTS).read_bytes()
    ends = [n for n, byte in enumerate(whole) if byte == 10]
    for cut in range(0, len(whole) + 1, 7):
        (folder / EVENTS).write_bytes(whole[:cut])
        expected = sum(end < cut for end in ends)
        assert len(list(RunReader(folder).events())) == expected
    (folder / EVENTS).write_bytes(whole[: ends[2] + 1] + b"\0" * 512)
    assert len(list(RunReader(folder).events())) == 3, "a block of zeros is what power loss leaves"


def test_a_broken_line_inside_is_an_error_with_its_number(tmp_path: Path) -> None:
    folder = written(tmp_path)
    lines = (folder / EVENTS).read_bytes().splitlines(keepends=True)
    lines[2] = b'{"kind": "turn", "nonsense": 1}\n'
    (folder / EVENTS).write_bytes(b"".join(lines))
    with pytest.raises(RecordError, match=r"events.jsonl line 3"):
        list(RunReader(folder).events())


def test_unknown_keys_in_an_event_are_refused() -> None:
    line = dump(EVENTS_OF_A_RUN[0]).replace(b'"kind"', b'"extra":1,"kind"', 1)
    with pytest.raises(RecordError, match="extra"):
        parse(line)


def test_everything_is_private(tmp_path: Path) -> None:
    folder = written(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_commit_returns_after_the_bytes_are_there(tmp_path: Path) -> None:
    async def main() -> None:
        store = RunStore.create(tmp_path, manifest())
        size = 0
        for event in EVENTS_OF_A_RUN:
            await store.commit(event)
            size += len(dump(event))
            assert (store.folder / EVENTS).stat().st_size == size
        store.close()

    asyncio.run(main())


def test_a_running_run_is_known_as_such(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, manifest())
    reader = RunReader(store.folder)
    assert reader.running()
    store.close()
    assert not reader.running()


FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from builders import manifest, turns
from soakrig.errors import StoreError
from soakrig.record.store import RunStore

async def main():
    store = RunStore.create(Path(sys.argv[1]), manifest())
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    written = 0
    try:
        for event in turns(1, 100):
            await store.commit(event)
            written += 1
    except StoreError as error:
        print(written, str(error).splitlines()[0])
    assert store.failed is not None
    store.close()

asyncio.run(main())
"""


def test_a_disk_that_fills_up_stops_the_writing_and_keeps_what_was_there(tmp_path: Path) -> None:
    """A file-size limit is how a process of its own gets the failing write of a full disk."""
    here = Path(__file__).parent.parent
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), str(here)], capture_output=True, text=True, check=True
    )
    written, message = run.stdout.split(" ", 1)
    assert "cannot write" in message
    events = list(RunReader(find_run(tmp_path, "latest")).events())
    assert 0 < len(events) <= int(written) + 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from builders import manifest, turns
from soakrig.record.store import RunStore

async def main():
    store = RunStore.create(Path(sys.argv[1]), manifest(turns=10**9))
    number = 0
    while True:
        number += 1
        for event in turns(number, number):
            await store.commit(event)
        print(number, flush=True)

asyncio.run(main())
"""


def test_kill_9_loses_no_committed_turn(tmp_path: Path) -> None:
    here = Path(__file__).parent.parent
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), str(here)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    last = 0
    deadline = time.monotonic() + 20
    while last < 200 and time.monotonic() < deadline:
        last = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    rest = child.stdout.read().split()
    child.wait()
    child.stdout.close()
    last = int(rest[-1]) if rest and rest[-1].isdigit() else last
    reader = RunReader(find_run(tmp_path, "latest"))
    done = [event.turn for event in reader.events() if event.kind == "turn"]
    assert done[: last - 1] == list(range(1, last))
    assert len(done) in (last - 1, last, last + 1)
    assert not reader.running()
    assert reader.judge().result().verdict == "inconclusive"


def test_finding_runs(tmp_path: Path) -> None:
    folder = written(tmp_path)
    assert find_run(tmp_path, "latest") == folder.resolve()
    assert find_run(tmp_path, folder.name) == folder.resolve()
    assert find_run(tmp_path, str(folder)) == folder
    assert find_run(tmp_path, "20261129-15") == folder
    with pytest.raises(RecordError, match="there is no run 'nope'"):
        find_run(tmp_path, "nope")
    with pytest.raises(RecordError, match="is no run folder"):
        RunReader(tmp_path)


def test_run_ids_name_the_load_and_differ() -> None:
    one, other = new_run_id("agent-loop"), new_run_id("agent-loop")
    assert one != other
    assert "agent-loop" in one


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StoreError, match="cannot write"):
        RunStore.create(tmp_path / "runs", manifest())


def test_requests_come_out_byte_for_byte_and_share_their_messages(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, manifest())
    log = RequestLog(store)
    head = b'{"model":"m","tools":[1,2]'
    bodies: list[bytes] = []
    messages: list[bytes] = []
    for turn in range(1, 41):
        part = (turn - 1) // 15
        if turn in (16, 31):
            messages = []
        messages.append(b'{"role":"user","content":"turn %d %s"}' % (turn, b"x" * 200))
        extra = {"seed": turn}
        body = head + b',"messages":[' + b",".join(messages) + b'],"seed":%d}' % turn
        log.sent(3, turn, part, head, messages, extra, body)
        bodies.append(body)
    store.close()
    stored = list(read_requests(store.folder))
    assert [request.body for request in stored] == bodies
    assert [(request.conversation, request.turn) for request in stored] == [(3, n) for n in range(1, 41)]
    size = (store.folder / "requests" / "c0003.jsonl").stat().st_size
    assert size < sum(map(len, bodies)) / 4


def test_a_request_log_that_was_changed_is_found_out(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, manifest())
    body = b'{"model":"m","messages":[{"role":"user","content":"a"}]}'
    RequestLog(store).sent(0, 1, 0, b'{"model":"m"', [b'{"role":"user","content":"a"}'], {}, body)
    store.close()
    path = store.folder / "requests" / "c0000.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"b"'))
    with pytest.raises(RecordError, match="does not come out as it was sent"):
        list(read_requests(store.folder))
    assert len(body_digest(body)) == 16


def test_without_text_only_digests_are_kept(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, manifest())
    body = b'{"model":"m","messages":[{"role":"user","content":"secret"}]}'
    RequestLog(store, keep_text=False).sent(0, 1, 0, b'{"model":"m"', [b'{"role":"user","content":"secret"}'], {}, body)
    store.close()
    assert b"secret" not in (store.folder / "requests" / "c0000.jsonl").read_bytes()
    with pytest.raises(RecordError, match="its text was not kept"):
        list(read_requests(store.folder))
