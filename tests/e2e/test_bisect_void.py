"""What keeps a launch of `soak bisect` from saying anything: it is void with the reason, or refused; the campaign goes
on where it can, and ends by itself where it cannot."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bisect_engine import STAGING, Bisect, earlier, engine_site, small_campaign

SLOTS = "VLLM_MOE_HOT_SLOTS"
ERROR_FRAME = {"SOAKRIG_PLANT": json.dumps({"action": "error_frame", "hazard": 0.3})}
BASELINE = [("control", turn) for turn in (1, 2, 3, 5)]


@pytest.fixture
def bisect(tmp_path: Path) -> Iterator[Bisect]:
    with Bisect(tmp_path) as one:
        yield one


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A socket of this process that listens."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


@pytest.mark.parametrize(
    ("word", "right"),
    [("VLLM_MOE_DMA_STAGNG=1,0", "VLLM_MOE_DMA_STAGING"), ("--arg:--max-num-seqz=8,1", "--max-num-seqs was probably")],
)
def test_a_misspelt_name_is_refused_with_the_right_one(bisect: Bisect, word: str, right: str) -> None:
    bisect.start(word)
    done = bisect.done()
    told = done.object
    assert done.code == told["exit_code"] == 64
    assert right in told["error"] + told["remedy"]
    assert right in done.err
    assert not bisect.runs.exists()


DEAF = f"""
from soakrig.engine.offload.settings import OffloadSettings
plain = OffloadSettings.from_environment.__func__
def deaf(cls, environment=None):
    return plain(cls, {{name: value for name, value in os.environ.items() if name != "{STAGING}"}})
OffloadSettings.from_environment = classmethod(deaf)
"""


def test_an_engine_that_ignores_the_variable_makes_every_launch_void(bisect: Bisect, tmp_path: Path) -> None:
    bisect.start(f"{STAGING}=0,1", "--set", f"PYTHONPATH={engine_site(tmp_path, DEAF)}")
    done = bisect.done()
    result = done.object
    reason = f"treatment not in effect: {STAGING} was to be 0 and the engine reports 1 as in effect"
    assert [(one["arm"], one["result"], one["reason"]) for one in result["launches"]] == [
        ("control", "void", reason)
    ] * 3
    assert (done.code, result["state"]) == (2, "finished")
    assert result["ended"] == f"the control was void 3 times in a row: {reason}"
    assert result["arms"][0]["void_reasons"] == {reason: 3}
    assert result["arms"][0]["runs"] == 0
    assert done.err.count(reason) == 3
    bisect.nothing_left()


def asleep(folder: Path, value: str) -> str:
    """An engine that never gets ready with that value of ``SLOTS``."""
    return engine_site(folder, f"if os.environ.get('{SLOTS}') == '{value}':\n    time.sleep(600)")


def test_an_engine_that_never_gets_ready_is_void(bisect: Bisect, tmp_path: Path) -> None:
    settings = {"PYTHONPATH": asleep(tmp_path, "5"), **ERROR_FRAME}
    campaign = small_campaign({SLOTS: ["6", "5"]}, bisect.kernel_log, settings=settings, limits={"start": 3}, budget=1)
    earlier(bisect.runs / "campaign", campaign, *BASELINE)
    bisect.resume()
    done = bisect.done()
    result = done.object
    assert (done.code, result["state"]) == (2, "finished")
    assert len(result["launches"]) == 5
    assert (result["launches"][4]["arm"], result["launches"][4]["result"]) == (f"{SLOTS}=5", "void")
    assert "the engine was not ready within 3 s" in result["launches"][4]["reason"]
    assert {arm["name"]: arm["verdict"] for arm in result["arms"]} == {"control": "CONTROL", f"{SLOTS}=5": "VOID"}
    bisect.nothing_left(seconds=1.0)


@pytest.mark.slow  # its start limit has to leave time to the engines that do get ready
def test_beside_an_arm_that_never_gets_ready_the_others_go_on(bisect: Bisect, tmp_path: Path) -> None:
    fault = json.dumps({"action": "error_frame", "when": {SLOTS: "6"}})
    settings = {"PYTHONPATH": asleep(tmp_path, "5"), "SOAKRIG_PLANT": fault}
    campaign = small_campaign({SLOTS: ["6", "4", "5"]}, bisect.kernel_log, limits={"start": 30}, settings=settings)
    earlier(bisect.runs / "campaign", campaign, *BASELINE, *BASELINE, *[(f"{SLOTS}=4", None)] * 3)
    bisect.resume()
    done = bisect.done()
    result = done.object
    arms = {arm["name"]: arm for arm in result["arms"]}
    assert (done.code, result["state"], result["cause"]) == (0, "finished", [SLOTS])
    assert arms[f"{SLOTS}=4"]["verdict"] == "CLEARED"
    assert arms[f"{SLOTS}=5"]["verdict"] == "VOID"
    ((reason, times),) = arms[f"{SLOTS}=5"]["void_reasons"].items()
    assert (times, arms[f"{SLOTS}=5"]["void"]) == (3, 3)
    assert "the engine was not ready within 30 s" in reason
    assert result["ended"] == f"every arm is settled, but for {SLOTS}=5: void 3 times in a row"
    assert len(result["launches"]) > 11 + 3, "the other arm went on"
    bisect.nothing_left()


def test_what_the_engine_refuses_in_one_arm_is_void_there_and_tried_again_by_a_resume(bisect: Bisect) -> None:
    settings = {"CUDA_VISIBLE_DEVICES": "", **ERROR_FRAME}
    campaign = small_campaign({"--device": ["cpu", "cuda"]}, bisect.kernel_log, settings=settings)
    earlier(bisect.runs / "campaign", campaign, *BASELINE)
    bisect.resume()
    done = bisect.done()
    result = done.object
    assert (done.code, result["state"]) == (2, "finished")
    tried = [one for one in result["launches"] if one["arm"] == "--device=cuda"]
    assert [one["result"] for one in tried] == ["void"] * 3
    assert all("the engine ended before it was ready" in one["reason"] for one in tried)
    assert all("torch sees no CUDA device here" in one["reason"] for one in tried), tried
    assert "but for --device=cuda" in result["ended"]
    before = len(result["launches"])

    bisect.resume()  # somebody may have mended it since
    bisect.wait("another try", lambda: len(bisect.launches()) > before)
    bisect.signal(signal.SIGTERM)
    done = bisect.done()
    assert (done.code, done.object["state"]) == (2, "paused")
    assert done.object["launches"][before]["arm"] == "--device=cuda"


def test_a_port_that_is_taken_at_the_start_is_refused(bisect: Bisect, taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    bisect.start(f"{STAGING}=1,0", "--port", str(port))
    done = bisect.done()
    assert done.object["exit_code"] == done.code == 3
    assert f"port {port} of 127.0.0.1 is taken by pid {os.getpid()}" in done.object["error"]
    assert not bisect.runs.exists()


def test_a_port_that_is_taken_on_the_way_makes_a_void_launch_until_it_is_free(
    bisect: Bisect, taken: socket.socket
) -> None:
    port = taken.getsockname()[1]
    campaign = small_campaign({STAGING: ["1", "0"]}, bisect.kernel_log, port=port, turns=1000)
    earlier(bisect.runs / "campaign", campaign, *BASELINE)
    bisect.resume()
    bisect.wait("a void launch", lambda: any(run.result == "void" for run in bisect.launches()))
    taken.close()
    bisect.wait("a turn", lambda: bisect.launches()[-1].turns > 0)
    bisect.signal(signal.SIGINT)
    done = bisect.done()
    result = done.object
    void = [one for one in result["launches"] if one["result"] == "void"]
    assert 1 <= len(void) <= 2
    assert all(f"port {port} of 127.0.0.1 is taken by pid {os.getpid()} (" in one["reason"] for one in void)
    last = result["launches"][-1]
    assert (last["id"], last["result"], last["reason"]) == (5 + len(void), "interrupted", "stopped by Ctrl-C")
    assert (done.code, result["state"]) == (2, "paused")
    bisect.nothing_left()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all that is free."""
    path = disk / "other people's data"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with pytest.raises(OSError, match="No space"):
                write_for_ever(file, size)
    return path


def write_for_ever(file: io.FileIO, size: int) -> None:
    while True:
        file.write(bytes(size))


def test_a_full_disk_ends_the_campaign_and_with_room_it_goes_on(tmp_path: Path, small_disk: Path) -> None:
    with Bisect(tmp_path, small_disk / "runs") as bisect:
        bisect.start(f"{STAGING}=1,0", turns=100_000)
        bisect.wait_turns(2)
        rest = fill(small_disk)
        full(bisect)
        assert bisect.status()["state"] == "paused"

        with rest.open("r+b") as file:
            file.truncate(rest.stat().st_size - (4 << 20))  # the journal could go on, and no launch could
        bisect.resume()
        full(bisect)
        assert len(bisect.launches()) == 1

        rest.unlink()
        bisect.resume()
        bisect.wait_turns(2, run=2)
        bisect.signal(signal.SIGINT)
        done = bisect.done()
        assert (done.code, done.object["state"]) == (2, "paused")
        first, second = done.object["launches"]
        assert first["result"] in ("interrupted", "void")
        assert second["result"] == "interrupted"
        assert [arm["runs"] for arm in done.object["arms"]] == [0, 0], "infrastructure never counts as clean"
        bisect.nothing_left()


def full(bisect: Bisect) -> None:
    """The tool ended for want of room, said what to do, and left nothing running."""
    done = bisect.done()
    told = done.object
    assert done.code == told["exit_code"] == 2
    assert str(bisect.folder) in told["error"]
    assert "room" in told["remedy"] or "Free space" in told["remedy"]
    assert "soak bisect resume" in told["remedy"]
    assert told["error"] in done.err
    bisect.nothing_left(seconds=1.0)


@pytest.mark.parametrize("where", ["below a file", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, where: str) -> None:
    runs = Path(where) if where.startswith("/") else tmp_path / "kernel-source.log" / "runs"
    with Bisect(tmp_path, runs) as bisect:
        bisect.start(f"{STAGING}=1,0")
        done = bisect.done()
        assert done.object["exit_code"] == done.code == 2
        assert f"cannot write {runs}" in done.object["error"]
        assert done.object["remedy"]
