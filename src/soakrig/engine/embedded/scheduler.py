"""Continuous batching: which tokens of which sequences go into the next step, and who has to give way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .blocks import BlockPool, chain
from .config import EngineConfig
from .sequence import Sequence


@dataclass(slots=True)
class Scheduled:
    """``count`` tokens of ``sequence``, from its first one that is not computed."""

    sequence: Sequence
    count: int


class Scheduler:
    """First come, first served; decodes before prefill chunks; the youngest gives its blocks up when they run out.

    A sequence that gave way is computed again from the start (less what the prefix cache still has).
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.pool = BlockPool(config.blocks, prefix_cache=config.prefix_cache)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def abort(self, request: str) -> bool:
        """Drop a request and free its blocks; False when it is not here (any more)."""
        for sequence in (*self.running, *self.waiting):
            if sequence.id == request:
                self.finish(sequence)
                return True
        return False

    def finish(self, sequence: Sequence) -> None:
        self._release(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step's work: at most ``max_num_batched_tokens`` tokens; blocks for them are taken."""
        budget = self._config.max_num_batched_tokens
        step: dict[str, Scheduled] = {}
        preempted = False
        # Decodes first, so that a long prefill does not stop the others; within each kind the oldest first.
        for sequence in sorted(self.running, key=lambda s: (s.in_prompt, s.serial)):
            count = min(sequence.pending, budget)
            if count <= 0 or sequence not in self.running:
                continue
            while not self._cover(sequence, sequence.computed + count):
                preempted = True
                victim = max(self.running, key=lambda s: s.serial)
                lost = step.pop(victim.id, None)
                budget += lost.count if lost else 0
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                step[sequence.id] = Scheduled(sequence, count)
                budget -= count
        while self.waiting and budget > 0 and not preempted and len(self.running) < self._config.max_num_seqs:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            count = min(sequence.pending, budget)
            step[sequence.id] = Scheduled(sequence, count)
            budget -= count
        return list(step.values())

    def computed(self, done: Scheduled) -> None:
        """The model has computed ``done``: full blocks become findable."""
        sequence = done.sequence
        sequence.computed += done.count
        full = sequence.computed // self._config.block_size
        if self._config.prefix_cache and full > sequence.published:
            if len(sequence.digests) < full:
                sequence.digests = chain(sequence.tokens, self._config.block_size, sequence.digests)
            for number in range(sequence.published, full):
                self.pool.publish(sequence.blocks[number], sequence.digests[number])
            sequence.published = full

    def _admit(self, sequence: Sequence) -> bool:
        """Match the prefix and take blocks for all known tokens; False (and nothing taken) when they are not there."""
        size = self._config.block_size
        matched: list[int] = []
        usable = 0
        if self._config.prefix_cache and sequence.prompt_logprobs is None:
            sequence.digests = chain(sequence.tokens, size, sequence.digests)
            # The last token is always computed: its logits are what the reply starts from.
            usable = (len(sequence.tokens) - 1) // size
            matched = self.pool.match(sequence.digests[:usable])
        needed = -(-len(sequence.tokens) // size) - len(matched)
        if needed > self.pool.available:
            self.pool.release(matched)
            return False
        sequence.blocks = matched
        sequence.computed = len(matched) * size
        sequence.published = len(matched)
        self._cover(sequence, len(sequence.tokens))
        if not sequence.admitted:
            sequence.admitted = True
            sequence.cached = sequence.computed
            if self._config.prefix_cache and sequence.prompt_logprobs is None:
                self.prefix_queries += sequence.prompt_tokens
                self.prefix_hits += sequence.computed
        return True

    def _cover(self, sequence: Sequence, tokens: int) -> bool:
        """Take blocks until ``tokens`` fit; False when there are none left."""
        size = self._config.block_size
        while len(sequence.blocks) * size < tokens:
            block = self.pool.take(after=sequence.blocks[-1] if sequence.blocks else None)
            if block is None:
                return False
            sequence.blocks.append(block)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.published = [], 0, 0
