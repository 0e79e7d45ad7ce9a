"""A tiny checkpoint's weights from a seed: random, but for what makes its routing skewed and its text worth judging.

Attention brings as much to the residual stream as the MLPs do, so that the next token hangs on the whole text. That
keeps greedy text going: with weak attention the last token decides, and the same few words come back all the time.

Three dimensions of the residual stream are kept apart; no layer writes to them but where it is said here.

- ``ONE`` holds the same value at every token. The rows of the router read it, which biases some experts (qwen3-moe's
  router has no bias of its own), and so do the rows of the head, which keeps all but plain words from being said.
- ``SPECIAL`` marks every special token, and ``RECENT`` says how near the last ones are: one head of the first layer
  averages ``SPECIAL`` over the last tokens. While it is high the reply does not end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .tiny_spec import HEAD_DIM, QUERIES_PER_KV_HEAD, TinySpec
from .tiny_tokenizer import TinyTokenizer

ONE, SPECIAL, RECENT, FREE = range(4)
"""Dimensions of the residual stream; from FREE on they are the model's own."""
WINDOW_PAIRS = (4, 5, 6, 7)
"""Rotary pairs of the head that averages over the last tokens: together they agree within some ten tokens only."""
WINDOW_GAIN, CONTENT_GAIN = 1.3, 2.5
"""What a query is multiplied by in these dimensions: attention scores reach this times the root of the head's width."""
ATTENTION_OUT = 1.5
ONE_LEVEL = 2.0
MLP_IN, MLP_OUT = 1.5, 1.0
"""Gains into an MLP and out of it: loud enough for a wrong expert to show in the logits."""
GROWTH = {"qwen3-moe": 2.4, "glm4-moe": 3.8}
"""What a layer adds to the mean square of the residual stream, which is 1 before the first (measured)."""
ROUTER_STD = 0.7
SKEW = (0.3, 0.5)
"""Range of a layer's skew: an expert's bias falls by this times the logarithm of its rank."""
LOGIT_STD = 3.0
UNSAID = -30.0
"""Offset of the logits of all pieces but plain words and ``<|end|>``."""
END_STD = 1.0
END_OFFSET = 6.7
END_RECENT = -300.0
"""The logit of ``<|end|>``: it varies less than those of words, so that it wins as often with every seed; an offset;
and what each unit of ``RECENT`` takes away."""


class Draws:
    """Tensors from one seed, in call order.

    Uniform draws only: they are exact in float32 everywhere, while normal draws go through logarithms that differ in
    the last bit between instruction sets.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def tensor(self, *shape: int, std: float) -> Tensor:
        """Zero mean, standard deviation ``std``, float32."""
        return torch.rand(shape, generator=self._generator).sub_(0.5).mul_(std * math.sqrt(12.0))

    def order(self, count: int) -> list[int]:
        """A permutation of ``count`` places."""
        return torch.rand(count, generator=self._generator, dtype=torch.float64).argsort(stable=True).tolist()

    def number(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self._generator, dtype=torch.float64))


class TinyWeights:
    """Draws a checkpoint's tensors under the names that the family's own checkpoints use."""

    def __init__(self, spec: TinySpec, tokenizer: TinyTokenizer) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._draws = Draws(spec.seed)
        self._dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
        self._tensors: dict[str, Tensor] = {}
        self._inward = 1.0 / math.sqrt(spec.hidden)

    def build(self) -> dict[str, Tensor]:
        """Every tensor by name. The vocabulary comes last: its size must not move the layers."""
        spec = self._spec
        for layer in range(spec.all_layers):
            prefix = f"model.layers.{layer}"
            self._put(f"{prefix}.input_layernorm.weight", torch.ones(spec.hidden))
            self._put(f"{prefix}.post_attention_layernorm.weight", torch.ones(spec.hidden))
            self._attention(f"{prefix}.self_attn", first=layer == 0)
            if layer < spec.dense_layers:
                self._mlp(f"{prefix}.mlp", spec.dense_hidden)
            else:
                self._experts(f"{prefix}.mlp", depth=layer)
        self._put("model.norm.weight", torch.ones(spec.hidden))
        self._vocabulary()
        return self._tensors

    def _put(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        self._tensors[name] = tensor.to(dtype or self._dtype).contiguous()

    def _inner(self, rows: int, std: float) -> Tensor:
        """[rows, hidden]: reads the model's own dimensions only."""
        drawn = self._draws.tensor(rows, self._spec.hidden, std=std * self._inward)
        drawn[:, :FREE] = 0.0
        return drawn

    def _outer(self, columns: int, std: float) -> Tensor:
        """[hidden, columns]: writes the model's own dimensions only."""
        drawn = self._draws.tensor(self._spec.hidden, columns, std=std / math.sqrt(columns))
        drawn[:FREE] = 0.0
        return drawn

    def _attention(self, prefix: str, *, first: bool) -> None:
        spec = self._spec
        query = self._inner(spec.heads * HEAD_DIM, 1.0)
        key = self._inner(spec.kv_heads * HEAD_DIM, 1.0)
        value = self._inner(spec.kv_heads * HEAD_DIM, 1.0)
        output = self._outer(spec.heads * HEAD_DIM, ATTENTION_OUT)
        gain = torch.full((HEAD_DIM,), CONTENT_GAIN)
        if first:
            self._look_back(query, key, value, output, gain)
        self._put(f"{prefix}.q_proj.weight", query)
        self._put(f"{prefix}.k_proj.weight", key)
        self._put(f"{prefix}.v_proj.weight", value)
        self._put(f"{prefix}.o_proj.weight", output)
        self._put(f"{prefix}.q_norm.weight", gain)
        self._put(f"{prefix}.k_norm.weight", torch.ones(HEAD_DIM))

    def _look_back(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, gain: Tensor) -> None:
        """Make the first head of all see the last tokens, whatever they are, and carry their SPECIAL into RECENT.

        All tokens have the same key in its key/value head, and it has the same query everywhere, spread over the
        window's pairs: RoPE alone decides.
        """
        half = self._spec.rotary_dim // 2
        key[:HEAD_DIM] = 0.0
        query[:HEAD_DIM] = 0.0
        for pair in WINDOW_PAIRS:
            key[pair, ONE] = query[pair, ONE] = 1.0
            gain[pair] = gain[pair + half] = WINDOW_GAIN
        # Dimension 0 of the value carries SPECIAL; the other queries of this key/value head leave it alone.
        value[0] = 0.0
        value[0, SPECIAL] = 1.0
        for head in range(QUERIES_PER_KV_HEAD):
            output[:, head * HEAD_DIM] = 0.0
        output[RECENT, 0] = 1.0

    def _level(self, layers: float) -> float:
        """What ONE is after the norm that follows ``layers`` layers: the norm divides it by what they added."""
        return ONE_LEVEL / math.sqrt(1.0 + GROWTH[self._spec.family] * layers)

    def _mlp(self, prefix: str, width: int, share: float = 1.0) -> None:
        """``share``: the part of several of them that a token gets; the less, the louder each is."""
        self._put(f"{prefix}.gate_proj.weight", self._inner(width, MLP_IN))
        self._put(f"{prefix}.up_proj.weight", self._inner(width, MLP_IN))
        self._put(f"{prefix}.down_proj.weight", self._outer(width, MLP_OUT / math.sqrt(share)))

    def _experts(self, prefix: str, *, depth: int) -> None:
        spec = self._spec
        skew = self._draws.number(*SKEW)
        bias = torch.tensor([-skew * math.log1p(rank) for rank in self._draws.order(spec.experts)])
        router = self._inner(spec.experts, ROUTER_STD)
        if spec.is_glm:
            # Chosen by sigmoid + bias: the sigmoid's range is far smaller than the logit's.
            self._put(f"{prefix}.gate.e_score_correction_bias", bias / 4.5, torch.float32)
        else:
            router[:, ONE] = bias / self._level(depth + 0.5)  # after this layer's attention
        self._put(f"{prefix}.gate.weight", router)
        for expert in range(spec.experts):
            self._mlp(f"{prefix}.experts.{expert}", spec.expert_hidden, share=1.0 / spec.top_k)
        if spec.is_glm:
            self._mlp(f"{prefix}.shared_experts", spec.expert_hidden)

    def _vocabulary(self) -> None:
        spec, known = self._spec, self._tokenizer
        embedding = self._draws.tensor(known.size, spec.hidden, std=1.0)
        embedding[:, :FREE] = 0.0
        embedding[:, ONE] = ONE_LEVEL
        embedding[list(known.special_ids), SPECIAL] = ONE_LEVEL
        self._put("model.embed_tokens.weight", embedding)
        head = self._inner(known.size, LOGIT_STD)
        end = known.control["end"]
        level = self._level(spec.all_layers)
        head[:, ONE] = UNSAID / level
        head[list(known.word_ids), ONE] = 0.0
        head[end] *= END_STD / LOGIT_STD
        head[end, ONE] = END_OFFSET / level
        head[end, RECENT] = END_RECENT / level
        head[end, SPECIAL] = UNSAID / level
        self._put("lm_head.weight", head)
