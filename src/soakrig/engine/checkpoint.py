"""What the checkpoint of a registry's model says of itself, to be put beside what the registry says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soakrig.engine.launch_values import flag_value
from soakrig.engine.model_config import ModelConfig, read_config
from soakrig.engine.registry_entry import MADE_HERE, Entry, expand

NOTHING = ModelConfig()


@dataclass(frozen=True, slots=True)
class OwnWords:
    """``source``: where ``config`` was read; ``weight_bytes``: of all safetensors files, None where there are none.
    What they are made of says ``engine.planning.checkpoint``, which reads their headers."""

    source: str
    config: ModelConfig = NOTHING
    weight_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, **asdict(self.config), "weight_bytes": self.weight_bytes}


def checkpoint_folder(entry: Entry, home: str) -> Path | None:
    """The folder with the entry's files; None for what this tool makes itself and for what only a hub knows."""
    if entry.backend == "embedded" or entry.checkpoint == MADE_HERE:
        return None
    folder = Path(expand(entry.checkpoint, home))
    return folder if folder.is_absolute() else None


def own_words(entry: Entry, home: str) -> OwnWords:
    """Of an entry's checkpoint. Where there are no files to read, the figures are those of the maker, or none.

    Raises ``UsageError`` where its folder or config.json is missing or cannot be read.
    """
    if entry.backend == "embedded":
        return _embedded(entry)
    if entry.checkpoint == MADE_HERE:
        return _tiny()
    folder = checkpoint_folder(entry, home)
    if folder is None:
        return OwnWords(f"{entry.checkpoint} (on a hub; not read)")
    remedy = f"Set models.{entry.name}.checkpoint to the folder of a checkpoint in your models.toml."
    return OwnWords(str(folder / "config.json"), read_config(folder, remedy=remedy), _weights(folder))


def _weights(folder: Path) -> int | None:
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return sum(sizes) if sizes else None


def _tiny() -> OwnWords:
    from soakrig.engine.vllm.tiny_spec import MAX_POSITIONS, TinySpec

    spec = TinySpec()
    config = ModelConfig(spec.family, MAX_POSITIONS, spec.layers, spec.hidden, spec.experts, spec.top_k, spec.dtype)
    return OwnWords("made by this tool", config)


def _embedded(entry: Entry) -> OwnWords:
    from soakrig.engine.embedded.config import EngineConfig

    usual = EngineConfig()

    def number(flag: str, default: int) -> int:
        text = flag_value(entry.flags, flag)
        return int(text) if text and text.isdecimal() else default

    config = ModelConfig(
        "embedded",
        None,  # positions are rotary: whatever the KV cache holds
        number("--layers", usual.layers),
        number("--hidden", usual.hidden),
        number("--experts", usual.experts),
        number("--top-k", usual.top_k),
        flag_value(entry.flags, "--dtype") or usual.dtype,
    )
    return OwnWords("the embedded engine's flags", config)
