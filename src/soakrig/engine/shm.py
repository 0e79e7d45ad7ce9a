"""Shared memory that an engine's processes leave behind when they are killed: found while they live, freed when nobody
has it any more.

POSIX objects are files under ``/dev/shm`` (shm_overview(7), sem_overview(7)). Python names its own ``psm_*`` (blocks of
multiprocessing.shared_memory, vLLM's message queues) and ``sem.mp-*`` (semaphores). Python's resource tracker removes
both where it lives to do so (``keeper.end_tree``); this is for when it was killed with the rest. Standard library only:
the keeper runs this without site-packages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

FOLDER = "/dev/shm"  # noqa: S108  (the kernel's own place, not a temporary folder of ours)
PREFIXES = ("psm_", "sem.mp-", "nccl-", "torch_", "vllm_offload_", "vllm_ec_")
"""Names that Python, NCCL, torch and vLLM's offload tiers give to objects of one launch; caches that outlive a server
have others."""
_TRIES = 10


class SharedMemory:
    """The objects of one launch. Made before the engine is started: what is there by then is somebody else's.

    An object belongs to the launch when it came after that, has one of ``PREFIXES`` and was seen in the memory map of
    one of its processes: another engine's objects, made at the same time, are never touched.
    """

    def __init__(self, folder: str = FOLDER) -> None:
        self._folder = folder
        self._ours: dict[str, int] = {}  # name -> inode: a name may be taken again by somebody else
        self._tried: dict[tuple[str, int], int] = dict.fromkeys(self._present(), _TRIES)

    @property
    def ours(self) -> dict[str, int]:
        """What was attributed so far: name -> inode."""
        return dict(self._ours)

    def adopt(self, found: dict[str, int]) -> None:
        """Take over what another one of this launch attributed. A name whose inode is another one by now stays the
        stranger's that it is."""
        self._ours.update(found)

    def leaked(self) -> dict[str, int]:
        """Ours that are still there and in nobody's hands any more: name -> bytes. One look at every process."""
        found: dict[str, int] = {}
        for name in self._unheld():
            try:
                found[name] = os.stat(f"{self._folder}/{name}").st_blocks * 512  # noqa: PTH116
            except OSError:  # gone by itself
                continue
        return found

    def news(self) -> bool:
        """Whether there may be an object to attribute: cheap enough to ask every second."""
        return any(self._tried.get(found, 0) < _TRIES for found in self._present() if not self._known(found))

    def look(self, pids: Iterable[int]) -> None:
        """Attribute new objects to the processes ``pids`` of the launch."""
        new = {found for found in self._present() if not self._known(found) and self._tried.get(found, 0) < _TRIES}
        if not new:
            return
        for pid in pids:
            self._ours.update(found for found in self._mapped(pid) if found in new)
        for found in new:
            self._tried[found] = self._tried.get(found, 0) + 1

    def left(self) -> list[str]:
        """The names that are ours and still there, whoever has them."""
        return sorted(name for name, _ in set(self._ours.items()) & set(self._present()))

    def free(self) -> list[str]:
        """Remove what is ours and in nobody's hands any more; returns the names. One look at every process."""
        freed: list[str] = []
        for name in sorted(self._unheld()):
            try:
                os.unlink(f"{self._folder}/{name}")  # noqa: PTH108
            except OSError:  # gone by itself, or not ours to remove
                continue
            freed.append(name)
        return freed

    def _unheld(self) -> set[str]:
        left = set(self._ours.items()) & set(self._present())
        if left:
            for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:  # noqa: PTH208
                left.difference_update(self._mapped(pid), self._opened(pid))
        return {name for name, _ in left}

    def _known(self, found: tuple[str, int]) -> bool:
        return self._ours.get(found[0]) == found[1]

    def _present(self) -> Iterator[tuple[str, int]]:
        try:
            entries = list(os.scandir(self._folder))
        except OSError:
            return
        for entry in entries:
            if entry.name.startswith(PREFIXES):
                yield entry.name, entry.inode()

    def _mapped(self, pid: int) -> Iterator[tuple[str, int]]:
        """Objects in the memory map of a process; proc(5): address, permissions, offset, device, inode, path."""
        needle = self._folder.encode() + b"/"
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:  # noqa: PTH123
                lines = [line for line in file.read().split(b"\n") if needle in line]
        except OSError:
            return
        for line in lines:
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].startswith(needle):
                yield fields[5][len(needle) :].decode("utf-8", "replace"), int(fields[4])

    def _opened(self, pid: int) -> Iterator[tuple[str, int]]:
        """Objects that a process holds open without having them mapped."""
        folder = f"/proc/{pid}/fd"
        try:
            numbers = os.listdir(folder)  # noqa: PTH208
        except OSError:
            return
        for number in numbers:
            try:
                target = os.readlink(f"{folder}/{number}")  # noqa: PTH115
                if target.startswith(self._folder + "/"):
                    yield target[len(self._folder) + 1 :], os.stat(f"{folder}/{number}").st_ino  # noqa: PTH116
            except OSError:
                continue
