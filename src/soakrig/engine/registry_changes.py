"""A model of the registry with other settings and flags: what ``--set`` and ``--arg`` make of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from soakrig.engine.bundled import BUNDLED
from soakrig.engine.launch_values import flag_key
from soakrig.engine.registry import Registry, load_registry
from soakrig.engine.registry_entry import CONTEXT, SHUTDOWN, UTILISATION, Entry
from soakrig.errors import UsageError

_KEYS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    flag_key(CONTEXT): ("context", int),
    flag_key(UTILISATION): ("gpu_memory_utilization", float),
    flag_key(SHUTDOWN): ("shutdown_timeout", int),
}
"""Flags that a key of the table stands for: the key changes, and with it what follows from it (the KV cap)."""


def registered(
    engine: str, settings: Mapping[str, str], flags: Sequence[str], *, model: str = ""
) -> tuple[Registry, Entry] | None:
    """The registry and the model that ``engine`` names in it, with ``settings`` and ``flags`` as in ``changed``; None
    for a bundled engine, which needs no registry. ``model``: a checkpoint, which only a bundled one takes.

    Raises ``UsageError`` where it is neither, with the nearest name.
    """
    if engine in BUNDLED:
        return None
    registry = load_registry()
    if engine not in registry.models:
        near = difflib.get_close_matches(engine, [*BUNDLED, *registry.models], n=1)
        raise UsageError(
            f"there is no engine {engine!r}" + (f"; {near[0]!r} was meant?" if near else ""),
            remedy=f"Bundled: {', '.join(BUNDLED)}. In the registry: {', '.join(registry.models)}. "
            "Any other engine is attached with --url.",
        )
    if model:
        raise UsageError(
            f"--model {model!r}: {engine} of the registry has its checkpoint",
            remedy="Leave it out, or use --engine vllm.",
        )
    return registry, changed(registry.models[engine], settings, flags)


def changed(entry: Entry, settings: Mapping[str, str], flags: Sequence[str]) -> Entry:
    """``entry`` with these settings and flags in place of its own ones of the same names; new ones come last.

    Raises ``UsageError`` for a flag that the registry decides (the served name, the port), and for a value that the
    registry would refuse.
    """
    table: dict[str, Any] = {}
    kept = list(entry.flags)
    for flag in flags:
        name, _, text = flag.partition("=")
        key, read = _KEYS.get(flag_key(name), ("", str))
        if not key:
            kept = [one for one in kept if flag_key(one) != flag_key(name)] + [flag]
            continue
        try:
            table[key] = read(text)
        except ValueError as error:
            raise UsageError(f"{flag}: a number was expected", remedy=f"As in {name}=8192.") from error
    try:
        return Entry.model_validate(
            {**entry.model_dump(), **table, "settings": {**entry.settings, **settings}, "flags": tuple(kept)}
        )
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        what = found["msg"].removeprefix("Value error, ")
        raise UsageError(
            f"{entry.name} with {', '.join([*settings, *flags])}: {what}", remedy="docs/serving.md has its keys."
        ) from error
