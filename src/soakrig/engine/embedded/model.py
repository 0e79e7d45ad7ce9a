"""The decoder: grouped-query attention with RoPE over a paged cache, RMSNorm, and a top-k mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from .config import HEAD_DIM, QUERIES_PER_KV_HEAD, EngineConfig
from .experts import Experts, ExpertsFrom, ResidentExperts
from .kv_cache import BlockTable, KVCache
from .weights import LayerWeights, Seeded, decoder_weights

ROPE_BASE = 10_000.0
QUERY_ROWS = 256
"""Queries of a prefill chunk that are attended at once: bounds the mask that goes with them."""

PLANTED_BEYOND = 1000
"""How far past the last expert a planted id points: no sentinel, and no row of any buffer."""


@dataclass(slots=True)
class SequenceSpan:
    """The rows of a step that belong to one sequence: ``start``..``end`` of the flat batch, after ``cached`` tokens."""

    start: int
    end: int
    cached: int
    table: BlockTable


@dataclass(slots=True)
class StepBatch:
    """One step over several sequences, their new tokens laid end to end.

    ``ids``, ``positions``, ``slots``: [tokens] int64. ``logit_rows``: [rows] int64, the tokens whose next-token logits
    are wanted. ``planted``: tokens whose first expert in the first layer is replaced by one that does not exist.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: list[SequenceSpan]
    logit_rows: Tensor
    planted: list[int] = field(default_factory=list[int])


class Decoder:
    """The model with its weights; ``forward`` also fills the cache.

    ``experts`` makes the routed experts, which are drawn last; without it they are all resident.
    """

    def __init__(self, config: EngineConfig, experts: ExpertsFrom | None = None) -> None:
        self.config = config
        self.device = torch.device(config.device)
        seeded = Seeded(config.weights_seed, config)
        self.weights = decoder_weights(seeded, config)
        self.experts: Experts = experts(seeded) if experts else ResidentExperts(seeded, config)
        self._kv_heads = config.kv_heads
        frequencies = ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
        angles = torch.arange(config.max_model_len, dtype=torch.float32)[:, None] * frequencies
        self._cos = angles.cos().to(self.device)
        self._sin = angles.sin().to(self.device)
        self._mask = self._causal_template()

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """Next-token logits [rows, vocabulary], float32, of ``batch.logit_rows``."""
        states = self.weights.embedding.index_select(0, batch.ids)
        cos = self._cos.index_select(0, batch.positions).unsqueeze(1)
        sin = self._sin.index_select(0, batch.positions).unsqueeze(1)
        for number, layer in enumerate(self.weights.layers):
            attended = self._attention(number, layer, _rms_norm(states), (cos, sin), batch, cache)
            states = states + attended
            normed = _rms_norm(states)
            ids, weights = self.route(layer, normed)
            if number == 0 and batch.planted:
                ids[batch.planted, 0] = self.config.experts + PLANTED_BEYOND
            states = states + self.experts.apply(number, normed, ids, weights)
        rows = batch.logit_rows
        last = _rms_norm(states.index_select(0, rows))
        last = last + self.weights.positions.index_select(0, batch.positions.index_select(0, rows))
        return functional.linear(last, self.weights.head).float()

    def route(self, layer: LayerWeights, states: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and normalised weights of each token's experts: [tokens, k] int64 and float32."""
        scores = functional.linear(states.float(), layer.router) + layer.router_bias
        top, ids = scores.topk(self.config.top_k, dim=-1)
        return ids, top.softmax(dim=-1)

    def _attention(
        self,
        number: int,
        layer: LayerWeights,
        states: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: StepBatch,
        cache: KVCache,
    ) -> Tensor:
        tokens = states.shape[0]
        kv_heads, heads = self._kv_heads, self._kv_heads * QUERIES_PER_KV_HEAD
        both = functional.linear(states, layer.query_key_value).view(tokens, heads + 2 * kv_heads, HEAD_DIM)
        rotated = _rotate(both[:, : heads + kv_heads], *rotation)
        cache.write(number, batch.slots, rotated[:, heads:], both[:, heads + kv_heads :])
        query = rotated[:, :heads].view(tokens, kv_heads, QUERIES_PER_KV_HEAD, HEAD_DIM)
        parts = [
            self._attend(
                query[span.start : span.end], *cache.read(number, span.table, span.cached + span.end - span.start)
            )
            for span in batch.spans
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return functional.linear(out.reshape(tokens, heads * HEAD_DIM), layer.output)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One sequence: ``query`` [new, kv heads, group, head dim], ``keys`` and ``values`` [kv heads, all, head dim].

        The new tokens are the last ones; each sees itself and what is before it.
        """
        new, length = query.shape[0], keys.shape[1]
        if new == 1:
            out = functional.scaled_dot_product_attention(query, keys.unsqueeze(0), values.unsqueeze(0))
            return out.view(1, self._kv_heads, QUERIES_PER_KV_HEAD, HEAD_DIM)
        heads_first = query.permute(1, 2, 0, 3)
        wide_keys = keys.unsqueeze(1).expand(-1, QUERIES_PER_KV_HEAD, -1, -1)
        wide_values = values.unsqueeze(1).expand(-1, QUERIES_PER_KV_HEAD, -1, -1)
        parts: list[Tensor] = []
        for start in range(0, new, QUERY_ROWS):
            stop = min(start + QUERY_ROWS, new)
            seen = length - new + stop
            # The template's last QUERY_ROWS columns are the causal triangle, all before it is open: a view, no copy.
            width = self._mask.shape[1]
            mask = self._mask[
                : stop - start, width - QUERY_ROWS - (seen - (stop - start)) : width - QUERY_ROWS + stop - start
            ]
            if mask.is_cuda:
                mask = mask.contiguous()  # CUDA's kernels want aligned rows
            parts.append(
                functional.scaled_dot_product_attention(
                    heads_first[:, :, start:stop], wide_keys[:, :, :seen], wide_values[:, :, :seen], attn_mask=mask
                )
            )
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return out.permute(2, 0, 1, 3)

    def _causal_template(self) -> Tensor:
        dtype = self.weights.embedding.dtype
        triangle = torch.full((QUERY_ROWS, QUERY_ROWS), float("-inf"), dtype=dtype).triu(1)
        open_part = torch.zeros((QUERY_ROWS, self.config.max_model_len), dtype=dtype)
        return torch.cat([open_part, triangle], dim=1).to(self.device)


def _rms_norm(states: Tensor) -> Tensor:
    return functional.rms_norm(states, (states.shape[-1],), eps=1e-6)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over the two halves of each head: ``heads`` [tokens, heads, head dim], ``cos``/``sin`` [tokens, 1, half]."""
    half = HEAD_DIM // 2
    first, second = heads[..., :half].float(), heads[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
