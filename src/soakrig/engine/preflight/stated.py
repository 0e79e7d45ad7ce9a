"""A launch and a machine as somebody states them: what the preflights of fit are put to without looking anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from soakrig.engine.model_config import read_config
from soakrig.engine.planning.fit import OFFLOAD, SLOTS
from soakrig.engine.preflight.gpu import VISIBLE
from soakrig.engine.preflight.machine import Card, GpuFacts, Machine
from soakrig.engine.preflight.shm import TIER
from soakrig.engine.registry_entry import KV_CAP, OFFLOAD_FLAG, Entry
from soakrig.errors import UsageError


@dataclass(frozen=True, slots=True)
class StatedMachine:
    """Bytes, each None where it is this host's own that counts. ``ram``, ``shm``: available; ``card``: capacity of each
    of ``cards`` like ones, of which ``card_used`` are taken."""

    ram: int | None = None
    card: int | None = None
    card_used: int = 0
    cards: int = 1
    shm: int | None = None

    def over(self, host: Machine) -> Machine:
        """``host`` with what is stated in place of what is there."""
        gpu = host.gpu
        if self.card is not None:
            numbers = range(self.cards)
            gpu = GpuFacts(tuple(Card(n, f"stated-{n}", "stated", self.card_used, self.card) for n in numbers))
        return replace(host, stated_ram=self.ram, stated_shm=self.shm, gpu=gpu)


@dataclass(frozen=True, slots=True)
class StatedLaunch:
    """What replaces a registry entry's own keys; None leaves them. ``offload``, ``transient``, ``host_ram``, ``tier``
    in GiB; ``kv_cap`` and ``kv_per_token`` in bytes; ``slots`` as ``VLLM_MOE_HOT_SLOTS`` has it."""

    context: int | None = None
    validated: int | None = None
    kv_per_token: int | None = None
    kv_cap: int | None = None
    offload: float | None = None
    slots: str | None = None
    transient: float | None = None
    host_ram: float | None = None
    utilisation: float | None = None
    tier: float | None = None
    checkpoint: Path | None = None

    def over(self, entry: Entry | None) -> Entry:
        """``entry`` with these figures; None: a launch of vLLM that is ``checkpoint`` and these figures alone.

        Raises ``UsageError`` where that is no launch: no context anywhere, a value out of range.
        """
        folder = None if self.checkpoint is None else self.checkpoint.expanduser().absolute()
        keys: dict[str, Any] = {} if entry is None else entry.model_dump()
        if folder is not None:
            own = read_config(folder)
            if entry is None:
                name = re.sub(r"[^a-z0-9._-]+", "-", folder.name.lower()).strip("-._") or "checkpoint"
                keys = {"name": name[:64], "backend": "vllm", "context": own.max_positions}
            keys["checkpoint"] = str(folder)
        stated = {
            "context": self.context, "validated_context": self.validated, "kv_bytes_per_token": self.kv_per_token,
            "transient_gib": self.transient, "host_ram_gib": self.host_ram, "gpu_memory_utilization": self.utilisation,
        }  # fmt: skip
        if self.offload is not None or self.transient is not None:
            keys["host_ram_gib"] = None  # what was declared was for another offload
        if self.tier is not None:
            keys["shm_gib"] = None
        keys |= {key: value for key, value in stated.items() if value is not None}
        if keys.get("context") is None:
            raise UsageError(f"{folder} does not say its longest context", remedy="give --context")
        settings: dict[str, str] = {**keys.get("settings", {})}
        settings.pop(VISIBLE, None)  # which cards it takes on another machine
        flags = list(keys.get("flags", ()))
        if self.offload is not None:
            flags = [flag for flag in flags if not flag.startswith(f"{OFFLOAD_FLAG}=")]
            settings[OFFLOAD] = repr(self.offload)
        if self.slots is not None:
            settings[SLOTS] = self.slots
        flags += [f"{name}={value}" for name, value in _flags(self).items()]
        return _checked({**keys, "settings": settings, "flags": flags})


def _flags(launch: StatedLaunch) -> Mapping[str, str]:
    given = {KV_CAP: launch.kv_cap, TIER: None if launch.tier is None else repr(launch.tier)}
    return {name: str(value) for name, value in given.items() if value is not None}


def _checked(keys: Mapping[str, Any]) -> Entry:
    try:
        return Entry.model_validate(dict(keys))
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in found["loc"])
        raise UsageError(
            f"{where or 'the launch'} is {found['input']!r}: {found['msg'].removeprefix('Value error, ')}",
            remedy="docs/serving.md has a line for each key",
        ) from error
