"""The port and the slot: neither may be somebody else's."""

from __future__ import annotations

from soakrig.engine.preflight.finding import Finding, ok, refused
from soakrig.engine.preflight.machine import Machine
from soakrig.engine.registry_entry import Entry


def check_port(entry: Entry, machine: Machine) -> Finding:
    """TCP ``port`` of 127.0.0.1 can be bound; who holds it is told by pid."""
    name = "port"
    if not entry.port:
        return ok(name, "a free one is taken at start")
    error = machine.port_refusal(entry.port)
    if error is None:
        return ok(name, f"{entry.port} is free")
    return refused(name, error.message, error.remedy or "Give another port.")


def check_slot(entry: Entry, machine: Machine) -> Finding:
    """One model at a time in a slot; a model whose ``slot`` is empty runs beside any other."""
    name = "slot"
    running = next((one for one in machine.serving if one.name == entry.name), None)
    if running is not None:
        remedy = f"`soak engine status {entry.name}` says how it is; `soak engine stop {entry.name}` ends it."
        return refused(name, f"{entry.name} is on this machine already, pid {running.pid}", remedy)
    if not entry.slot:
        return ok(name, "it takes no slot")
    held = [one for one in machine.serving if one.slot == entry.slot]
    if not held:
        return ok(name, f"slot {entry.slot} is free")
    text = f"slot {entry.slot} is held by {', '.join(f'{one.name}, pid {one.pid}' for one in held)}"
    return refused(name, text, f"`soak engine switch {entry.name}` stops {held[0].name} first.")
