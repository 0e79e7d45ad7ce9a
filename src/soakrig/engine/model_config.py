"""What a checkpoint's ``config.json`` says of its model, whatever its family calls it: read here alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soakrig.errors import UsageError

_POSITIONS = ("max_position_embeddings", "model_max_length", "max_sequence_length", "n_positions")
_LAYERS = ("num_hidden_layers", "n_layer")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")
_DTYPE = ("dtype", "torch_dtype")
REMEDY = "Give the folder that holds config.json and the safetensors files."


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Figures of a model, None where the file does not say. ``max_positions`` in tokens; ``layers``: the model's own,
    draft layers not counted; ``experts``: routed ones of a layer, of which a token uses ``top_k``."""

    architecture: str | None = None
    max_positions: int | None = None
    layers: int | None = None
    hidden: int | None = None
    experts: int | None = None
    top_k: int | None = None
    dtype: str | None = None
    quantisation: str | None = None
    model_type: str | None = None


def read_config(folder: Path, *, what: str = "checkpoint", remedy: str = REMEDY) -> ModelConfig:
    """The ``config.json`` of ``folder``. ``what`` and ``remedy``: for the error's text, by whoever named the folder.

    Raises ``UsageError`` where it is missing or is no JSON object.
    """
    path = folder / "config.json"
    again = "Fetch the checkpoint again."
    try:
        config: Any = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = "holds no config.json" if folder.is_dir() else "is not there"
        raise UsageError(f"{what} {folder} {missing}", remedy=remedy) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}", remedy=again) from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no JSON object", remedy=again)
    return _figures(config)


def _figures(config: Mapping[str, Any]) -> ModelConfig:
    inner: Any = config.get("text_config")
    # A model that also sees has its language model's figures in a table of their own.
    text: Mapping[str, Any] = {**config, **inner} if isinstance(inner, dict) else config
    names: Any = config.get("architectures")
    quantised: Any = config.get("quantization_config") or {}
    kind = quantised.get("quant_algo") or quantised.get("quant_method") if isinstance(quantised, dict) else None
    return ModelConfig(
        architecture=str(names[0]) if isinstance(names, list) and names and names[0] else None,
        max_positions=_whole(text, _POSITIONS),
        layers=_whole(text, _LAYERS),
        hidden=_whole(text, ("hidden_size",)),
        experts=_whole(text, _EXPERTS),
        top_k=_whole(text, _TOP_K),
        dtype=next((str(text[name]) for name in _DTYPE if text.get(name)), None),
        quantisation=str(kind) if kind else None,
        model_type=str(config["model_type"]) if config.get("model_type") else None,
    )


def _whole(table: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = (table.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)
