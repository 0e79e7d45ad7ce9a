"""dmesg: the last resort. util-linux swallows overruns without a word, so its gaps cannot be known."""

from __future__ import annotations

from soakrig.errors import WatcherError
from soakrig.soak.watch.followed_command import FollowedCommand, run_once
from soakrig.soak.watch.kernel_reader import BATCH, Batch
from soakrig.soak.watch.kernel_record import KernelRecord, parse_text
from soakrig.soak.watch.kmsg import REMEDY

GAPS = "dmesg does not tell when records are lost"


class DmesgReader:
    """Follows ``dmesg --follow-new -x`` (facility and level in words), or ``dmesg -w -x`` of older util-linux."""

    name = "dmesg"
    proves_origin = True
    live_times = False

    def __init__(self, command: str = "dmesg") -> None:
        self.command = command
        self.lost = 0
        self.doubt = GAPS
        self.waiting = ""
        self._child: FollowedCommand | None = None
        self._once = False
        self._skip_to_us = -1

    def open(self, *, once: bool = False) -> None:
        status, said, errors = run_once([self.command, "-x"])
        if status != 0:
            raise WatcherError(f"{self.command}: {errors or f'status {status}'}", remedy=REMEDY)
        self._once = once
        if once:
            self._child = FollowedCommand([self.command, "-x"])
            return
        _, usage, _ = run_once([self.command, "--help"])
        if "--follow-new" in usage:
            self._child = FollowedCommand([self.command, "--follow-new", "-x"])
            return
        # The older -w prints the whole buffer first: what was there before is skipped by its time.
        times = [parse_text(line).kernel_us for line in said.splitlines()]
        self._skip_to_us = max((t for t in times if t is not None), default=-1)
        self._child = FollowedCommand([self.command, "-w", "-x"])

    def read(self) -> Batch:
        if self._child is None:
            raise WatcherError(f"{self.command} is not open", remedy="call open() first")
        ended = self._child.ended()
        lines, at_end = self._child.lines(BATCH)
        records = [parse_text(line.decode("utf-8", "replace")) for line in lines]
        if self._skip_to_us >= 0:
            records = self._newer(records)
        if ended is None:
            return Batch(records, at_end=at_end and not self._once)
        if self._once and self._child.status == 0:
            return Batch(records, at_end=at_end and not lines)
        if records:
            return Batch(records, at_end=False)
        raise WatcherError(ended, remedy=REMEDY)

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _newer(self, records: list[KernelRecord]) -> list[KernelRecord]:
        for n, record in enumerate(records):
            if record.kernel_us is not None and record.kernel_us > self._skip_to_us:
                self._skip_to_us = -1
                return records[n:]
        return []
