"""One step of the engine: schedule, compute, decide the next tokens, and say what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from soakrig.engine.offload.core import ExpertStore
from soakrig.engine.offload.plan import OffloadPlan

from .config import EngineConfig
from .experts import StoredExperts, draw_layers
from .grammar import SchemaError
from .kv_cache import BlockTable, KVCache
from .model import Decoder, SequenceSpan, StepBatch
from .sampling import Floats, log_softmax, token_logprobs
from .scheduler import Scheduled, Scheduler
from .sequence import Sequence
from .weights import Seeded

THREADED_TOKENS = 64
"""Steps of at least so many tokens are computed with all threads."""
BAD_EXPERT_ID = "bad_expert_id"
"""The code of a request that was routed to an expert which does not exist."""
DECODE, PREFILL = 0, 1
"""Marks of a step's rows, as the offload core takes them."""


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
    """The scheduler, the model, its experts and its cache, stepped by the worker's loop.

    ``plan`` says which experts leave the device. Raises EngineStartError where they cannot be placed.
    """

    def __init__(self, config: EngineConfig, plan: OffloadPlan) -> None:
        self._config = config
        # Everything goes through the store, also where nothing leaves the device: it checks every id.
        self.store = ExpertStore(plan, torch.device(config.device), config.max_num_batched_tokens)
        self._model = Decoder(config, self._fill)
        self._cache = KVCache(config)
        self._bad_seen = False
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
        self.store.begin_step(_marks(step))
        logits: Floats = self._model.forward(batch, self._cache).cpu().numpy()
        bad = self.store.end_step().bad_tokens
        self._bad_seen = self._bad_seen or bool(bad)
        for one, span, (start, stop) in zip(step, batch.spans, rows, strict=True):
            hit = sum(span.start <= row < span.end for row in bad)
            if hit:
                self._fail(one, hit, result)
            else:
                self._settle(one, logits[start:stop], result)
        return result

    def offload_report(self) -> dict[str, Any] | None:
        """The store's counters after the last step, ``{"step", "counters"}``; None while there is nothing to tell:
        nothing is offloaded and no bad id was seen."""
        if not self.store.plan.layers and not self._bad_seen:
            return None
        return {"step": self.store.steps, "counters": self.store.counters()}

    def _fill(self, seeded: Seeded) -> StoredExperts:
        store, config = self.store, self._config
        # Straight from where they are drawn into the bank: a device may not have room for them, even for a moment.
        leaving = {layer.layer for layer in store.plan.layers}
        for layer, parameters in enumerate(draw_layers(seeded, config, leaving)):
            store.add_layer(layer, parameters)
        store.finish()
        return StoredExperts(store)

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
        planted: list[int] = []
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
            if sequence.planted:
                planted.append(start)
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
            planted=planted,
        )

    def _fail(self, one: Scheduled, rows: int, result: StepResult) -> None:
        """End a request whose routing was broken. Its numbers of this step are wrong, so that nothing of it is settled
        or published to the prefix cache; its blocks are freed."""
        result.stats.computed += one.count
        self.scheduler.finish(one.sequence)
        result.events.append(
            {
                "id": one.sequence.id,
                "error": f"{rows} of this request's {one.count} tokens in a step went to an expert id out of range "
                f"(0 to {self._config.experts - 1} was expected); nothing was read for it, and the reply is void",
                "code": BAD_EXPERT_ID,
            }
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


def _marks(step: list[Scheduled]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One mark a row: a row is decode once its sequence is past its prompt."""
    return np.concatenate(
        [np.full(one.count, PREFILL if one.sequence.in_prompt else DECODE, dtype=np.uint8) for one in step]
    )
