"""What one engine process is started with: the flags, checked, and the model's shape that follows from them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from soakrig.engine.offload.plan import LayerShape, ModelShape
from soakrig.errors import UsageError

HEAD_DIM = 32
QUERIES_PER_KV_HEAD = 2
VOCABULARY = 4096
MOST_THREADS = 4
LOG_FORMAT = "%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The flags of ``python -m soakrig.engine.embedded``.

    Lengths are in tokens; ``threads`` 0 means all CPUs, at most ``MOST_THREADS``.

    Raises UsageError naming the flag where a value makes no sense.
    """

    served_model_name: str = "embedded"
    device: str = "cpu"
    dtype: str = "float32"
    layers: int = 4
    experts: int = 32
    top_k: int = 4
    hidden: int = 128
    weights_seed: int = 0
    max_model_len: int = 32768
    kv_tokens: int = 65536
    block_size: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    prefix_cache: bool = True
    threads: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "top_k", "max_model_len", "block_size", "max_num_seqs"):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _need(self.device in ("cpu", "cuda"), "device", self.device, "cpu or cuda")
        _need(self.dtype in ("float32", "bfloat16"), "dtype", self.dtype, "float32 or bfloat16")
        _need(self.threads >= 0, "threads", self.threads, "0 or more")
        _need(0 <= self.weights_seed < 2**30, "weights_seed", self.weights_seed, "0 to 2^30 - 1")
        _need(self.top_k <= self.experts, "top_k", self.top_k, f"no more than the {self.experts} experts")
        step = HEAD_DIM * QUERIES_PER_KV_HEAD
        _need(self.hidden >= step and self.hidden % step == 0, "hidden", self.hidden, f"a multiple of {step}")
        _need(self.kv_tokens >= 2 * self.block_size, "kv_tokens", self.kv_tokens, "at least two blocks")
        _need(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least the {self.max_num_seqs} of --max-num-seqs, so that each may decode in one step",
        )

    @property
    def compute_threads(self) -> int:
        """Threads of a large step."""
        return self.threads or min(len(os.sched_getaffinity(0)), MOST_THREADS)

    @property
    def blocks(self) -> int:
        """Blocks of the KV cache; tokens that do not fill a block are not used."""
        return self.kv_tokens // self.block_size

    @property
    def kv_heads(self) -> int:
        return self.hidden // (HEAD_DIM * QUERIES_PER_KV_HEAD)

    @property
    def expert_hidden(self) -> int:
        """Inner width of one expert."""
        return self.hidden

    @property
    def limit(self) -> int:
        """Tokens of prompt and reply together that one request may ever have."""
        return min(self.max_model_len, self.blocks * self.block_size)

    @property
    def model_shape(self) -> ModelShape:
        """The routed experts as the offload core prices them; its name tells models apart whose experts differ."""
        size = 2 if self.dtype == "bfloat16" else 4
        row_bytes = 3 * self.expert_hidden * self.hidden * size  # gate, up, down
        return ModelShape(
            name=f"embedded-l{self.layers}-e{self.experts}-k{self.top_k}-h{self.hidden}-w{self.weights_seed}",
            layers=tuple(LayerShape(layer, self.experts, row_bytes) for layer in range(self.layers)),
            top_k=self.top_k,
        )

    def report(self) -> dict[str, Any]:
        """The flags as the settings endpoint shows them."""
        return asdict(self)


def _need(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        flag = "--" + name.replace("_", "-")
        raise UsageError(f"{flag} {value} makes no engine: {expected} was expected")
