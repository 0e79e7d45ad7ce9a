"""What a tiny checkpoint is made of: family, sizes, seed, checked, and the files' ``config.json`` that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from soakrig.errors import UsageError

FAMILIES = ("qwen3-moe", "glm4-moe")
DTYPES = ("bfloat16", "float32")
HEAD_DIM = 32
"""The smallest head that vLLM's attention kernels take, on CPU and on CUDA."""
HIDDEN_STEP = 64
"""Widths in multiples of this: whole heads, and experts of multiples of 32, which vLLM's CPU kernel asks for."""
QUERIES_PER_KV_HEAD = 4
MAX_POSITIONS = 32768


@dataclass(frozen=True, slots=True)
class TinySpec:
    """The options of ``soak engine make-tiny``.

    ``layers`` counts the layers with routed experts; glm4-moe has one dense layer before them, as its family does.
    ``hidden`` is the width of the residual stream, an expert is half as wide inside.

    Raises UsageError naming the option, what it was and what it had to be.
    """

    family: str = "qwen3-moe"
    layers: int = 4
    experts: int = 32
    top_k: int = 4
    hidden: int = 128
    seed: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _need(self.family in FAMILIES, "family", self.family, " or ".join(FAMILIES))
        _need(self.dtype in DTYPES, "dtype", self.dtype, " or ".join(DTYPES))
        for name in ("layers", "experts", "top_k"):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _need(self.top_k <= self.experts, "top_k", self.top_k, f"no more than the {self.experts} of --experts")
        fits = self.hidden >= HIDDEN_STEP and self.hidden % HIDDEN_STEP == 0
        _need(fits, "hidden", self.hidden, f"a multiple of {HIDDEN_STEP}")
        _need(0 <= self.seed < 2**30, "seed", self.seed, "0 to 2^30 - 1")

    @property
    def is_glm(self) -> bool:
        return self.family == "glm4-moe"

    @property
    def dense_layers(self) -> int:
        """Layers without routed experts, which come first."""
        return 1 if self.is_glm else 0

    @property
    def all_layers(self) -> int:
        return self.dense_layers + self.layers

    @property
    def heads(self) -> int:
        return self.kv_heads * QUERIES_PER_KV_HEAD

    @property
    def kv_heads(self) -> int:
        return self.hidden // HIDDEN_STEP

    @property
    def expert_hidden(self) -> int:
        """Inner width of one expert, and of the shared one."""
        return self.hidden // 2

    @property
    def dense_hidden(self) -> int:
        """Inner width of a dense layer."""
        return 2 * self.hidden

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated; the rest of a glm4-moe head is not."""
        return HEAD_DIM // 2 if self.is_glm else HEAD_DIM

    @property
    def rope_theta(self) -> float:
        """Such that pair i of a head turns by 10^(-i/4) radians a token in both families."""
        return 100.0 if self.is_glm else 10000.0

    def config(self, vocabulary: int, tokens: dict[str, int]) -> dict[str, Any]:
        """``config.json`` as the families' own checkpoints write it. ``tokens``: ids of ``begin``, ``end``, ``pad``.

        ``rope_theta`` stands alone as well as in ``rope_parameters``: transformers 4 reads the one, 5 the other.
        """
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        shared: dict[str, Any] = {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": tokens["begin"],
            "dtype": self.dtype,
            "eos_token_id": tokens["end"],
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.dense_hidden,
            "max_position_embeddings": MAX_POSITIONS,
            "moe_intermediate_size": self.expert_hidden,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.all_layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": tokens["pad"],
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "use_cache": True,
            "vocab_size": vocabulary,
        }
        if not self.is_glm:
            return {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                **shared,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "num_experts": self.experts,
                "rope_parameters": rope,
                "use_sliding_window": False,
            }
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **shared,
            "first_k_dense_replace": self.dense_layers,
            "n_group": 1,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 0,
            "partial_rotary_factor": self.rotary_dim / HEAD_DIM,
            "rope_parameters": {**rope, "partial_rotary_factor": self.rotary_dim / HEAD_DIM},
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "use_qk_norm": True,
        }


def _need(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        flag = "--" + name.replace("_", "-")
        raise UsageError(f"{flag} {value}: expected {expected}", remedy="`soak engine make-tiny -h` lists the options")
