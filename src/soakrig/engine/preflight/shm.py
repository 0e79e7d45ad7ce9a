"""Shared memory: a KV-offload tier lives in /dev/shm, which a container makes small."""

from __future__ import annotations

from soakrig.engine.launch_values import flag_value
from soakrig.engine.planning.fit import kv_tier
from soakrig.engine.preflight.finding import GIB, MIB, Finding, gib, ok, refused, unknown
from soakrig.engine.preflight.machine import Machine
from soakrig.engine.registry_entry import Entry

TIER = "--kv-offloading-size"
"""vLLM's flag, in GiB of all ranks together (config/cache.py, 0.32); the tier is one file of that size."""


def check_shm(entry: Entry, machine: Machine) -> Finding:
    """``shm_gib`` of the entry, else what the KV-offload tier asks for, against what is free in ``machine.shm``."""
    name = "shm"
    need = entry.shm_gib
    if need is None:
        text = flag_value(entry.flags, TIER)
        try:
            need = float(text) if text is not None else 0.0
        except ValueError:
            return unknown(name, f"{TIER}={text} is no number of GiB")
    if not need:
        return ok(name, "no tier in shared memory")
    size = kv_tier(need)
    try:
        total, free = machine.space(machine.shm) if machine.stated_shm is None else (machine.stated_shm,) * 2
    except OSError as error:
        return unknown(name, f"{machine.shm} cannot be looked at: {error.strerror or error}")
    where = "stated" if machine.stated_shm is not None else f"of {gib(total)} free"
    mib = f"({size.to('MiB'):,.0f} and {free // MIB:,} MiB)"
    text = f"{need:g} GiB needed in {machine.shm}, {gib(free)} {where} {mib}"
    if free < size.value:
        remedy = (
            "docker run --shm-size (or --ipc=host), mount -o remount,size=; `soak engine stop` frees what is leaked."
        )
        return refused(name, text, remedy, needs=need, has=free / GIB, unit="GiB")
    return ok(name, text, needs=need, has=free / GIB, unit="GiB")
