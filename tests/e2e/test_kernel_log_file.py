"""A kernel log in a file, followed while it is written, rotated, truncated and created late."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from soakrig.clock import FakeClock, RealClock
from soakrig.errors import UsageError, WatcherError
from soakrig.record.signal import Signal, SourceName, SourceState
from soakrig.soak.watch.kernel_log import KernelLogWatcher
from soakrig.soak.watch.log_file import GONE_S, LINE_MAX, RETIRED_S
from soakrig.soak.watch.watcher import Sample, WatchGroup


def xid(number: int) -> str:
    return f"[ 100.000001] NVRM: Xid (PCI:0000:65:00): {number}, pid=9, name=w, Ch 00000001"


class Followed:
    """A watcher on ``path`` with every signal that it has given."""

    def __init__(self, path: Path, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.raw: list[str] = []
        self.watcher = KernelLogWatcher(str(path), self.clock, self.raw.append)
        self.state = self.watcher.open()

    def poll(self) -> list[Signal]:
        seen = self.watcher.poll()
        self.state = seen.state or self.state
        return list(seen.signals)

    def xids(self) -> list[int | None]:
        return [s.xid for s in self.poll()]


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_what_comes_after_the_start_is_a_signal(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    append(log, xid(13) + "\n")
    followed = Followed(log)
    assert followed.xids() == []
    append(log, xid(31) + "\nchatter\n" + xid(43) + "\n")
    assert followed.xids() == [31, 43]
    assert followed.xids() == []
    assert followed.raw == [xid(31), "chatter", xid(43)]
    assert followed.state.state == "live"
    assert "do not prove who wrote them" in followed.state.detail


def test_a_last_line_is_kept_until_its_newline(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    append(log, xid(31)[:40])
    followed = Followed(log)
    assert followed.xids() == []
    append(log, xid(31)[40:60])
    assert followed.xids() == []
    append(log, xid(31)[60:] + "\n")
    assert followed.xids() == [31]


def test_rotation_by_rename_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    append(log, "start\n")
    followed = Followed(log)
    append(log, xid(1) + "\n")
    os.rename(log, tmp_path / "kern.log.1")
    append(tmp_path / "kern.log.1", xid(2) + "\n")
    append(log, xid(3) + "\n")
    assert followed.xids() == [1, 2, 3]
    append(tmp_path / "kern.log.1", xid(4) + "\n")  # the writer has not switched yet
    append(log, xid(5) + "\n")
    assert followed.xids() == [4, 5]
    asyncio.run(followed.clock.advance(RETIRED_S + 1))
    assert followed.xids() == []
    append(log, xid(6) + "\n")
    assert followed.xids() == [6]
    assert followed.state.state == "live"


@pytest.mark.parametrize("longer", [False, True], ids=["shorter", "longer than before"])
def test_truncation_starts_over_and_is_told(tmp_path: Path, longer: bool) -> None:
    log = tmp_path / "kern.log"
    append(log, "a line of before\n" * 5)
    followed = Followed(log)
    append(log, xid(31) + "\n")
    assert followed.xids() == [31]
    log.write_text(xid(79) + "\n" + ("filler\n" * 40 if longer else ""))
    assert followed.xids() == [79]
    assert followed.state.state == "partial"
    assert "truncated" in followed.state.detail


def test_a_file_that_comes_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "later.log"
    followed = Followed(log)
    assert followed.state.state == "absent"
    assert "waited for" in followed.state.detail
    assert followed.xids() == []
    append(log, xid(31) + "\n")
    assert followed.xids() == [31]
    assert followed.state.state == "partial", "nobody knows where the driver's lines went before"
    assert "exists only since 1970-01-1" in followed.state.detail
    append(log, xid(43) + "\n")
    assert followed.xids() == [43]
    assert followed.state.state == "partial"


class DuringWaits(FakeClock):
    """A clock that does something in each wait."""

    act: Callable[[], None]

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.act()
        return super().wait(event, seconds)


def test_a_file_that_is_gone_is_a_gap_for_ever(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    followed = Followed(log)
    append(log, xid(31) + "\n")
    log.unlink()
    assert followed.xids() == [31], "what was written before is not lost, and is not held back"
    assert followed.state.state == "live"
    before = followed.clock.monotonic()
    assert followed.xids() == []
    assert followed.clock.monotonic() - before == pytest.approx(GONE_S, abs=0.05)
    assert followed.state.state == "partial"
    assert "gone since 1970-01-1" in followed.state.detail
    assert "nothing took its place" in followed.state.detail
    for count, number in enumerate((43, 45)):
        append(log, xid(number) + "\n")
        assert followed.xids() == [number], "read from its beginning"
        assert followed.state.state == "partial"
        assert "from 1970-01-1" in followed.state.detail
        assert ("was gone 2 times, first from" in followed.state.detail) is bool(count)
        assert "nothing took its place" not in followed.state.detail
        log.unlink()
        assert followed.xids() == []
        assert "gone since" in followed.state.detail


def test_a_file_that_comes_back_at_once_leaves_no_gap(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    followed = Followed(log, clock := DuringWaits())
    clock.act = lambda: append(log, xid(31) + "\n")
    log.rename(tmp_path / "kern.log.1")
    assert followed.xids() == [31]
    assert followed.state.state == "live"
    aside = log.rename(tmp_path / "aside")

    def move_back() -> None:
        if aside.exists():
            aside.rename(log)

    clock.act = move_back
    assert followed.xids() == [], "the same file: nothing is read twice"
    asyncio.run(clock.advance(GONE_S + 1))
    assert followed.xids() == []
    assert followed.state.state == "live"


class Kept:
    """A sink that keeps the states."""

    def __init__(self) -> None:
        self.states: list[SourceState] = []

    def signal(self, signal: Signal) -> None: ...

    def sample(self, source: SourceName, sample: Sample) -> None: ...

    def state(self, state: SourceState) -> None:
        self.states.append(state)


def test_a_file_deleted_just_before_the_end_is_not_live(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    watcher = KernelLogWatcher(str(log), RealClock())
    watcher.interval = 60.0  # the only poll is the last
    group = WatchGroup([watcher], kept := Kept(), RealClock())
    group.start()
    log.unlink()
    group.stop()
    assert [one.state for one in kept.states] == ["live", "partial"]
    assert "nothing took its place" in kept.states[1].detail


def test_a_path_that_becomes_a_device_ends_the_watch(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    followed = Followed(log)
    log.unlink()
    log.symlink_to("/dev/null")
    with pytest.raises(WatcherError, match=r"is a character device \(1:3\), no regular file"):
        followed.poll()


def test_a_path_that_can_never_be_a_log_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "kern.log"
    link.symlink_to("/dev/null")
    plain = tmp_path / "plain"
    plain.touch()
    plugged = socket.socket(socket.AF_UNIX)
    plugged.bind(str(tmp_path / "socket"))
    plugged.close()
    cases = {
        tmp_path / "no" / "kern.log": "nor its folder", plain / "kern.log": "nor its folder", tmp_path: "a folder",
        Path("/dev/null"): "character device (1:3)", Path("/dev/zero"): "character device (1:5)",
        link: "character device (1:3)", tmp_path / "socket": "a socket", Path("~no-such-user/kern.log"): "home",
    }  # fmt: skip
    for path, why in cases.items():
        with pytest.raises(UsageError) as error:
            KernelLogWatcher(str(path), FakeClock())
        assert str(path) in str(error.value)
        assert why in str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make device nodes")
def test_a_device_is_known_by_its_number_and_not_by_its_name(tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "kmsg", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(tmp_path / "ours", 0o600 | stat.S_IFCHR, os.makedev(1, 11))
        os.mknod(tmp_path / "disk", 0o600 | stat.S_IFBLK, os.makedev(1, 11))
    except PermissionError as error:
        pytest.skip(f"no device nodes here: {error}")
    KernelLogWatcher(str(tmp_path / "ours"), FakeClock())
    for name, why in (("kmsg", r"character device \(1:3\)"), ("disk", r"block device \(1:11\)")):
        with pytest.raises(UsageError, match=why):
            KernelLogWatcher(str(tmp_path / name), FakeClock())


def test_a_monster_line_is_cut_and_the_next_one_read(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    followed = Followed(log)
    append(log, "x" * (3 * LINE_MAX + 100) + "\n" + xid(31) + "\n")
    assert followed.xids() == [31]
    assert [len(line) for line in followed.raw] == [LINE_MAX, len(xid(31))]


def test_every_shape_of_line_is_recognised_in_one_file(tmp_path: Path) -> None:
    log = tmp_path / "mixed.log"
    log.touch()
    followed = Followed(log)
    body = "NVRM: Xid (PCI:0000:65:00): "
    append(log, f"4,1,99,c;{body}1, \n DEVICE=+pci:0000:65:00.0\n12,2,99,-;{body}2, \n")
    append(log, f'{{"_TRANSPORT":"kernel","MESSAGE":"{body}3, "}}\nMar 10 04:05:06 box kernel: {body}4, \n{body}5, \n')
    signals = followed.poll()
    assert [(s.xid, s.injected) for s in signals] == [(1, False), (2, True), (3, False), (4, False), (5, False)]


def test_the_address_of_a_gpu_dead_at_probe_comes_from_two_lines_up(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.touch()
    followed = Followed(log)
    append(
        log,
        "[    9.1] NVRM: The NVIDIA GPU 0000:b1:00.0\n"
        "           NVRM: (PCI ID: 10de:2204) installed in this system has\n"
        "           NVRM: fallen off the bus and is not responding to commands.\n",
    )
    dead = [s for s in followed.poll() if s.kind == "probe_fail"]
    assert [(s.severity, s.pci) for s in dead] == [("fault", "0000:b1:00")]
