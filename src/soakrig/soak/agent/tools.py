"""Tool definitions of a coding agent, about 500 bytes each: fifty of them are some 25 kB of JSON in every request."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from soakrig.errors import UsageError

EXPLANATION = "Why, in one sentence."
"""Editors ask for one with every call."""

ToolDefinition = dict[str, Any]
"""One entry of a request's ``tools``: ``{"type": "function", "function": {name, description, parameters}}``."""


@cache
def all_tools() -> tuple[ToolDefinition, ...]:
    """Every tool of ``tools.toml``, in its order."""
    table = tomllib.loads(files("soakrig.soak.agent").joinpath("tools.toml").read_text("utf-8"))
    return tuple(_definition(name, dict(entry)) for name, entry in table.items())


def tools(count: int) -> list[ToolDefinition]:
    """The first ``count`` tools. Above what the table holds, tools of numbered servers repeat them under names of
    their own (``srv2_read_file``), as clients with several tool servers send them."""
    if count < 0 or count > 500:
        raise UsageError(f"--tools {count}: expected 0 to 500")
    base = all_tools()
    out: list[ToolDefinition] = []
    for n in range(count):
        server, tool = n // len(base) + 1, base[n % len(base)]
        if server == 1:
            out.append(tool)
        else:
            function = {**tool["function"], "name": f"srv{server}_{tool['function']['name']}"}
            out.append({**tool, "function": function})
    return out


def _definition(name: str, entry: dict[str, str]) -> ToolDefinition:
    description = entry.pop("description")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for key, value in entry.items():
        kind, _, text = value.partition("|")
        properties[key.rstrip("?")] = {**_schema(kind), "description": text}
        if not key.endswith("?"):
            required.append(key)
    properties["explanation"] = {"type": "string", "description": EXPLANATION}
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _schema(kind: str) -> dict[str, Any]:
    if kind.startswith("enum:"):
        return {"type": "string", "enum": kind[5:].split(",")}
    if kind.startswith("array:"):
        return {"type": "array", "items": {"type": kind[6:]}}
    return {"type": kind}
