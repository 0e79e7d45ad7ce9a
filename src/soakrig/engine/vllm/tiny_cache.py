"""The tiny checkpoint of ``--engine tiny-moe``: made once, kept under the user's cache folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

import soakrig
from soakrig.engine.vllm.served_model import ServedModel
from soakrig.engine.vllm.tiny_spec import TinySpec
from soakrig.errors import StoreError

NAME = "tiny-moe"
_WRITTEN_LAST = "config.json"
"""A folder without it was cut off."""


def cache_folder() -> Path:
    """Where this tool keeps what it can make again: ``$XDG_CACHE_HOME/soakrig`` or ``~/.cache/soakrig``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "soakrig"


def tiny_model(
    progress: Callable[[str], None] = lambda text: None, spec: TinySpec | None = None, folder: Path | None = None
) -> ServedModel:
    """The checkpoint of ``spec`` (default: as ``soak engine make-tiny`` makes it), made under ``folder`` once.

    Raises ``StoreError`` when the cache folder cannot be written.
    """
    spec = spec or TinySpec()
    place = (folder or cache_folder()) / NAME / _key(spec)
    if not (place / _WRITTEN_LAST).exists():
        progress("making the tiny checkpoint")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{place}.lock"):
                if not (place / _WRITTEN_LAST).exists():
                    _make(place, spec)
        except OSError as error:
            remedy = "Free space there, or set XDG_CACHE_HOME to a folder that can be written."
            raise StoreError(f"{place} cannot be made: {error.strerror or error}", remedy=remedy) from error
    return ServedModel(str(place.absolute()), NAME, tiny=True)


def _make(place: Path, spec: TinySpec) -> None:
    from soakrig.engine.vllm.tiny import make_tiny  # brings torch, which a run on a kept checkpoint never needs

    shutil.rmtree(place, ignore_errors=True)  # one that was cut off
    make_tiny(place, spec)


def _key(spec: TinySpec) -> str:
    """A name for what ``spec`` makes in this version; the writer's own text is part of it, for those who change it."""
    digest = hashlib.sha256(json.dumps([soakrig.__version__, dataclasses.asdict(spec)], sort_keys=True).encode())
    for source in sorted(Path(__file__).parent.glob("tiny*")):
        if source.is_file() and source.name != Path(__file__).name:
            digest.update(source.read_bytes())
    return f"{spec.family}-{digest.hexdigest()[:16]}"
