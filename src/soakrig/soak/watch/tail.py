"""One log file, read on from a position while others write to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from soakrig.errors import WatcherError

_MARK = 64
"""So many bytes before the position are read again each time: where they differ, the file was rewritten."""

TRUNCATED = "the file was truncated or rewritten: lines written just before that may have gone unread"


class Tail:
    """The regular file that ``path`` names now, held open through renames; ``identity`` is its device and inode.

    Reading begins at the first byte. Raises ``OSError`` where the file is not there or may not be read, and
    ``WatcherError`` where it is no regular file; an open never blocks.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise WatcherError(f"{path} is {kind_of(status)}, no regular file", remedy="give the path of a log file")
        self.identity = (status.st_dev, status.st_ino)
        self._position = 0
        self._mark = b""

    def to_end(self) -> None:
        """Skip what is there already."""
        self._to(os.fstat(self._fd).st_size)

    def to_last_line(self, longest: int) -> None:
        """Skip what is there already, except for a last line of at most ``longest`` bytes that has no newline yet."""
        size = os.fstat(self._fd).st_size
        start = max(size - longest, 0)
        newline = os.pread(self._fd, size - start, start).rfind(b"\n")
        begins = start + newline + 1 if newline >= 0 else start
        self._to(begins if newline >= 0 or start == 0 else size)

    def read(self, most: int) -> tuple[bytes, bool]:
        """Up to ``most`` bytes, none at the end; and whether the file was rewritten, so that they are its first."""
        held = len(self._mark)
        data = os.pread(self._fd, held + most, self._position - held)
        rewritten = not data.startswith(self._mark)
        if rewritten:
            self._position, self._mark, held = 0, b"", 0
            data = os.pread(self._fd, most, 0)
        self._position += len(data) - held
        self._mark = data[-_MARK:]
        return data[held:], rewritten

    def close(self) -> None:
        os.close(self._fd)

    def _to(self, position: int) -> None:
        start = max(position - _MARK, 0)
        self._mark = os.pread(self._fd, position - start, start)
        self._position = start + len(self._mark)


def kind_of(status: os.stat_result) -> str:
    """What a path names, in words: ``a regular file``, ``a FIFO``, ``a character device (1:3)`` ..."""
    mode = status.st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        return f"a {'character' if stat.S_ISCHR(mode) else 'block'} device ({number})"
    kinds = {
        stat.S_IFREG: "a regular file",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
    }
    return kinds[stat.S_IFMT(mode)]
