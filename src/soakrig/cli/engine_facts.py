"""What NVML says of the cards, as the engine's preflights take it: ``engine`` never imports the watchers that ask."""

from __future__ import annotations

from typing import Any

from soakrig.clock import RealClock
from soakrig.engine.preflight.machine import Card, GpuFacts, Holder
from soakrig.errors import WatcherError
from soakrig.soak.watch import proc
from soakrig.soak.watch.nvml_session import read_once

DEADLINE_S = 30.0


def gpu_facts() -> GpuFacts:
    """Every card with its memory and who holds it. Never raises: where nobody can be asked, ``why`` says so."""
    try:
        answer = read_once("state", RealClock(), deadline=DEADLINE_S)
    except (WatcherError, OSError) as error:
        return GpuFacts(why=error.message if isinstance(error, WatcherError) else f"NVML cannot be asked: {error}")
    if isinstance(answer, str):
        return GpuFacts(why=answer)
    lost = [gpu for gpu in answer["gpus"] if "failed" in gpu]
    if lost:
        return GpuFacts(why=f"GPU {lost[0]['index']} at {lost[0]['pci']}: {lost[0]['failed']['text']}")
    return GpuFacts(tuple(_card(gpu) for gpu in answer["gpus"]), driver=answer["driver"] or "")


def _card(gpu: dict[str, Any]) -> Card:
    memory, processes, compute = gpu.get("memory"), gpu.get("processes"), gpu.get("compute_pids")
    holders = None
    if processes is not None:
        # Without the list of compute processes everybody counts as one.
        holders = tuple(Holder(pid, _name(pid), held, compute is None or pid in compute) for pid, held in processes)
    return Card(
        gpu["index"],
        gpu["uuid"] or f"index-{gpu['index']}",
        gpu["name"] or "unknown card",
        memory[0] if memory else None,
        memory[1] if memory else None,
        holders,
    )


def _name(pid: int) -> str:
    stat = proc.read_stat(pid)
    return stat.name if stat is not None else ""
