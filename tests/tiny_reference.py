"""A plain reference of the two families' forward pass, written from their definitions: for tests of tiny checkpoints
where there is no vLLM. Float32, batches of equally long sequences, with a key/value cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F


class Reference:
    """Loads a checkpoint folder and runs it; ``routed`` counts, per layer, how often each expert was chosen."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.is_glm = self.config["model_type"] == "glm4_moe"
        self.experts = self.config["n_routed_experts" if self.is_glm else "num_experts"]
        self.layers = self.config["num_hidden_layers"]
        self.routed = {layer: torch.zeros(self.experts) for layer in range(self.layers) if self._is_moe(layer)}
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.bank = {
            (layer, part): torch.stack(
                [self.weights[f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"] for e in range(self.experts)]
            )
            for layer in self.routed
            for part in ("gate", "up", "down")
        }

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        """Logits [batch, tokens, vocabulary] of ``ids`` [batch, tokens], which follow ``start`` tokens in the cache."""
        if start == 0:
            self.cache.clear()
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            x = x + self._attention(layer, self._norm(x, f"{prefix}.input_layernorm"), start)
            inner = self._norm(x, f"{prefix}.post_attention_layernorm")
            moe = self._is_moe(layer)
            x = x + (self._experts(layer, inner) if moe else self._mlp(f"{prefix}.mlp", inner))
        return self._norm(x, "model.norm") @ self.weights["lm_head.weight"].T

    def generate(self, prompts: list[list[int]], count: int, choose: Callable[[Tensor], Tensor]) -> list[list[int]]:
        """``count`` more tokens for each of the equally long ``prompts``; ``choose``: [batch, vocabulary] -> ids."""
        chosen: list[Tensor] = []
        with torch.inference_mode():
            logits = self.forward(torch.tensor(prompts))[:, -1]
            for step in range(count):
                chosen.append(choose(logits))
                if step + 1 < count:
                    logits = self.forward(chosen[-1][:, None], len(prompts[0]) + step)[:, -1]
        return torch.stack(chosen, dim=1).tolist()

    def _is_moe(self, layer: int) -> bool:
        return f"model.layers.{layer}.mlp.gate.weight" in self.weights

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate, up, down = (self.weights[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _rotated(self, x: Tensor, start: int) -> Tensor:
        """NeoX style: dimension i and i + half turn together; a partial factor leaves the rest of the head alone."""
        rope = self.config["rope_parameters"]
        width = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        half = width // 2
        speed = rope["rope_theta"] ** (-torch.arange(half) / half)
        angle = torch.arange(start, start + x.shape[1])[:, None] * speed
        cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
        a, b = x[..., :half], x[..., half:width]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., width:]], dim=-1)

    def _attention(self, layer: int, x: Tensor, start: int) -> Tensor:
        prefix = f"model.layers.{layer}.self_attn"
        width, kv = self.config["head_dim"], self.config["num_key_value_heads"]
        batch, tokens, _ = x.shape

        def heads(name: str) -> Tensor:
            return (x @ self.weights[f"{prefix}.{name}_proj.weight"].T).view(batch, tokens, -1, width)

        query = self._rotated(self._norm(heads("q"), f"{prefix}.q_norm"), start)
        key = self._rotated(self._norm(heads("k"), f"{prefix}.k_norm"), start)
        value = heads("v")
        if layer in self.cache:
            key = torch.cat([self.cache[layer][0], key], dim=1)
            value = torch.cat([self.cache[layer][1], value], dim=1)
        self.cache[layer] = key, value
        share = query.shape[2] // kv
        mask = torch.ones(tokens, start + tokens, dtype=torch.bool).tril(start)
        seen = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.repeat_interleave(share, dim=2).transpose(1, 2),
            value.repeat_interleave(share, dim=2).transpose(1, 2),
            attn_mask=mask,
        )
        return seen.transpose(1, 2).reshape(batch, tokens, -1) @ self.weights[f"{prefix}.o_proj.weight"].T

    def _experts(self, layer: int, x: Tensor) -> Tensor:
        prefix = f"model.layers.{layer}.mlp"
        logits = x @ self.weights[f"{prefix}.gate.weight"].T
        if self.is_glm:
            scores = logits.sigmoid()
            chosen = (scores + self.weights[f"{prefix}.gate.e_score_correction_bias"]).topk(self.top_k).indices
            weights = scores.gather(-1, chosen)
        else:
            weights, chosen = logits.softmax(-1).topk(self.top_k)
        self.routed[layer] += torch.bincount(chosen.flatten(), minlength=self.experts)
        weights = weights / weights.sum(-1, keepdim=True)
        out = self._mlp(f"{prefix}.shared_experts", x) if self.is_glm else torch.zeros_like(x)
        every = torch.zeros(*x.shape[:-1], self.experts).scatter(-1, chosen, weights)
        for expert in chosen.unique().tolist():
            share = every[..., expert, None]
            gate, up, down = (self.bank[layer, part][expert] for part in ("gate", "up", "down"))
            out = out + share * ((F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
        return out

    @property
    def top_k(self) -> int:
        return self.config["num_experts_per_tok"]
