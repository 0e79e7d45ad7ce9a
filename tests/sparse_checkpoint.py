"""Checkpoints whose weights are holes in files: headers of any size, no bytes on disk."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

GIB, MIB = 1 << 30, 1 << 20
GLM_ROW = int(13.5 * MIB)
"""One routed expert of the published 181 GiB checkpoint: three 4096 x 2048 matrices in 4 bits, a scale byte for 16."""
GLM_MOE_LAYERS, GLM_EXPERTS = 43, 288
GLM_REST = {"self_attn": 11.74, "embed_tokens": 2.36, "mlp.shared_experts": 2.02, "mlp.down_proj": 1.58}
"""GiB of the parts that are loaded beside the routed experts."""


def write_sparse(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A safetensors file of ``name -> dtype, shape, bytes``: whoever read its weights would find zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def glm_checkpoint(folder: Path, **config: Any) -> Path:
    """The published checkpoint's sizes, without its vision tower: 163.27 GiB of routed experts in 43 layers (the last
    one the draft layer's) and 17.70 GiB of the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    for layer in range(2, 2 + GLM_MOE_LAYERS):
        name = f"model.layers.{layer}.mlp.experts.w"
        shape = [GLM_EXPERTS, GLM_ROW]
        write_sparse(folder / f"layer-{layer}.safetensors", {name: ("U8", shape, GLM_EXPERTS * GLM_ROW)})
    rest = {f"model.{name}.weight": int(gib * GIB) for name, gib in GLM_REST.items()}
    write_sparse(folder / "rest.safetensors", {name: ("U8", [size], size) for name, size in rest.items()})
    text = {
        "n_routed_experts": GLM_EXPERTS, "num_experts_per_tok": 8, "num_hidden_layers": 44,
        "max_position_embeddings": 1_048_576,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**text, **config}))
    return folder
