"""All preflights by name, run in one go, and overridden by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from soakrig.engine.preflight.context import check_context, check_kv_cap
from soakrig.engine.preflight.contradictions import (
    check_fatal,
    check_offload_slots,
    check_offload_twice,
    check_profile,
    check_settings,
)
from soakrig.engine.preflight.finding import Finding, unknown
from soakrig.engine.preflight.gpu import check_gpu_process, check_vram
from soakrig.engine.preflight.installed import check_checkpoint, check_engine
from soakrig.engine.preflight.machine import Machine
from soakrig.engine.preflight.memory import check_host_ram, check_memlock
from soakrig.engine.preflight.ports import check_port, check_slot
from soakrig.engine.preflight.shadow import check_shadow
from soakrig.engine.preflight.shm import check_shm
from soakrig.engine.preflight.versions import check_versions
from soakrig.engine.preflight.vram_parts import check_vram_parts
from soakrig.engine.registry_entry import Entry
from soakrig.errors import PreflightRefusedError, UsageError

Check = Callable[[Entry, Machine], Finding]

LASTING: Mapping[str, Check] = {
    "engine": check_engine,
    "checkpoint": check_checkpoint,
    "settings": check_settings,
    "fatal": check_fatal,
    "offload-slots": check_offload_slots,
    "offload-twice": check_offload_twice,
    "profile": check_profile,
    "context": check_context,
    "kv-cap": check_kv_cap,
    "shadow": check_shadow,
    "versions": check_versions,
    "memlock": check_memlock,
}
"""What stopping another model does not change."""
PASSING: Mapping[str, Check] = {
    "slot": check_slot,
    "port": check_port,
    "host-ram": check_host_ram,
    "vram": check_vram,
    "vram-parts": check_vram_parts,
    "gpu-process": check_gpu_process,
    "shm": check_shm,
}
"""What other processes take and give back."""
CHECKS: Mapping[str, Check] = {**LASTING, **PASSING}
"""Every preflight, in the order in which they are told; ``--force`` takes these names."""
MEMORY = ("host-ram", "vram", "shm")
"""What a model that is stopped gives back; cheap enough to ask again and again."""
FIT = ("context", "kv-cap", "host-ram", "vram", "vram-parts", "shm")
"""Whether a launch fits at all: sums that a machine which is only stated can be put to."""


def run_checks(
    entry: Entry, machine: Machine, *, force: Iterable[str] = (), names: Iterable[str] = tuple(CHECKS)
) -> list[Finding]:
    """Each check's finding. A check that breaks says so as ``unknown``; the others go on.

    ``force``: names whose refusals do not count; they are still told. Raises ``UsageError`` for a name that is none.
    """
    forced = check_names(force)
    found: list[Finding] = []
    for name in names:
        try:
            one = CHECKS[name](entry, machine)
        except (OSError, ValueError, LookupError) as error:
            one = unknown(name, f"could not be checked: {type(error).__name__}: {error}")
        found.append(replace(one, forced=one.state == "refused" and name in forced))
    return found


def check_names(names: Iterable[str]) -> frozenset[str]:
    """``names`` where all are preflights. Raises ``UsageError`` with the nearest known one."""
    names = frozenset(names)
    for name in sorted(names - CHECKS.keys()):
        near = difflib.get_close_matches(name, CHECKS, n=1)
        raise UsageError(
            f"--force {name!r} is no preflight" + (f"; {near[0]!r} was meant?" if near else ""),
            remedy=f"They are {', '.join(CHECKS)}.",
        )
    return names


def refuse(model: str, findings: Sequence[Finding], overrule: str = "To start it all the same, knowing this:") -> None:
    """Return where nothing stands in the way. Raises ``PreflightRefusedError`` with every refusal that does.
    ``overrule``: how it can be started all the same, before the ``--force NAME`` of each."""
    standing = [one for one in findings if one.stands]
    if not standing:
        return
    lines = [f"{one.name}: {one.text}" for one in standing]
    remedies = [f"{one.name}: {one.remedy}" for one in standing if one.remedy]
    names = " ".join(f"--force {one.name}" for one in standing)
    raise PreflightRefusedError(
        f"{model} is not started: " + "; ".join(lines),
        remedy="\n  ".join([*remedies, f"{overrule} {names}"]),
    )


def exit_code(findings: Sequence[Finding]) -> int:
    """3 where something refuses, 2 where something could not be seen, else 0."""
    if any(one.stands for one in findings):
        return PreflightRefusedError.exit_code
    return 2 if any(one.state == "unknown" for one in findings) else 0
