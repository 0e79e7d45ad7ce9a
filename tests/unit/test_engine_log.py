"""The engine-log watcher: death lines of several engines, quoted text, and files that grow, rotate and shrink."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soakrig.clock import FakeClock
from soakrig.errors import WatcherError
from soakrig.record.signal import Signal
from soakrig.soak.watch.death_lines import LINES, Reader, read_message
from soakrig.soak.watch.engine_log import EngineLogWatcher

LOGS = Path(__file__).parents[1] / "fixtures" / "engine_log"
ROWS = [json.loads(line) for line in (LOGS / "lines.jsonl").read_text().splitlines()]


def judge(*lines: str) -> list[tuple[str, str]]:
    """(name, severity) of each line that counts."""
    reader = Reader()
    found = [reader.judge(read_message(line)) for line in lines]
    return [(one[0].name, one[1]) for one in found if one is not None]


def watch(path: Path, clock: FakeClock | None = None, **options: object) -> EngineLogWatcher:
    watcher = EngineLogWatcher(path, clock or FakeClock(), **{"from_start": True, **options})  # type: ignore[arg-type]
    watcher.open()
    return watcher


def names(signals: object) -> list[str]:
    assert isinstance(signals, list)
    return [one.detail["name"] for one in signals if isinstance(one, Signal)]


def test_a_vllm_engine_that_dies() -> None:
    watcher = watch(LOGS / "vllm_illegal_access.log")
    seen = watcher.poll()
    watcher.close()
    assert names(seen.signals) == [
        "engine_core_fatal", "traceback", "illegal_access", "uncaught", "output_handler", "engine_dead",
        "engine_process_died",
    ]  # fmt: skip
    by_name = {one.detail["name"]: one for one in seen.signals}
    assert {one.severity for name, one in by_name.items() if name != "traceback"} == {"fault"}
    assert by_name["traceback"].severity == "warning"
    assert by_name["traceback"].kind == "log_line"
    illegal = by_name["illegal_access"]
    assert (illegal.kind, illegal.pid, illegal.process) == ("death_line", 4177, "EngineCore_DP0")
    assert illegal.raw == "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert seen.sample == {
        "log_running": 2.0, "log_waiting": 1.0, "log_prompt_tokens_per_s": 311.5, "log_output_tokens_per_s": 14.2,
    }  # fmt: skip


def test_quoted_text_is_no_fault() -> None:
    watcher = watch(LOGS / "vllm_quoting.log")
    seen = watcher.poll()
    watcher.close()
    assert [one for one in seen.signals if one.severity != "info"] == []
    assert seen.sample is not None
    assert (seen.sample["log_running"], seen.sample["log_output_tokens_per_s"]) == (3.0, 25.5), "sum of two engines"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "cuda_oom"),
        ("RuntimeError: CUDA error: out of memory", "cuda_oom"),
        ("RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered", "illegal_access"),
        ("RuntimeError: CUDA error: device-side assert triggered", "cuda_error"),
        ("TimeoutError: RPC call to sample_tokens timed out.", "rpc_timeout"),
        ("MemoryError", "host_oom"),
        ("OSError: [Errno 12] Cannot allocate memory", "host_oom"),
    ],
)
def test_the_end_of_a_traceback(line: str, name: str) -> None:
    head = "Traceback (most recent call last):"
    assert judge(head, '  File "x.py", line 1, in f', "    f()", line) == [("traceback", "warning"), (name, "fault")]
    assert judge(f"(EngineCore_DP0 pid=9) ERROR 11-29 21:14:40 [core.py:866] {line}") == [(name, "fault")]
    assert judge(line) == [(name, "info")], "bare and without a traceback: it may be quoted"
    assert judge(f"engine-1  | {line}", f"2026-11-29T06:50:07.81Z {line}") == [(name, "info")] * 2
    assert judge(head, *["filler"] * Reader.WINDOW, line)[1] == (name, "info")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_lines_of_several_engines_and_of_the_runtime(row: dict[str, str]) -> None:
    assert judge(row["line"]) == [(row["name"], row["severity"])]


@pytest.mark.parametrize(
    "line",
    [
        "Killed by the user's own wish: a story", "Aborted transactions are retried", "EngineCore started",
        "    raise EngineDeadError()", "the CUDA error was fixed", "INFO:     Segmentation fault", "",
        "Process SpawnProcess-1 finished: ok", "ERROR 11-29 21:14:40 [a.py:1] request failed: CUDA error in the prompt",
    ],
)  # fmt: skip
def test_ordinary_lines(line: str) -> None:
    assert judge(line) == []


def test_every_row_has_a_test_line() -> None:
    """A row that no line above reaches would be a guess."""
    text = Path(__file__).read_text() + (LOGS / "lines.jsonl").read_text()
    assert [line.name for line in LINES if f'"{line.name}"' not in text] == []


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    lines = text.split("\n")
    assert len(judge(*lines)) <= len(lines)


@given(st.text(alphabet="abc {}'\"\\n:", max_size=40))
def test_a_body_logged_at_info_never_counts(text: str) -> None:
    assert (
        judge(f"(APIServer pid=1) INFO 11-29 09:00:00 [logger.py:39] {text}CUDA error: x EngineDeadError Killed") == []
    )


def test_only_new_lines_of_an_attached_engine(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("Killed\n")
    watcher = watch(log, from_start=False)
    assert watcher.poll().signals == []
    with log.open("a") as file:
        file.write("Segmentation fault\n")
    assert names(watcher.poll().signals) == ["segfault"]
    watcher.close()


def test_an_unfinished_line_is_told_once(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("all well\nSegmentation fau")
    clock = FakeClock()
    watcher = watch(log, clock)
    assert watcher.poll().signals == []
    with log.open("a") as file:
        file.write("lt (core")
    assert names(watcher.poll().signals) == ["segfault"], "the process may never finish it"
    clock._now += 60.0
    assert watcher.poll().signals == []
    with log.open("a") as file:
        file.write(" dumped)\nKilled\n")
    assert names(watcher.poll().signals) == ["killed"]
    watcher.close()


@pytest.mark.parametrize("how", ["rename", "truncate", "gap"])
def test_rotation(tmp_path: Path, how: str) -> None:
    log = tmp_path / "engine.log"
    log.write_text("one line of the old file, long enough to be longer than the new one\n")
    watcher = watch(log)
    watcher.poll()
    if how == "truncate":
        log.write_text("Killed\n")
    else:
        with log.open("a") as file:
            file.write("Aborted\n")
        log.rename(tmp_path / "engine.log.1")
        if how == "gap":
            assert names(watcher.poll().signals) == ["aborted"]
        log.write_text("Killed\n")
    expected = {"rename": ["aborted", "killed"], "truncate": ["killed"], "gap": ["killed"]}[how]
    seen = watcher.poll()
    assert names(seen.signals) == expected
    assert (seen.state is not None and "truncated" in seen.state.detail) is (how == "truncate")
    watcher.close()


def test_a_file_rewritten_and_longer_than_before(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("all well\nSegmentation fau")
    watcher = watch(log, from_start=False)
    assert watcher.poll().signals == []
    log.write_text("Killed\n" + "filler\n" * 40)
    seen = watcher.poll()
    assert names(seen.signals) == ["killed"]
    assert seen.state is not None
    assert seen.state.state == "partial"
    with log.open("a") as file:
        file.write("Aborted\n")
    seen = watcher.poll()
    assert (names(seen.signals), seen.state) == (["aborted"], None), "read on, and told once"
    watcher.close()


def test_a_log_that_comes_later(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    watcher = EngineLogWatcher(log, FakeClock(), from_start=False)
    assert watcher.open().state == "partial"
    assert watcher.poll().state is None
    log.write_text("Killed\n")
    seen = watcher.poll()
    assert names(seen.signals) == ["killed"]
    assert seen.state is not None
    assert seen.state.state == "live"
    watcher.close()


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(WatcherError, match="nor is its folder"):
        watch(tmp_path / "no" / "engine.log")
    with pytest.raises(WatcherError, match="is a folder"):
        watch(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(WatcherError, match="is a FIFO, no regular file"):
        watch(tmp_path / "fifo")
    if os.geteuid() != 0:
        (tmp_path / "closed").touch(mode=0)
        with pytest.raises(WatcherError, match="Permission denied"):
            watch(tmp_path / "closed")


def test_a_flood_is_counted_and_not_repeated(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("Segmentation fault\n" * 500)
    clock = FakeClock()
    watcher = watch(log, clock)
    (first,) = watcher.poll().signals
    assert first.detail["left_out"] == 0
    clock._now += 31.0
    with log.open("a") as file:
        file.write("Segmentation fault\n")
    (second,) = watcher.poll().signals
    assert second.detail["left_out"] == 499
    watcher.close()


def test_an_endless_line_costs_no_memory(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with log.open("wb") as file:
        file.write(b"Segmentation fault " + b"x" * (3 << 20))
    watcher = watch(log)
    assert names(watcher.poll().signals) == ["segfault"]
    assert len(watcher._rest) <= 64 << 10
    with log.open("ab") as file:
        file.write(b"yKilled\nKilled\n")
    assert names(watcher.poll().signals) == ["killed"]
    watcher.close()


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"\xff\xfe\x00\nKilled\n")
    watcher = watch(log)
    assert names(watcher.poll().signals) == ["killed"]
    watcher.close()
