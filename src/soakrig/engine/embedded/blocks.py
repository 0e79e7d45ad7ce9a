"""Which blocks of the KV cache belong to whom, and which of them hold a prefix that can be used again."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Digest = bytes


def chain(tokens: Sequence[int], block_size: int, start: Sequence[Digest] = ()) -> list[Digest]:
    """One digest for each full block of ``tokens``, each over its own tokens and the digest before it.

    Equal digests mean an equal prefix. ``start`` holds the digests already known for the first blocks.
    """
    digests = list(start)
    for number in range(len(digests), len(tokens) // block_size):
        before = digests[-1] if digests else b""
        content = array("I", tokens[number * block_size : (number + 1) * block_size]).tobytes()
        digests.append(hashlib.blake2b(before + content, digest_size=16).digest())
    return digests


class BlockPool:
    """Reference-counted blocks, a prefix index over full ones, and eviction of the least recently used free ones.

    A block is in use (referenced), cached (nobody's, but its content is known and can be had again), or free.
    """

    def __init__(self, count: int, *, prefix_cache: bool = True) -> None:
        self.count = count
        self._references = [0] * count
        self._digest: list[Digest | None] = [None] * count
        self._index: dict[Digest, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        # An ordered set: a block beside the sequence's last one is preferred, else the one that was freed first.
        self._free: dict[int, None] = dict.fromkeys(range(count))
        self._prefix_cache = prefix_cache

    @property
    def available(self) -> int:
        """Blocks that ``take`` can give: free ones and cached ones that nobody holds."""
        return len(self._free) + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        return 1.0 - self.available / self.count

    def match(self, digests: Sequence[Digest]) -> list[int]:
        """The blocks of the longest known prefix, each referenced once more."""
        found: list[int] = []
        for digest in digests:
            block = self._index.get(digest)
            if block is None:
                break
            found.append(block)
        for block in found:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        return found

    def take(self, after: int | None = None) -> int | None:
        """One block for new content, the one behind ``after`` where that is free; None when every block is in use."""
        if self._free:
            block = -1 if after is None else after + 1
            if block not in self._free:
                block = next(iter(self._free))
            del self._free[block]
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._references[block] = 1
        return block

    def publish(self, block: int, digest: Digest) -> None:
        """Make a full, computed block findable; a second block of the same content stays private."""
        if self._prefix_cache and self._digest[block] is None and digest not in self._index:
            self._digest[block] = digest
            self._index[digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of a sequence's blocks.

        The tail of a prefix is evicted before its head, since a head without tail can still be used.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._digest[block] is None:
                    self._free[block] = None
                else:
                    self._cached[block] = None

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            del self._index[digest]
            self._digest[block] = None
