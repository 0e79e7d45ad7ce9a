"""The next token from logits: temperature, top-p, top-k, one generator per request, and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """``temperature`` 0 is greedy; ``top_p`` in (0, 1]; ``top_k`` 0 means all; ``seed`` None draws a fresh one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


class Sampler:
    """One request's sampler. The generator is the request's own, so that its neighbours in a step do not move it."""

    def __init__(self, params: SamplingParams, generator: np.random.Generator) -> None:
        self._params = params
        self._generator = generator

    def pick(self, logits: Floats, allowed: Ids) -> int:
        """One of the ids ``allowed``; ``logits`` are of the whole vocabulary."""
        if len(allowed) == 1:
            return int(allowed[0])
        scores = logits[allowed].astype(np.float64)
        params = self._params
        if params.temperature <= 0.0:
            return int(allowed[int(scores.argmax())])
        scores /= params.temperature
        if 0 < params.top_k < len(scores):
            cut = np.partition(scores, -params.top_k)[-params.top_k]
            scores = np.where(scores < cut, -np.inf, scores)
        if params.top_p < 1.0:
            scores = _nucleus(scores, params.top_p)
        # Gumbel-max: the argmax of scores with Gumbel noise is a draw from their softmax.
        noise = self._generator.gumbel(size=len(scores))
        return int(allowed[int((scores + noise).argmax())])


def _nucleus(scores: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """Scores outside the smallest set of tokens with probability ``top_p`` become -inf; the best one always stays."""
    order = np.argsort(-scores, kind="stable")
    probabilities = np.exp(scores[order] - scores[order[0]])
    before = np.cumsum(probabilities) / probabilities.sum()
    keep = int(np.searchsorted(before, top_p)) + 1
    kept = np.full_like(scores, -np.inf)
    kept[order[:keep]] = scores[order[:keep]]
    return kept


def log_softmax(logits: Floats) -> Floats:
    """Over the last axis, float32 of the same shape."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def token_logprobs(logprobs: Floats, token: int, top: int) -> list[list[Any]]:
    """The token itself, then the ``top`` likeliest that are not it: [id, logprob, rank], rank 1 the likeliest."""
    own = float(logprobs[token])
    rows: list[list[Any]] = [[token, own, int((logprobs > own).sum()) + 1]]
    if top:
        best = np.argpartition(-logprobs, top - 1)[:top]
        best = best[np.argsort(-logprobs[best], kind="stable")]
        rows += [[int(i), float(logprobs[i]), rank] for rank, i in enumerate(best, 1) if int(i) != token]
    return rows
