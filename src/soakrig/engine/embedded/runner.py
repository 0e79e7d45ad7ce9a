"""One step of the engine: schedule, compute, decide the next tokens, and say what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .config import EngineConfig
from .grammar import SchemaError
from .kv_cache import BlockTable, KVCache
from .model import Decoder, SequenceSpan, StepBatch
from .sampling import Floats, log_softmax, token_logprobs
from .scheduler import Scheduled, Scheduler
from .sequence import Sequence

THREADED_TOKENS = 64
"""Steps of at least so many tokens are computed with all threads."""


@dataclass(slots=True)
class StepStats:
    """Counts of one step. ``prompt`` includes tokens that the prefix cache gave, ``computed`` does not."""

    prompt: int = 0
    generated: int = 0
    computed: int = 0


@dataclass(slots=True)
class StepResult:
    """What one step of the model brought."""

    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    stats: StepStats = field(default_factory=StepStats)


class Runner:
    """The scheduler, the model and its cache, stepped by the worker's loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model = Decoder(config)
        self._cache = KVCache(config)
        self.scheduler = Scheduler(config)
        self._threads = 0

    def step(self) -> StepResult:
        """Compute one batch. Events are ``{"id", "c"...}`` for text, ``{"id", "finish"...}`` for an end."""
        result = StepResult()
        step = self.scheduler.schedule()
        if not step:
            return result
        rows, batch = self._batch(step)
        self._set_threads(len(batch.ids))
        logits: Floats = self._model.forward(batch, self._cache).cpu().numpy()
        for one, (start, stop) in zip(step, rows, strict=True):
            self._settle(one, logits[start:stop], result)
        return result

    def _set_threads(self, tokens: int) -> None:
        """Small steps gain nothing from a second thread and wait long for it on a busy machine."""
        threads = self._config.compute_threads if tokens >= THREADED_TOKENS else 1
        if threads != self._threads:
            torch.set_num_threads(threads)
            self._threads = threads

    def _batch(self, step: list[Scheduled]) -> tuple[list[tuple[int, int]], StepBatch]:
        """The flat batch, and which rows of the logits belong to which sequence."""
        size = self._config.block_size
        device = self._model.device
        ids: list[int] = []
        positions: list[np.ndarray[Any, Any]] = []
        slots: list[np.ndarray[Any, Any]] = []
        spans: list[SequenceSpan] = []
        wanted: list[int] = []
        rows: list[tuple[int, int]] = []
        for one in step:
            sequence, start = one.sequence, len(ids)
            first, last = sequence.computed, sequence.computed + one.count
            ids += sequence.tokens[first:last]
            place = np.arange(first, last)
            held = sequence.blocks[: -(-last // size)]
            positions.append(place)
            slots.append(np.asarray(held, dtype=np.int64)[place // size] * size + place % size)
            spans.append(SequenceSpan(start, len(ids), first, BlockTable(held, device)))
            before = len(wanted)
            if sequence.prompt_logprobs is not None and sequence.in_prompt:
                wanted += range(start, len(ids))
            elif last == len(sequence.tokens):
                wanted.append(len(ids) - 1)
            rows.append((before, len(wanted)))
        return rows, StepBatch(
            ids=torch.tensor(ids, device=device),
            positions=torch.from_numpy(np.concatenate(positions)).to(device),
            slots=torch.from_numpy(np.concatenate(slots)).to(device),
            spans=spans,
            logit_rows=torch.tensor(wanted, dtype=torch.int64, device=device),
        )

    def _settle(self, one: Scheduled, logits: Floats, result: StepResult) -> None:
        sequence, stats = one.sequence, result.stats
        first = sequence.computed
        self.scheduler.computed(one)
        done = min(sequence.computed, sequence.prompt_tokens)
        stats.prompt += max(0, done - sequence.counted)
        sequence.counted = max(sequence.counted, done)
        stats.computed += one.count
        if sequence.prompt_logprobs is not None and first < sequence.prompt_tokens:
            self._collect_prompt_rows(sequence, first, logits, result)
        if sequence.pending:
            return
        try:
            new = sequence.writer.advance(logits[-1])
        except SchemaError as error:
            self.scheduler.finish(sequence)
            result.events.append({"id": sequence.id, "error": f"the tool's schema cannot be written: {error}"})
            return
        stats.generated += len(new)
        sequence.tokens += new
        result.events += [{"id": sequence.id, **event} for event in sequence.writer.drain()]
        if sequence.writer.finish_reason is not None:
            self.scheduler.finish(sequence)
            result.events.append(
                {
                    "id": sequence.id,
                    "finish": sequence.writer.finish_reason,
                    "prompt_tokens": sequence.prompt_tokens,
                    "cached_tokens": sequence.cached,
                    "completion_tokens": sequence.writer.tokens,
                }
            )

    def _collect_prompt_rows(self, sequence: Sequence, first: int, logits: Floats, result: StepResult) -> None:
        """The row of token i tells the log-probability of token i + 1; the first token has none."""
        top = sequence.prompt_logprobs or 0
        table = log_softmax(logits)
        for offset in range(len(table)):
            target = first + offset + 1
            # Rows come again after a preemption; only the ones not seen yet are kept.
            if target == len(sequence.prompt_rows) and target < sequence.prompt_tokens:
                sequence.prompt_rows.append(token_logprobs(table[offset], sequence.tokens[target], top))
        if sequence.computed >= sequence.prompt_tokens and sequence.prompt_rows:
            result.events.append({"id": sequence.id, "prompt_logprobs": sequence.prompt_rows})
            sequence.prompt_rows = []
