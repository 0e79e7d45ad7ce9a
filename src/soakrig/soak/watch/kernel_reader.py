"""What a reader of the kernel log is: a source of records that says what it cannot see."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from soakrig.soak.watch.kernel_record import KernelRecord

BATCH = 2_000
"""Most records of one ``read``, so that a flood cannot hold a poll for ever."""


class Batch(NamedTuple):
    """Records of one ``read``, oldest first, and whether there was nothing more to read just then."""

    records: list[KernelRecord]
    at_end: bool


class KernelReader(Protocol):
    """One way to the kernel log.

    ``open`` starts at the newest record, or at the oldest with ``once`` (the log as it is now, read to its end); it
    raises ``WatcherError`` where the source cannot be read. ``read`` returns what has come since, at once; only a file
    that is gone, with nothing to return, is waited for, about a second. It raises ``WatcherError`` when the source
    cannot be read any more. ``lost`` counts records known to be missing, ``doubt`` says (empty: not at all) why some
    may be missing without a trace. ``proves_origin``: records carry the facility that tells the kernel's own word from
    what a program wrote. ``waiting`` says what a source that is not there yet is waited for.
    """

    name: str
    lost: int
    doubt: str
    waiting: str
    proves_origin: bool
    live_times: bool

    def open(self, *, once: bool = False) -> None: ...

    def read(self) -> Batch: ...

    def close(self) -> None: ...
