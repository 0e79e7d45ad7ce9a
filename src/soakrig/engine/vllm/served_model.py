"""The model to serve: a folder with a checkpoint (or a name that vLLM looks up itself), and the parsers that fit it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from soakrig.engine.model_config import read_config
from soakrig.errors import UsageError

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
DEFAULT_TOOLS = "hermes"
PARSERS: dict[str, tuple[str, str]] = {
    "glm4_moe": ("glm45", "glm45"),
    "glm4_moe_lite": ("glm47", "glm47"),
    "glm_moe_dsa": ("glm47", "glm47"),
    "qwen3": (DEFAULT_TOOLS, "qwen3"),
    "qwen3_moe": (DEFAULT_TOOLS, "qwen3"),
}
"""``model_type`` of config.json -> vLLM's tool-call parser, and its reasoning parser for a template that thinks. Names
as in vLLM 0.24 to 0.32 (tool_parsers/__init__.py, reasoning/__init__.py); any other model has hermes and none."""
_THINKS = "enable_thinking"
"""What templates of models that think ask for; a parser on another model would take its whole answer for thoughts."""


@dataclass(frozen=True)
class ServedModel:
    """``path`` is what vLLM is given: an absolute folder, or a name of a hub. ``reasoning_parser``: None for a model
    that does not think. ``tiny``: made by this tool, which then also sets sizes that fit it."""

    path: str
    name: str
    tool_parser: str = DEFAULT_TOOLS
    reasoning_parser: str | None = None
    tiny: bool = False

    @property
    def local(self) -> bool:
        """Whether it is a folder of this machine."""
        return self.path.startswith("/")


def read_model(text: str) -> ServedModel:
    """The model that --model names. Raises ``UsageError`` when it is neither a checkpoint's folder nor a hub's name."""
    folder = Path(text).expanduser()
    if folder.is_dir():
        return _read_folder(folder.absolute())
    if _HUB_NAME.match(text):
        return ServedModel(text, text.rpartition("/")[2])
    what = "it is a file" if folder.exists() else "there is no such folder"
    remedy = "Give the folder that holds config.json and the weights, or a name such as Qwen/Qwen3-30B-A3B."
    raise UsageError(f"--model {text!r}: {what}", remedy=remedy)


def _read_folder(folder: Path) -> ServedModel:
    remedy = "Give the folder of a checkpoint as Hugging Face lays it out."
    kind = read_config(folder, what="--model", remedy=remedy).model_type or ""
    tools, reasoning = PARSERS.get(kind, (DEFAULT_TOOLS, ""))
    return ServedModel(str(folder), folder.name, tools, reasoning if reasoning and _thinks(folder) else None)


def _thinks(folder: Path) -> bool:
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            if _THINKS in (folder / name).read_text("utf-8", "replace"):
                return True
        except OSError:
            continue
    return False
