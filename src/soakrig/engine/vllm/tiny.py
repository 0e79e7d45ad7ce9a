"""Write a tiny mixture-of-experts checkpoint that stock vLLM serves: random weights, nothing downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from soakrig.errors import UsageError

from .tiny_spec import TinySpec
from .tiny_tokenizer import train_tokenizer
from .tiny_weights import TinyWeights

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def make_tiny(folder: Path, spec: TinySpec, *, force: bool = False) -> dict[str, Any]:
    """Write the checkpoint into ``folder``, which is created; the same bytes for the same ``spec``.

    ``force`` writes over the files of that name in a folder that is not empty; others stay. Returns what was made:
    ``directory``, ``files`` (name -> bytes), ``parameters``, ``vocabulary``, and the fields of ``spec``.

    Raises UsageError where the folder is not empty, holds weights that a loader would take as well, or cannot be
    written.
    """
    _check_folder(folder, force=force)
    tokenizer = train_tokenizer()
    tensors = TinyWeights(spec, tokenizer).build()
    tokens = tokenizer.control
    config = spec.config(tokenizer.size, tokens)
    generation = {
        "bos_token_id": tokens["begin"],
        "do_sample": True,
        "eos_token_id": tokens["end"],
        "pad_token_id": tokens["pad"],
        "temperature": 0.7,
    }
    # config.json comes last: a folder without it is no model, so one that was cut off is never taken for one.
    writers: dict[str, Callable[[Path], object]] = {
        WEIGHTS: lambda path: save_file(tensors, path, metadata={"format": "pt"}),
        "tokenizer.json": lambda path: path.write_text(tokenizer.to_json(), "utf-8"),
        "tokenizer_config.json": lambda path: path.write_text(_json(tokenizer.config()), "utf-8"),
        "generation_config.json": lambda path: path.write_text(_json(generation), "utf-8"),
        CONFIG: lambda path: path.write_text(_json(config), "utf-8"),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        for name, write in writers.items():
            write(folder / name)
        sizes = {name: (folder / name).stat().st_size for name in writers}
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from error
    return {
        "directory": str(folder),
        **asdict(spec),
        "vocabulary": tokenizer.size,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "files": sizes,
    }


def _check_folder(folder: Path, *, force: bool) -> None:
    try:
        found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise UsageError(f"{folder} is no folder to write to: {error.strerror or error}") from error
    if found and not force:
        raise UsageError(
            f"{folder} is not empty: it holds {found[0]}{f' and {len(found) - 1} more' if found[1:] else ''}",
            remedy="name an empty or a new folder, or write over what is there with --force",
        )
    # Loaders take every safetensors file of a folder.
    foreign = [name for name in found if ".safetensors" in name and name != WEIGHTS]
    if foreign:
        raise UsageError(
            f"{folder} holds {foreign[0]}: expected no weights beside {WEIGHTS}, a loader would take both",
            remedy="name another folder",
        )


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
