"""What two runs must share for one to speak against the other: engine, its settings, model, load shape and machine.

Left out on purpose: what a launch is dealt (pid, port, boot, seed, the plant's draw), how long it was to go on (turns
or seconds), what was watched, and what was asked of the verdict (gates, leniencies, time limits).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from soakrig.record.manifest import Manifest

MACHINE = ("cpu", "cores", "machine", "nvidia_driver")
"""Facts of host and fingerprint in which another machine, or another driver on it, shows."""
_OF_ONE_LAUNCH = frozenset({"pid", "worker_pid", "plant", "settings", "offload", "simulated"})
_OF_ONE_PLAN = frozenset({"memory", "warnings"})
"""Of what an engine tells: dealt anew by every start, or in the identity in another way."""
_NOT_SET = frozenset({"set", "args", "engine", "arm", "bundled"})
_IN_LOAD = frozenset({"parameters"})


def settings_of(manifest: Manifest) -> dict[str, Any]:
    """Everything in which two runs with the same settings agree, as plain data.

    A setting counts by the value that the engine reports, whether it is a default or was asked for; one that the engine
    does not report counts as it was asked for. ``load`` is None where an older run did not record it: such runs are the
    same only among themselves.
    """
    settings = manifest.settings
    told = _table(settings.get("engine"))
    effective = {name: _value(one) for name, one in _table(told.get("settings")).items()}
    asked = {name: value for name, value in _table(settings.get("set")).items() if name not in effective}
    facts = {**manifest.fingerprint, **manifest.host}
    memory = facts.get("memory_mib")
    in_load = _IN_LOAD if manifest.load else frozenset[str]()
    return {
        "reproducer": manifest.reproducer,
        "conversations": manifest.plan.conversations,
        "load": manifest.load or None,
        "transcript": _transcript(manifest),
        "model": manifest.model,
        "launched": manifest.launched,
        "attached_to": None if manifest.launched else manifest.base_url,
        "effective": effective,
        "asked": asked,
        "flags": _flags(settings.get("args")),
        "engine": {name: value for name, value in told.items() if name not in _OF_ONE_LAUNCH},
        "offload": {name: value for name, value in _table(told.get("offload")).items() if name not in _OF_ONE_PLAN},
        "engine_version": manifest.fingerprint.get("engine"),
        "other": {name: value for name, value in settings.items() if name not in (_NOT_SET | in_load)},
        "machine": {name: facts[name] for name in MACHINE if facts.get(name) not in (None, "")},
        "memory_gib": round(memory / 1024) if isinstance(memory, int) else None,
        "simulated": manifest.simulated,
    }


def settings_hash(manifest: Manifest) -> str:
    """16 hex digits over ``settings_of``."""
    data = orjson.dumps(settings_of(manifest), option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.sha256(data).hexdigest()[:16]


def settings_known(manifest: Manifest) -> bool:
    """Whether the record knows what the engine ran with: this tool launched it, or it reports its settings."""
    return manifest.launched is not None or bool(_table(manifest.settings.get("engine")))


def _transcript(manifest: Manifest) -> dict[str, Any] | None:
    """A transcript by its bytes where they were hashed, else by its place."""
    facts = manifest.transcript
    if facts is None:
        return None
    return {name: facts.get(name) for name in (("sha256",) if facts.get("sha256") else ("path", "requests"))}


def _flags(flags: Any) -> list[str]:
    """Launch flags by name; those of one name stay in their order, since the last of them wins."""
    found = [str(flag) for flag in flags or ()]
    if not all(flag.startswith("-") for flag in found):
        return found  # a value that is an argument of its own belongs behind its flag
    return sorted(found, key=lambda flag: flag.partition("=")[0])


def _value(one: Any) -> Any:
    return one.get("value") if isinstance(one, dict) else one


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
