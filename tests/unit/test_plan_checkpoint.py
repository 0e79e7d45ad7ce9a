"""Checkpoints by their headers: parts, rows, what goes where, and files that are no checkpoint."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from soakrig.engine.offload.plan import OffloadPlan
from soakrig.engine.offload.settings import OffloadSettings
from soakrig.engine.planning.checkpoint import ExpertShape, part_of, placement, read_checkpoint
from soakrig.engine.vllm.tiny import make_tiny
from soakrig.engine.vllm.tiny_spec import FAMILIES, TinySpec
from soakrig.errors import UsageError
from sparse_checkpoint import write_sparse

WIDTHS = {"BF16": 2, "F32": 4}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / request.param
    make_tiny(folder, TinySpec(family=request.param, layers=3, experts=8, top_k=2, hidden=64), force=False)
    return folder


def test_every_byte_has_a_part(tiny: Path) -> None:
    found = read_checkpoint(str(tiny))
    with safe_open(tiny / "model.safetensors", "pt") as file:
        sizes = {}
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            count = 1
            for width in part.get_shape():
                count *= width
            sizes[name] = count * WIDTHS[part.get_dtype()]
    assert found.total == sum(sizes.values())
    assert found.tensors == len(sizes)
    for part, size in found.parts.items():
        assert size == sum(one for name, one in sizes.items() if part_of(name) == part)
    row = 3 * 64 * 32 * 2
    first = 1 if "glm4" in tiny.name else 0
    assert found.row_bytes == dict.fromkeys(range(first, first + 3), row)
    assert found.parts["routed experts"] == 3 * 8 * row
    assert (found.parts["shared experts"] > 0) == ("glm4" in tiny.name)
    assert (set(found.experts.values()), found.top_k, found.context) == ({8}, 2, 32768)
    assert found.draft_layers == ()
    assert ExpertShape(64, 32, bits=16, scale_block=0).row().value == row


def test_what_goes_where_at_an_offload(tiny: Path) -> None:
    found = read_checkpoint(str(tiny))
    layer = 8 * 3 * 64 * 32 * 2
    settings = OffloadSettings.from_environment({"CPU_OFFLOAD_GB": repr(2 * layer / 2**30), "VLLM_MOE_HOT_SLOTS": "3"})
    placed = placement(found, OffloadPlan.build(settings, found.shape()))
    assert placed.offloaded_layers == 2
    assert placed.host.value == 2 * layer
    assert placed.resident.value == found.total - 2 * layer
    assert placed.slots.value == 2 * 3 * layer // 8
    assert placed.staging.value == 64 * layer // 8
    assert placed.device.value == placed.resident.value + placed.slots.value + placed.staging.value
    arena = OffloadSettings.from_environment({"VLLM_MOE_HOT_SLOTS": "arena:5"})
    assert placement(found, OffloadPlan.build(arena, found.shape())).slots.value == 5 * layer // 8


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.3.mlp.experts.17.gate_proj.weight_scale", "routed experts"),
        ("model.layers.3.mlp.experts.gate_up_proj", "routed experts"),
        ("model.layers.3.block_sparse_moe.experts.1.w1.weight", "routed experts"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "shared experts"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "shared experts"),
        ("model.layers.3.self_attn.indexer.wk.weight", "attention"),
        ("model.layers.3.linear_attn.conv1d.weight", "attention"),
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "embeddings"),
        ("model.layers.0.mlp.gate_proj.weight", "other"),
        ("model.layers.3.mlp.gate.weight", "other"),
        ("model.layers.3.post_attention_layernorm.weight", "other"),
        ("vision_tower.blocks.1.attn.qkv.weight", "other"),
    ],
)
def test_parts_by_name(name: str, part: str) -> None:
    assert part_of(name) == part


def sharded(folder: Path, **config: Any) -> Path:
    """Two files, 180 GiB in name alone: fused 4-bit experts with scales, a draft layer, nested configuration."""
    bank = 288 * 3 * 4096 * 2048
    shards: dict[str, dict[str, tuple[str, list[int], int]]] = {}
    for layer in (1, 2, 3):
        name = f"model-{layer % 2}.safetensors"
        shards.setdefault(name, {}).update(
            {
                f"model.layers.{layer}.mlp.experts.w": ("F4", [288, 3, 4096, 2048], bank // 2),
                f"model.layers.{layer}.mlp.experts.w_scale": ("F8_E4M3", [288, 3, 4096, 128], bank // 16),
                f"model.layers.{layer}.self_attn.q_proj.weight": ("BF16", [8, 8], 128),
            }
        )
    for name, tensors in shards.items():
        write_sparse(folder / name, tensors)
    index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = {
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 3,
        "max_position_embeddings": 1_048_576,
    }
    (folder / "config.json").write_text(json.dumps({"text_config": {**text, **config}}))
    return folder


def test_headers_alone_are_read(tmp_path: Path) -> None:
    found = read_checkpoint(str(sharded(tmp_path)))
    assert found.row_bytes == dict.fromkeys((1, 2, 3), int(13.5 * 2**20))
    assert (found.draft_layers, found.top_k, found.context, found.files) == ((3,), 8, 1_048_576, 2)
    assert found.to_json()["parts"]["attention"] == 3 * 128


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    for name, change, says in [
        ("config.json", b"[1]", "holds no JSON object"),
        ("config.json", b"{", "cannot be read as JSON"),
        ("config.json", None, "holds no config.json"),
        ("model-1.safetensors", None, "1 of the 2 files that its index names are missing: model-1.safetensors"),
        ("model-1.safetensors", b"\1\0\0\0\0\0\0\0", "its header claims 1 bytes, and the file has 8"),
        ("model-1.safetensors", b"abc", "its header claims -1 bytes"),
        ("model-1.safetensors", struct.pack("<Q", 4) + b"{{{{", "its header cannot be read"),
        ("model-1.safetensors", struct.pack("<Q", 9) + b'{"a": []}', "its header cannot be read"),
        ("model.safetensors.index.json", b"{}", "is no index of safetensors files"),
    ]:
        path = folder / name
        before = path.read_bytes() if path.stat().st_size < 10**6 else None
        moved = path.rename(folder / "aside")
        if change is not None:
            path.write_bytes(change)
        with pytest.raises(UsageError, match=says):
            read_checkpoint(str(folder))
        moved.rename(path)
        assert before is None or path.read_bytes() == before
    with pytest.raises(UsageError, match=r"none is not there"):
        read_checkpoint(str(tmp_path / "none"))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="has no safetensors file"):
        read_checkpoint(str(empty))


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    with (folder / "model-0.safetensors").open("r+b") as file:
        file.truncate((folder / "model-0.safetensors").stat().st_size - 1)
    with pytest.raises(UsageError, match="its tensors end at byte"):
        read_checkpoint(str(folder))


def test_experts_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"of routed experts in 288 of them, and config.json says 256"):
        read_checkpoint(str(sharded(tmp_path, n_routed_experts=256)))


def test_a_model_without_experts_has_no_shape(tmp_path: Path) -> None:
    write_sparse(tmp_path / "model.safetensors", {"lm_head.weight": ("BF16", [4, 4], 32)})
    (tmp_path / "config.json").write_text("{}")
    found = read_checkpoint(str(tmp_path))
    assert (found.row_bytes, found.parts["embeddings"], found.context) == ({}, 32, None)
    with pytest.raises(UsageError, match="has 0 layers with routed experts"):
        found.shape()
