"""What the tests of the planner share: small traces with skew and locality, raw or as an engine writes them."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from soakrig.engine.offload.trace import DECODE, PREFILL, TraceHeader, TraceWriter

BUDGET = """
schema = "soakrig.budget/1"
device = "one card"

[capacity]
amount = "268.2 GB"
kind = "measured"
source = "engine log"

[free]
amount = "17.7 GB"
kind = "measured"
source = "after a probe"

[slots]
count = 5792
layers = 75
weights = "18874368 B"
scales = "2359296 B"

[[pool]]
name = "KV cache"
amount = "48 GiB"
kind = "derived"
role = "kv"
dtype = "bf16"

[[pool]]
name = "other"
amount = "39.2 GB"
kind = "uncontrolled"
source = "an older profile"

[step]
fixed = "22.5 ms/step"
per_row = "0.0554 ms/row"
link = "383 GB/s"
misses = 4.24
accesses = 16
tokens_per_second = 45.75

[curve]
points = [[77.2, 4.74], [80, 4.61], [112, 3.11], [128, 2.51]]
slope = 4.2
"""
"""The published figures of one operator's card, as a budget file."""


def traffic(rows: int, layers: int, top_k: int, experts: int, seed: int = 0, stay: float = 0.5) -> NDArray[np.int16]:
    """[rows, layers, top_k] different ids a token: a Zipf law in an order of each layer's own, and a share of a token's
    experts kept from the token before."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(experts) for _ in range(layers)]
    weights = np.log(1 / (np.arange(experts) + 2.0))
    ids = np.empty((rows, layers, top_k), dtype=np.int16)
    for row in range(rows):
        for layer in range(layers):
            drawn = orders[layer][np.argsort(-(weights + rng.gumbel(size=experts)))]
            kept = [] if row == 0 else [one for one in ids[row - 1, layer] if rng.random() < stay]
            ids[row, layer] = list(dict.fromkeys([*kept, *drawn.tolist()]))[:top_k]
    return ids


def raw(path: Path, ids: NDArray[np.int16]) -> Path:
    """A raw trace."""
    path.write_bytes(ids.astype("<i2").tobytes())
    return path


def captured(path: Path, steps: list[NDArray[np.int16]], experts: int) -> Path:
    """A trace as an engine writes it, without a plan; steps of more than 16 rows are prefill."""
    _, layers, top_k = steps[0].shape
    with closing(TraceWriter(str(path), TraceHeader("m", experts, tuple(range(layers)), top_k))) as writer:
        for ids in steps:
            writer.append(np.full(len(ids), PREFILL if len(ids) > 16 else DECODE, dtype=np.uint8), ids)
    return path


def lru_misses(ids: list[int], slots: int) -> int:
    """Misses of a plain LRU, one id after another."""
    held: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for one in ids:
        if one in held:
            held.move_to_end(one)
            continue
        misses += 1
        if slots:
            if len(held) >= slots:
                held.popitem(last=False)
            held[one] = None
    return misses
