"""What a checkpoint says of itself (config.json, the index of its weights), to be put beside what the registry says."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soakrig.engine.launch_values import flag_value
from soakrig.engine.registry_entry import MADE_HERE, Entry, expand
from soakrig.errors import UsageError

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_top_k", "num_experts_per_token", "top_k")
_DTYPE = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Figures of a model, None where its files do not say. ``max_positions`` in tokens; ``weight_bytes`` of all its
    safetensors files; ``source``: where this was read."""

    source: str
    architecture: str | None = None
    max_positions: int | None = None
    layers: int | None = None
    hidden: int | None = None
    experts: int | None = None
    top_k: int | None = None
    dtype: str | None = None
    quantisation: str | None = None
    weight_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_checkpoint(entry: Entry, home: str) -> Checkpoint:
    """The checkpoint of an entry. What this tool makes itself, and what only a hub knows, has no files to read before
    it is there: then the figures are those of the maker, or none.

    Raises ``UsageError`` where its folder or config.json is missing or cannot be read.
    """
    if entry.backend == "embedded":
        return _embedded(entry)
    if entry.checkpoint == MADE_HERE:
        return _tiny()
    folder = Path(expand(entry.checkpoint, home))
    if not folder.is_absolute():
        return Checkpoint(f"{entry.checkpoint} (on a hub; not read)")
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        what = "holds no config.json" if folder.is_dir() else "is not there"
        remedy = f"Set models.{entry.name}.checkpoint to the folder of a checkpoint in your models.toml."
        raise UsageError(f"checkpoint {folder} {what}", remedy=remedy) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}", remedy="Fetch the checkpoint again.") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} is no JSON object", remedy="Fetch the checkpoint again.")
    return _from_config(str(path), config, _weights(folder))


def _from_config(source: str, config: dict[str, Any], weight_bytes: int | None) -> Checkpoint:
    inner: Any = config.get("text_config")
    # A model that also sees has its language model's figures in a table of their own.
    text: dict[str, Any] = {**config, **inner} if isinstance(inner, dict) else config
    names = config.get("architectures") or [None]
    quantised: Any = config.get("quantization_config") or {}
    kind = quantised.get("quant_algo") or quantised.get("quant_method") if isinstance(quantised, dict) else None
    return Checkpoint(
        source,
        architecture=str(names[0]) if names[0] else None,
        max_positions=_whole(text, ("max_position_embeddings", "model_max_length")),
        layers=_whole(text, ("num_hidden_layers",)),
        hidden=_whole(text, ("hidden_size",)),
        experts=_whole(text, _EXPERTS),
        top_k=_whole(text, _TOP_K),
        dtype=next((str(text[name]) for name in _DTYPE if text.get(name)), None),
        quantisation=str(kind) if kind else None,
        weight_bytes=weight_bytes,
    )


def _whole(table: dict[str, Any], names: tuple[str, ...]) -> int | None:
    found = next((table[name] for name in names if name in table), None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _weights(folder: Path) -> int | None:
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return sum(sizes) if sizes else None


def _tiny() -> Checkpoint:
    from soakrig.engine.vllm.tiny_spec import MAX_POSITIONS, TinySpec

    spec = TinySpec()
    return Checkpoint(
        "made by this tool", spec.family, MAX_POSITIONS, spec.layers, spec.hidden, spec.experts, spec.top_k, spec.dtype
    )


def _embedded(entry: Entry) -> Checkpoint:
    from soakrig.engine.embedded.config import EngineConfig

    usual = EngineConfig()

    def number(flag: str, default: int) -> int:
        text = flag_value(entry.flags, flag)
        return int(text) if text and text.isdecimal() else default

    return Checkpoint(
        "the embedded engine's flags",
        "embedded",
        None,  # positions are rotary: whatever the KV cache holds
        number("--layers", usual.layers),
        number("--hidden", usual.hidden),
        number("--experts", usual.experts),
        number("--top-k", usual.top_k),
        flag_value(entry.flags, "--dtype") or usual.dtype,
    )
