"""The one place where expert weights are read and applied.

The model hands over a layer's hidden states with the router's choice and takes back the weighted sum; it neither
holds nor sees an expert's weights. What keeps the weights elsewhere (host memory, slots) takes this place.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .config import EngineConfig
from .weights import Seeded

GATHER_PAIRS = 32
"""Up to so many (token, expert) pairs the experts' rows are gathered and multiplied at once; above, one by one."""


class Experts(Protocol):
    """All routed experts of all layers."""

    def apply(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum over each token's experts of weight times SwiGLU expert.

        ``hidden`` [tokens, hidden], ``ids`` [tokens, k] int64 in 0..experts-1, distinct within a token, ``weights``
        [tokens, k]; returns [tokens, hidden] in the type of ``hidden``.
        """
        ...


class ResidentExperts:
    """Every expert in the model's own memory."""

    def __init__(self, seeded: Seeded, config: EngineConfig) -> None:
        inner, hidden = config.expert_hidden, config.hidden
        self.count = config.experts
        self.inner = inner
        # gate and up projections stacked: [experts, 2 * inner, hidden]; down: [experts, hidden, inner]
        self.gate_up = [
            seeded.tensor(config.experts, 2 * inner, hidden, std=1.0 / math.sqrt(hidden)) for _ in range(config.layers)
        ]
        self.down = [
            seeded.tensor(config.experts, hidden, inner, std=2.0 / math.sqrt(inner)) for _ in range(config.layers)
        ]

    def apply(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if ids.numel() <= GATHER_PAIRS:
            return self._gathered(layer, hidden, ids, weights)
        return self._by_expert(layer, hidden, ids, weights)

    def _gathered(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tokens, k = ids.shape
        flat = ids.reshape(-1)
        states = hidden.unsqueeze(1).expand(tokens, k, -1).reshape(tokens * k, -1, 1)
        inner = self._swiglu(torch.bmm(self.gate_up[layer].index_select(0, flat), states).squeeze(-1))
        out = torch.bmm(self.down[layer].index_select(0, flat), inner.unsqueeze(-1)).view(tokens, k, -1)
        return (out * weights.to(out.dtype).unsqueeze(-1)).sum(dim=1)

    def _by_expert(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        k = ids.shape[1]
        flat, order = ids.reshape(-1).sort(stable=True)
        rows = order // k
        states = hidden.index_select(0, rows)
        parts: list[Tensor] = []
        start = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=self.count).tolist()):
            if count:
                part = functional.linear(states[start : start + count], self.gate_up[layer][expert])
                parts.append(functional.linear(self._swiglu(part), self.down[layer][expert]))
                start += count
        out = torch.cat(parts) * weights.reshape(-1).index_select(0, order).to(hidden.dtype).unsqueeze(-1)
        # Back in (token, expert) order, so that the sum over a token's experts has a fixed order on every device.
        back = torch.empty_like(out).index_copy_(0, order, out)
        return back.view(hidden.shape[0], k, -1).sum(dim=1)

    def _swiglu(self, both: Tensor) -> Tensor:
        return functional.silu(both[..., : self.inner]) * both[..., self.inner :]
