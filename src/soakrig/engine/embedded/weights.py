"""Weights from a seed: the same numbers on every machine, whatever its vector units."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import HEAD_DIM, VOCABULARY, EngineConfig

LOGIT_STD = 3.0
POSITION_SHARE = 1.0
"""Size of the per-position term against the normalised hidden state: large enough that greedy text does not cycle."""
QUERY_SCALE = 2.5
"""Makes attention peaked: with plain weights each token is one part in n, and a damaged cache hardly shows."""
SKEW = (0.35, 0.55)
"""Range of the routers' skew: the logit bias of an expert falls by this times the logarithm of its rank."""


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Linear weights are [out, in]; norms of random weights are all one, so there are none."""

    query_key_value: Tensor
    """[(heads + 2 kv heads) * head dim, hidden]"""
    output: Tensor
    """[hidden, heads * head dim]"""
    router: Tensor
    """[experts, hidden], float32"""
    router_bias: Tensor
    """[experts], float32: the skew that makes some experts hot"""


@dataclass(slots=True)
class Weights:
    """Everything but the experts, which ``experts.py`` owns."""

    embedding: Tensor
    """[vocabulary, hidden]"""
    layers: list[LayerWeights]
    head: Tensor
    """[vocabulary, hidden]"""
    positions: Tensor
    """[max_model_len, hidden]: added to the last hidden state by absolute position"""


class Seeded:
    """Draws tensors from one seed, on the CPU, in call order.

    Uniform draws only: they are exact in float32 everywhere, while normal draws go through logarithms that differ in
    the last bit between instruction sets.
    """

    def __init__(self, seed: int, config: EngineConfig, stream: int = 0) -> None:
        # The generator takes 32 bits of a seed: two of them tell independent streams of one seed apart.
        self._generator = torch.Generator().manual_seed(4 * seed + stream)
        self._device = torch.device(config.device)
        self._dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32

    def tensor(self, *shape: int, std: float, dtype: torch.dtype | None = None, in_host: bool = False) -> Tensor:
        """Zero mean, standard deviation ``std``; ``in_host``: it stays where it was drawn, off the device."""
        drawn = torch.rand(shape, generator=self._generator).sub_(0.5).mul_(std * math.sqrt(12.0))
        return drawn.to(device="cpu" if in_host else self._device, dtype=dtype or self._dtype)

    def order(self, count: int) -> Tensor:
        """A permutation of ``count`` places."""
        return torch.rand(count, generator=self._generator, dtype=torch.float64).argsort()

    def number(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)


def decoder_weights(seeded: Seeded, config: EngineConfig) -> Weights:
    """The decoder's weights, drawn before the experts' (the order is part of what a seed means)."""
    hidden = config.hidden
    kv_width = config.kv_heads * HEAD_DIM
    inward = 1.0 / math.sqrt(hidden)
    layers: list[LayerWeights] = []
    for _ in range(config.layers):
        skew = seeded.number(*SKEW)
        rank = seeded.order(config.experts).to(torch.float32)
        query_key_value = seeded.tensor(hidden + 2 * kv_width, hidden, std=inward)
        query_key_value[:hidden] *= QUERY_SCALE
        layers.append(
            LayerWeights(
                query_key_value=query_key_value,
                output=seeded.tensor(hidden, hidden, std=inward),
                router=seeded.tensor(config.experts, hidden, std=0.5 * inward, dtype=torch.float32),
                router_bias=seeded.to_device(-skew * torch.log1p(rank)),
            )
        )
    head_std = LOGIT_STD / math.sqrt(hidden * (1.0 + POSITION_SHARE**2))
    return Weights(
        embedding=seeded.tensor(VOCABULARY, hidden, std=1.0),
        layers=layers,
        head=seeded.tensor(VOCABULARY, hidden, std=head_std),
        # Of its own stream: how many there are must not move the experts, which are drawn next.
        positions=Seeded(config.weights_seed, config, stream=1).tensor(
            config.max_model_len, hidden, std=POSITION_SHARE
        ),
    )
