"""/dev/kmsg: the real device where it may be read, a FIFO of its records, and an overrun that cannot be had at will."""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from pathlib import Path

import pytest

from soakrig.clock import FakeClock, RealClock
from soakrig.errors import WatcherError
from soakrig.record.signal import Signal
from soakrig.soak.watch.kernel_log import KernelLogWatcher
from soakrig.soak.watch.kmsg import BUFFER, KmsgReader

KMSG = Path("/dev/kmsg")


def refusal(flags: int) -> str:
    """Why /dev/kmsg cannot be opened here; empty where it can."""
    try:
        os.close(os.open(KMSG, flags | os.O_NONBLOCK))
    except OSError as error:
        return f"/dev/kmsg: {error.strerror}"
    return ""


needs_reading = pytest.mark.skipif(bool(refusal(os.O_RDONLY)), reason=refusal(os.O_RDONLY) or "-")
needs_writing = pytest.mark.skipif(bool(refusal(os.O_RDWR)), reason=refusal(os.O_RDWR) or "-")


@needs_writing
def test_a_line_written_by_a_program_comes_back_as_injected() -> None:
    mark = uuid.uuid4().hex[:12]
    raw: list[str] = []
    watcher = KernelLogWatcher("kmsg", RealClock(), raw.append)
    assert watcher.open().state == "live"
    before = time.monotonic()
    try:
        # The device takes 10 lines in 5 s from programs and drops the rest without a word; hence one line, few tries.
        # Without its newline a line may be held back until the next one.
        found: list[Signal] = []
        for _ in range(3):
            with KMSG.open("wb", buffering=0) as device:
                device.write(b"<4>NVRM: Xid (PCI:0000:65:00): 31, pid=1, name=%s, Ch 00000001\n" % mark.encode())
            deadline = time.monotonic() + 2
            while not found and time.monotonic() < deadline:
                found = [s for s in watcher.poll().signals if s.process == mark]
                threading.Event().wait(0.02)
            if found:
                break
        else:
            pytest.skip("the kernel dropped the test's line (printk_devkmsg rate limit)")
    finally:
        watcher.close()
    (signal,) = found
    assert (signal.kind, signal.xid, signal.injected, signal.severity) == ("xid", 31, True, "fault")
    assert signal.pci == "0000:65:00"
    assert any(mark in line for line in raw)
    assert before - 1 <= signal.mono <= time.monotonic()
    assert abs(signal.time - time.time()) < 10
    assert 0 <= signal.error_s < 5


@needs_reading
def test_the_buffer_is_read_once_from_its_oldest_record() -> None:
    reader = KmsgReader()
    reader.open(once=True)
    records = []
    while True:
        batch = reader.read()
        records += batch.records
        if batch.at_end:
            break
    reader.close()
    seqs = [r.seq for r in records if r.seq is not None]
    assert seqs == sorted(set(seqs))
    assert reader.lost == 0
    assert all(r.facility is not None and r.kernel_us is not None for r in records)


@needs_reading
def test_what_was_there_before_the_start_is_not_read() -> None:
    once = KmsgReader()
    once.open(once=True)
    before = [r for r in once.read().records if r.seq is not None]
    once.close()
    reader = KmsgReader()
    reader.open()
    seqs = {r.seq for r in reader.read().records}
    reader.close()
    assert before
    assert not seqs & {r.seq for r in before}


def test_a_fifo_of_records_is_followed_across_partial_writes(tmp_path: Path) -> None:
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    watcher = KernelLogWatcher(str(fifo), FakeClock())
    assert watcher.open().state == "live"
    assert list(watcher.poll().signals) == []
    writer = os.open(fifo, os.O_WRONLY)
    os.write(writer, b"4,7,5000,c;NVRM: Xid (PCI:0000:65:00): 43, Ch 0000")
    assert list(watcher.poll().signals) == []
    os.write(writer, b"0004\n SUBSYSTEM=pci\n4,11,6000,c;NVRM: Xid (PCI:0000:65:00): 45, Ch 00000004\n")
    seen = watcher.poll()
    assert [(s.kind, s.xid) for s in seen.signals] == [("gap", None), ("xid", 43), ("xid", 45)]
    assert seen.state is not None
    assert (seen.state.state, seen.state.lost) == ("partial", 3)
    os.write(writer, b"4,12,7000,c;NVRM: Xid (PCI:0000:65:00): 79, ")
    assert list(watcher.poll().signals) == []
    os.close(writer)  # no newline will come
    assert [s.xid for s in watcher.poll().signals] == [79]
    watcher.close()


class OverrunStub:
    """Stands in for ``os.read``: the device's answers, among them the errors of a buffer that went round."""

    def __init__(self, *answers: bytes | int) -> None:
        self.answers = list(answers)

    def __call__(self, fd: int, size: int) -> bytes:
        assert size == BUFFER
        if not self.answers:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))
        return answer


def device_with(*answers: bytes | int) -> KmsgReader:
    reader = KmsgReader(Path("/dev/null"), OverrunStub(*answers))  # a character device that everybody may open
    reader.open()
    return reader


def test_records_lost_in_an_overrun_are_counted() -> None:
    reader = device_with(b"6,10,1,-;a\n", errno.EPIPE, b"6,25,2,-;b\n", b"6,26,3,-;c\n")
    batch = reader.read()
    assert [r.seq for r in batch.records] == [10, 25, 26]
    assert (batch.at_end, reader.lost) == (True, 14)


def test_a_record_too_large_for_the_buffer_is_counted() -> None:
    reader = device_with(b"6,10,1,-;a\n", errno.EINVAL, b"6,12,2,-;b\n")
    reader.read()
    assert reader.lost == 1


def test_an_overrun_of_unknown_size_counts_as_one() -> None:
    reader = device_with(errno.EPIPE, b"6,25,2,-;b\n")
    reader.read()
    assert reader.lost == 1


def test_a_device_that_fails_ends_the_watch_with_its_reason() -> None:
    with pytest.raises(WatcherError, match="EIO"):
        device_with(errno.EIO).read()
