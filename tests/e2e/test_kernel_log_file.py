"""A kernel log in a file, followed while it is written, rotated, truncated and created late."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from soakrig.clock import FakeClock
from soakrig.errors import UsageError
from soakrig.record.signal import Signal
from soakrig.soak.watch.kernel_log import KernelLogWatcher
from soakrig.soak.watch.log_file import LINE_MAX, RETIRED_S


def xid(number: int) -> str:
    return f"[ 100.000001] NVRM: Xid (PCI:0000:65:00): {number}, pid=9, name=w, Ch 00000001"


class Followed:
    """A watcher on ``path`` with every signal that it has given."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
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
    assert followed.state.state == "live"


def test_a_path_that_can_never_appear_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "kern.log", tmp_path):
        with pytest.raises(UsageError) as error:
            KernelLogWatcher(str(path), FakeClock())
        assert str(path) in str(error.value)


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
