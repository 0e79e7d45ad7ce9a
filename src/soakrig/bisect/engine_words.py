"""What vLLM's log says of its settings: the flags that it took in, and the variables that it does not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from soakrig.bisect.variables import Value
from soakrig.record.redaction import HIDDEN, is_secret

_ARGS = re.compile(r"non-default args: (?P<args>\{.*\})\s*$", re.MULTILINE)
_UNKNOWN = re.compile(r"[Uu]nknown vLLM environment variables? detected: (?P<name>\w+)")


def read_log(log: Path | None) -> str:
    """The text of an engine's log, empty where it cannot be read."""
    if log is None:
        return ""
    try:
        return log.read_text("utf-8", "replace")
    except OSError:
        return ""


def unknown_variable(text: str, names: Collection[str]) -> str:
    """One of ``names`` that vLLM says it does not know, else empty. What its plug-in reads is unknown to it as well."""
    return next((found["name"] for found in _UNKNOWN.finditer(text) if found["name"] in names), "")


def flags_in_log(text: str, values: Mapping[str, Value]) -> tuple[set[str], str]:
    """Flags of ``values`` (by name with dashes, "" a bare one) that the log shows as taken in, and what contradicts one
    ("" where nothing does). vLLM lists only what is not its default: of a flag that is not there nothing is known."""
    found = _ARGS.search(text)
    if found is None:
        return set(), ""
    try:
        given: dict[str, Any] = ast.literal_eval(found["args"])
    except (ValueError, SyntaxError):
        return set(), ""
    shown: set[str] = set()
    for name, value in values.items():
        bare = name.lstrip("-").replace("-", "_")
        key = bare.removeprefix("no_")
        if not name.startswith("-") or key not in given:
            continue
        if value is None:
            continue  # not asked for, and the launcher may have a value of its own; the command line tells that
        wanted = str(not bare.startswith("no_")) if value == "" else value
        if str(given[key]).casefold() != wanted.casefold() and given[key] != _number(wanted):
            asked, found_value = (HIDDEN, HIDDEN) if is_secret(name) else (value, repr(given[key]))
            return shown, f"{name}={asked} was asked for and the engine's log shows {key} = {found_value}"
        shown.add(name)
    return shown, ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
