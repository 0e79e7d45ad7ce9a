"""/dev/kmsg: the kernel's own record device, the best source (Documentation/ABI/testing/dev-kmsg).

One ``read`` returns one record. Every record has a sequence number, so that lost ones can be counted, and a facility
that a program cannot set to 0, so that the kernel's word can be told from what was written to the device.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from soakrig.errors import WatcherError
from soakrig.soak.watch.kernel_reader import BATCH, Batch
from soakrig.soak.watch.kernel_record import KernelRecord, parse_kmsg, parse_text

BUFFER = 16_384
"""A record that does not fit the buffer is skipped by the kernel; records are at most some 8 KiB."""

REMEDY = (
    "Reading needs root or CAP_SYSLOG while sysctl kernel.dmesg_restrict is 1 (sysctl kernel.dmesg_restrict=0 lifts "
    "it); in a container also the device: docker run --cap-add SYSLOG --device /dev/kmsg:/dev/kmsg:r --pid host"
)

Read = Callable[[int, int], bytes]


class KmsgReader:
    """Reads the device, or a FIFO or file that holds records in its format.

    ``read_bytes`` is ``os.read``; it is a parameter because an overrun of the kernel's buffer cannot be had at will.
    """

    name = "kmsg"
    proves_origin = True
    live_times = True

    def __init__(self, path: Path = Path("/dev/kmsg"), read_bytes: Read = os.read) -> None:
        self.path = path
        self.lost = 0
        self.doubt = ""
        self.waiting = ""
        self._read_bytes = read_bytes
        self._fd = -1
        self._is_device = True
        self._last_seq: int | None = None
        self._overrun = False
        self._rest = b""

    def open(self, *, once: bool = False) -> None:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._is_device = stat.S_ISCHR(os.fstat(self._fd).st_mode)
            if self._is_device:
                if once:
                    os.lseek(self._fd, 0, os.SEEK_SET)
                else:
                    os.lseek(self._fd, 0, os.SEEK_END)
                    self._last_seq = self._newest()
        except OSError as error:
            self.close()
            raise WatcherError(f"{self.path}: {_why(error)}", remedy=REMEDY) from error

    def read(self) -> Batch:
        if self._fd < 0:
            raise WatcherError(f"{self.path} is not open", remedy="call open() first")
        return self._read_device() if self._is_device else self._read_stream()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _newest(self) -> int | None:
        """Sequence number of the newest record: without it the first loss could not be counted."""
        fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        newest: int | None = None
        try:
            for _ in range(1_000_000):
                try:
                    head = os.read(fd, BUFFER)
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno not in (errno.EPIPE, errno.EINVAL, errno.EINTR):
                        raise
                    continue
                if not head:
                    break
                seq = head.split(b",", 2)[1:2]
                newest = int(seq[0]) if seq and seq[0].isdigit() else newest
        finally:
            os.close(fd)
        return newest

    def _read_device(self) -> Batch:
        records: list[KernelRecord] = []
        for _ in range(BATCH):
            try:
                data = self._read_bytes(self._fd, BUFFER)
            except BlockingIOError:
                return Batch(records, at_end=True)
            except OSError as error:
                if error.errno == errno.EPIPE:  # the buffer went round; reading goes on at the oldest record left
                    self._overrun = True
                elif error.errno == errno.EINVAL:  # too large for the buffer: skipped, the sequence number tells
                    pass
                elif error.errno != errno.EINTR:
                    raise WatcherError(f"{self.path}: {_why(error)}", remedy=REMEDY) from error
                continue
            if not data:
                return Batch(records, at_end=True)
            records.append(self._record(data))
        return Batch(records, at_end=False)

    def _read_stream(self) -> Batch:
        records: list[KernelRecord] = []
        while len(records) < BATCH:
            try:
                data = self._read_bytes(self._fd, 65_536)
            except BlockingIOError:
                return Batch(records, at_end=True)
            if not data:  # no writer has a FIFO open any more: what is left is its last record
                records += [self._record(self._rest)] if self._rest else []
                self._rest = b""
                return Batch(records, at_end=True)
            *lines, self._rest = (self._rest + data).split(b"\n")
            records += [self._record(line) for line in lines if line and not line.startswith(b" ")]
        return Batch(records, at_end=False)

    def _record(self, data: bytes) -> KernelRecord:
        raw = data.decode("utf-8", "replace").rstrip("\n")
        record = parse_kmsg(raw)
        if record is None:
            # A record of no known form is still shown to the parser: it may be a newer kernel's.
            return parse_text(raw)
        if record.seq is not None:
            if self._last_seq is not None and record.seq > self._last_seq + 1:
                self.lost += record.seq - self._last_seq - 1
            elif self._overrun:
                self.lost += 1
            self._last_seq = record.seq
            self._overrun = False
        return record


def _why(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "?")
    return f"{error.strerror or error} ({name})"
