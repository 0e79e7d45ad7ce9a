"""The text that a tiny checkpoint's tokenizer is trained on: this package's own tool definitions, and text made of its
words. Read as data, so that nothing outside the package and no network is needed."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any

SENTENCES = 4000
DOCUMENTS = 400
_WORD_PIECE = re.compile(r"Ġ([a-z]{3,})")
"""A piece of a byte-level vocabulary that is a word with its space before it."""


def corpus() -> Iterator[str]:
    """Tool definitions, tool calls, sentences, logs and code; the same text every time."""
    tools, words = _tools(), _words()
    rng = random.Random(0)  # noqa: S311
    for name, entry in tools.items():
        for separators in ((",", ":"), (", ", ": ")):
            yield json.dumps(_definition(name, entry), separators=separators)
    for _ in range(SENTENCES):
        yield " ".join(rng.choices(words, k=rng.randint(6, 16))).capitalize() + "."
    names = sorted(tools)
    for _ in range(DOCUMENTS):
        name = rng.choice(names)
        keys = [key.rstrip("?") for key in tools[name] if key != "description"]
        call = {"name": name, "arguments": {key: _path(rng, words) for key in keys}}
        yield json.dumps(call)
        yield json.dumps({"tool_calls": [call], "role": "assistant", "content": ""}, separators=(",", ":"))
        yield _log(rng, words)
        yield _code(rng, words)


def _tools() -> dict[str, dict[str, str]]:
    # As a file, not through `soak`, which the engine must not import.
    return tomllib.loads(resources.files("soakrig").joinpath("soak/agent/tools.toml").read_text("utf-8"))


def _words() -> list[str]:
    """The words among the pieces of the embedded engine's tokenizer, most frequent first."""
    raw = resources.files("soakrig").joinpath("engine/embedded/tokenizer.json").read_text("utf-8")
    pieces: dict[str, int] = json.loads(raw)["model"]["vocab"]
    return [match[1] for piece in sorted(pieces, key=pieces.__getitem__) if (match := _WORD_PIECE.fullmatch(piece))]


def _definition(name: str, entry: dict[str, str]) -> dict[str, Any]:
    properties: dict[str, dict[str, str]] = {}
    for key, value in entry.items():
        kind, _, text = value.partition("|")
        if key != "description":
            properties[key.rstrip("?")] = {"type": kind.partition(":")[0], "description": text}
    required = [key for key in entry if key != "description" and not key.endswith("?")]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    function = {"name": name, "description": entry["description"], "parameters": parameters}
    return {"type": "function", "function": function}


def _path(rng: random.Random, words: list[str]) -> str:
    ending = rng.choice(["py", "toml", "md", "json", "ts", "sh"])
    return f"{rng.choice(['src', 'tests', 'docs'])}/{rng.choice(words)}_{rng.choice(words)}.{ending}"


def _log(rng: random.Random, words: list[str]) -> str:
    lines = [
        f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{n:02}.{rng.randint(0, 999):03} "
        f"{rng.choice(['DEBUG', 'INFO', 'WARNING', 'ERROR'])} {rng.choice(words)}: {rng.choice(words)} "
        f"id={rng.randint(1, 99999)} took={rng.randint(1, 900)}ms"
        for n in range(rng.randint(2, 6))
    ]
    return "\n".join(lines)


def _code(rng: random.Random, words: list[str]) -> str:
    a, b, verb = rng.choice(words), rng.choice(words), rng.choice(words)
    return (
        f"def {verb}_{a}({b}: {b.title()}, limit: int = {rng.randint(1, 512)}) -> {a.title()}:\n"
        f"    if {b}.{verb} is None and len({a}) > {rng.randint(1, 99)}:\n"
        f"        raise {a.title()}Error(f'{{{b}}} cannot {verb}')\n"
        f"    return {a}[{rng.randint(0, 9)}:{rng.randint(10, 99)}]\n"
    )
