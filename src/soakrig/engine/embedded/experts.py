"""The one place where expert weights are read and applied.

The model hands over a layer's hidden states with the router's choice and takes back the weighted sum; it neither
holds nor sees an expert's weights. Where they are is the store's business: it gives them out in parts, and what is
computed is the same to the bit whatever the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from soakrig.engine.offload.core import Part

from .config import EngineConfig
from .weights import Seeded

GATHER_PAIRS = 32
"""Up to so many (token, expert) pairs the experts' rows are gathered and multiplied at once; above, one by one."""


class Experts(Protocol):
    """All routed experts of all layers."""

    def apply(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum over each token's experts of weight times SwiGLU expert.

        ``hidden`` [tokens, hidden], ``ids`` [tokens, k] int64 in 0..experts-1, distinct within a token, ``weights``
        [tokens, k]; returns [tokens, hidden] in the type of ``hidden``. Any other id adds nothing.
        """
        ...


ExpertsFrom = Callable[[Seeded], Experts]
"""Makes the experts from the generator that has drawn everything else of the model."""


class PartSource(Protocol):
    """What gives a layer's experts out (the offload core's ``ExpertStore``)."""

    def parts(self, layer: int, ids: Tensor) -> Iterator[Part]: ...


class StoredExperts:
    """Experts whose weights are wherever ``source`` has them, as parameters ``gate_up`` and ``down``."""

    def __init__(self, source: PartSource) -> None:
        self._source = source

    def apply(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        compute = gathered if ids.numel() <= GATHER_PAIRS else by_expert
        return compute(self._source.parts(layer, ids), hidden, weights)


class ResidentExperts(StoredExperts):
    """Every expert in the model's own memory; ids are taken as they are."""

    def __init__(self, seeded: Seeded, config: EngineConfig) -> None:
        super().__init__(self)
        self.inner = config.expert_hidden
        layers = list(draw_layers(seeded, config))
        self.gate_up = [layer["gate_up"] for layer in layers]
        self.down = [layer["down"] for layer in layers]

    def parts(self, layer: int, ids: Tensor) -> Iterator[Part]:
        yield Part(ids, {"gate_up": self.gate_up[layer], "down": self.down[layer]})


def draw_layers(seeded: Seeded, config: EngineConfig, in_host: Collection[int] = ()) -> Iterator[dict[str, Tensor]]:
    """Each layer's parameters in turn, drawn in the order that a seed means; those of ``in_host`` stay on the host.

    ``gate_up`` (gate and up projections stacked) [experts, 2 * inner, hidden], ``down`` [experts, hidden, inner].
    """
    inner, hidden = config.expert_hidden, config.hidden

    def draw(layer: int, rows: int, columns: int, std: float) -> Tensor:
        return seeded.tensor(config.experts, rows, columns, std=std, in_host=layer in in_host)

    gate_up = [draw(layer, 2 * inner, hidden, 1.0 / math.sqrt(hidden)) for layer in range(config.layers)]
    for layer in range(config.layers):
        yield {"gate_up": gate_up.pop(0), "down": draw(layer, hidden, inner, 2.0 / math.sqrt(inner))}


def gathered(parts: Iterable[Part], hidden: Tensor, weights: Tensor) -> Tensor:
    """All pairs at once: each pair's weights are brought together from the parts, then multiplied in one go.

    ``hidden`` [tokens, hidden], ``weights`` [tokens, k]; as ``Experts.apply``.
    """
    tokens, k = weights.shape
    gate_up: Tensor | None = None
    down = covered = hidden
    for part in parts:
        rows = part.rows.reshape(-1)
        if gate_up is None:
            # Pairs of other parts get some row here, and their own below: with one part this is the whole gather.
            some = rows.clamp(min=0)
            gate_up = part.tensors["gate_up"].index_select(0, some)
            down = part.tensors["down"].index_select(0, some)
            covered = rows >= 0
            continue
        places = (rows >= 0).nonzero().squeeze(-1)
        here = rows.index_select(0, places)
        gate_up.index_copy_(0, places, part.tensors["gate_up"].index_select(0, here))
        down.index_copy_(0, places, part.tensors["down"].index_select(0, here))
        covered = covered | (rows >= 0)
    if gate_up is None:
        return torch.zeros_like(hidden)
    states = hidden.unsqueeze(1).expand(tokens, k, -1).reshape(tokens * k, -1, 1)
    out = torch.bmm(down, _swiglu(torch.bmm(gate_up, states).squeeze(-1)).unsqueeze(-1)).squeeze(-1)
    # Not multiplied by 0: the row that an uncovered pair met may hold anything.
    return _reduce(torch.where(covered.unsqueeze(-1), out, 0.0), weights)


def by_expert(parts: Iterable[Part], hidden: Tensor, weights: Tensor) -> Tensor:
    """Expert after expert, each over its own tokens; as ``gathered``, for many pairs."""
    tokens, k = weights.shape
    out = hidden.new_zeros((tokens * k, hidden.shape[1]))
    for part in parts:
        flat, order = part.rows.reshape(-1).sort(stable=True)
        rows, counts = (one.tolist() for one in torch.unique_consecutive(flat, return_counts=True))
        start = counts[0] if rows[0] < 0 else 0
        places = order[start:]
        states = hidden.index_select(0, places // k)
        done: list[Tensor] = []
        start = 0
        for row, count in zip(rows, counts, strict=True):
            if row >= 0:
                inner = _swiglu(functional.linear(states[start : start + count], part.tensors["gate_up"][row]))
                done.append(functional.linear(inner, part.tensors["down"][row]))
                start += count
        if done:
            out.index_copy_(0, places, torch.cat(done))
    return _reduce(out, weights)


def _reduce(out: Tensor, weights: Tensor) -> Tensor:
    """One sum over each token's experts, in the order of its choice, whatever the parts: rounded once.

    ``out`` [tokens * k, hidden] in (token, choice) order.
    """
    tokens, k = weights.shape
    return (out.view(tokens, k, -1) * weights.to(out.dtype).unsqueeze(-1)).sum(dim=1)


def _swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up
