"""``--engine NAME`` of a soak or a bisect: a bundled engine, or a model of the registry after its preflights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from soakrig.cli.engine_facts import gpu_facts
from soakrig.engine import service
from soakrig.engine.bundled import Order
from soakrig.engine.preflight.checks import CHECKS, refuse
from soakrig.engine.registry import Registry, order_for
from soakrig.engine.registry_changes import registered
from soakrig.engine.registry_entry import Entry

MACHINE = ("engine", "checkpoint", "slot", "memlock", "host-ram", "vram", "shm")
"""Preflights of a bisect: what the machine must have. A combination that is known to be fatal may be what is hunted."""


def refuse_unfit(registry: Registry, entry: Entry, names: Iterable[str] = tuple(CHECKS)) -> list[str]:
    """The preflights of ``entry`` on this machine: what could not be seen, in words.

    Raises ``PreflightRefusedError`` with every refusal.
    """
    findings = service.preflight(service.Host(registry, gpu=gpu_facts), entry, names=names)
    way = f"`soak engine serve {entry.name}` starts it all the same, for a soak with --url, when it is given"
    refuse(entry.name, findings, way)
    return [f"not known, {one.name}: {one.text}" for one in findings if one.state == "unknown"]


def engine_order(
    engine: str, settings: Mapping[str, str], flags: Sequence[str], model: str, port: int, start_s: float | None,
    notes: Console,
) -> Order:  # fmt: skip
    """What to start for ``--engine``. Of a registry's model, after its preflights; what they could not see goes to
    ``notes``. Raises as ``registered`` and ``refuse_unfit``, and what ``Order`` refuses."""
    found = registered(engine, settings, flags, model=model)
    if found is None:
        return Order(engine, settings, flags, model, port, start_s)
    registry, entry = found
    entry = entry.model_copy(update={"port": port or entry.port, "start_timeout": start_s or entry.start_timeout})
    for text in refuse_unfit(registry, entry):
        notes.print(f"soak: {text}", style="yellow", markup=False)
    return order_for(entry)


def check_registry_machine(name: str, settings: Mapping[str, str], notes: Console) -> None:
    """The machine's preflights of a registry's model; "" for none. Raises as ``refuse_unfit``."""
    found = registered(name, settings, ()) if name else None
    if found is not None:
        for text in refuse_unfit(*found, MACHINE):
            notes.print(f"soak: {text}", style="yellow", markup=False)
