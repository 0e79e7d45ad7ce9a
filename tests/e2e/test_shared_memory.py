"""Shared memory of an engine that has to be killed goes with it, however it ends; that of strangers stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from e2e.soaking import gone, wait_for
from soakrig.engine.launcher import EngineProcess, launch
from soakrig.engine.shm import SharedMemory as ShmLedger

SHM = Path("/dev/shm")

# A parent and a spawned child that share a block and a semaphore, as vLLM's processes do, and that ignore SIGTERM.
ENGINE = """
import json, multiprocessing, os, signal, sys, time
from multiprocessing.shared_memory import SharedMemory
def child(name, out):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    block = SharedMemory(name)
    open(out + "/child", "w").close()
    time.sleep(600)
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    out = sys.argv[1]
    context = multiprocessing.get_context("spawn")
    block, semaphore = SharedMemory(create=True, size=4096), context.Semaphore()
    process = context.Process(target=child, args=(block.name, out))
    process.start()
    while not os.path.exists(out + "/child"):
        time.sleep(0.01)
    names = {"block": block.name, "semaphore": "sem." + semaphore._semlock.name.lstrip("/"), "child": process.pid}
    with open(out + "/names.new", "w") as file:
        json.dump(names, file)
    os.rename(out + "/names.new", out + "/names")
    time.sleep(600)
"""
TOOL = """
import os, sys, time
from pathlib import Path
from soakrig.engine.launcher import launch
out = Path(sys.argv[1])
engine = launch([sys.executable, str(out / "engine.py"), str(out)], env=dict(os.environ), log_path=out / "engine.log",
                ready=lambda e: (out / "names").exists(), timeout=60, grace=0.2, scratch=True)
(out / "pids.new").write_text(f"{engine.keeper_pid} {engine.pid}")
os.rename(out / "pids.new", out / "pids")
time.sleep(600)
"""


class Started:
    """An engine with shared memory in ``folder``."""

    def __init__(self, folder: Path, *, scratch: bool = False) -> None:
        self.folder = folder
        (folder / "engine.py").write_text(ENGINE)
        self.engine: EngineProcess = launch(
            [sys.executable, str(folder / "engine.py"), str(folder)],
            env=dict(os.environ),
            log_path=folder / "engine.log",
            ready=lambda engine: (folder / "names").exists(),
            timeout=60,
            scratch=scratch,
        )
        self.names: dict[str, Any] = json.loads((folder / "names").read_text())
        self.block, self.semaphore = SHM / self.names["block"], SHM / self.names["semaphore"]
        assert self.block.exists()
        assert self.semaphore.exists()

    def trackers(self) -> list[int]:
        """Python's resource trackers among the engine's children."""
        text = f"/proc/{self.engine.pid}/task/{self.engine.pid}/children"
        pids = [int(pid) for pid in Path(text).read_text().split()]
        return [pid for pid in pids if b"resource_tracker import" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    one = Started(tmp_path)
    yield one
    one.engine.stop(0)


def test_a_killed_tree_leaves_neither_block_nor_semaphore(started: Started) -> None:
    assert started.engine.stop(0.1) == []
    assert not started.block.exists()
    assert not started.semaphore.exists()


def test_a_block_goes_even_when_the_resource_tracker_was_killed(started: Started) -> None:
    (tracker,) = started.trackers()
    os.kill(tracker, signal.SIGKILL)
    assert started.engine.stop(0.1) == []
    assert not started.block.exists()
    started.semaphore.unlink(missing_ok=True)  # nobody but the tracker knows whose it was


def test_what_was_seen_in_a_process_is_freed_after_its_death(tmp_path: Path) -> None:
    old = SharedMemory(create=True, size=64)  # there before the launch: another engine's, say
    ledger = ShmLedger()
    mine, strange = SharedMemory(create=True, size=64), SharedMemory(create=True, size=64)
    code = (
        "import mmap, os, sys, time\n"
        "kept = [mmap.mmap(os.open(name, os.O_RDWR), 64) for name in sys.argv[1:]]\n"
        "print(1, flush=True)\n"
        "time.sleep(600)\n"
    )
    argv = [sys.executable, "-c", code, str(SHM / mine.name), str(SHM / old.name)]
    try:
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as user:
            try:
                assert user.stdout is not None
                assert user.stdout.readline() == b"1\n"
                assert ledger.news()
                ledger.look([user.pid])
                assert ledger.free() == [], "it is in use, by that process and by this one"
            finally:
                user.kill()
        assert ledger.free() == [], "this process still has it mapped"
        for one in (mine, old, strange):
            one.close()
        assert ledger.free() == [mine.name]
        assert (SHM / old.name).exists()
        assert (SHM / strange.name).exists()
        for _ in range(20):
            ledger.look([])
        assert not ledger.news(), "what is nobody's of ours is not asked after for ever"
    finally:
        for one in (old, strange):
            one.close()
            one.unlink()
        resource_tracker.unregister(f"/{mine.name}", "shared_memory")  # freed behind its back


def test_what_a_stranger_made_meanwhile_stays(started: Started) -> None:
    strange = SharedMemory(create=True, size=4096)
    try:
        assert started.engine.stop(0.1) == []
        assert (SHM / strange.name).exists()
    finally:
        strange.close()
        strange.unlink()


def test_a_block_in_use_is_not_taken_from_its_user(started: Started) -> None:
    code = (
        "import mmap, os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "area = mmap.mmap(fd, 4096)\n"
        "os.close(fd)\n"
        "print('mapped', flush=True)\n"
        "time.sleep(600)\n"
    )
    (tracker,) = started.trackers()
    os.kill(tracker, signal.SIGKILL)  # which asks nobody
    with subprocess.Popen([sys.executable, "-c", code, str(started.block)], stdout=subprocess.PIPE) as user:
        try:
            assert user.stdout is not None
            assert user.stdout.readline() == b"mapped\n"
            assert started.engine.stop(0.1) == []
            assert started.block.exists(), "somebody has it mapped"
        finally:
            user.kill()
    for left in (started.block, started.semaphore):
        left.unlink(missing_ok=True)


def test_nothing_stays_when_the_tool_itself_is_killed(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "tool.py").write_text(TOOL)
    with subprocess.Popen([sys.executable, str(tmp_path / "tool.py"), str(tmp_path)]) as tool:
        try:
            wait_for("the engine", (tmp_path / "pids").exists)
            keeper, engine = map(int, (tmp_path / "pids").read_text().split())
            names = json.loads((tmp_path / "names").read_text())
            environ = Path(f"/proc/{engine}/environ").read_bytes().split(b"\0")
            scratch = Path(next(row for row in environ if row.startswith(b"TMPDIR=")).decode().partition("=")[2])
            assert scratch.is_dir()
        finally:
            tool.kill()
    wait_for("the end of the keeper", lambda: gone(keeper), 20)
    assert gone(engine)
    assert gone(names["child"])
    assert not (SHM / names["block"]).exists()
    assert not (SHM / names["semaphore"]).exists()
    assert not scratch.exists()


def test_nothing_stays_when_the_keeper_is_killed(started: Started) -> None:
    os.kill(started.engine.keeper_pid, signal.SIGKILL)
    wait_for("the end of the root, by the kernel", lambda: gone(started.engine.pid))
    assert started.engine.stop(0.1) == []
    assert not started.block.exists()
    assert not started.semaphore.exists()


def test_a_scratch_folder_goes_with_the_engine(tmp_path: Path) -> None:
    one = Started(tmp_path, scratch=True)
    environ = Path(f"/proc/{one.engine.pid}/environ").read_bytes().split(b"\0")
    scratch = Path(next(row for row in environ if row.startswith(b"TMPDIR=")).decode().partition("=")[2])
    (scratch / "socket").touch()
    assert one.engine.stop(0.1) == []
    assert not scratch.exists()
