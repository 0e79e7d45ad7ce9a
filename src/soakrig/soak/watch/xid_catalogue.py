"""The Xid catalogue: what each number means and what NVIDIA recommends, and the advice for one signal.

The data stand in ``xid_catalogue.json``: number, name and recommended actions of NVIDIA's catalogue, causes of its
older table (which stops at 143), in our own words. A number that is not in it is a fault all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pydantic import TypeAdapter

from soakrig.record.signal import Severity, Signal


@dataclass(frozen=True, slots=True)
class XidEntry:
    """One Xid. ``immediate`` is what to do now, ``investigate`` what to do next; empty where NVIDIA names nothing.

    ``causes`` are NVIDIA's classes, in no order of likelihood. ``severity`` is ours: fault unless purely informational.
    """

    number: int
    name: str
    meaning: str
    causes: tuple[str, ...]
    immediate: str
    investigate: str
    severity: Severity
    source: str


_RECOVERY = {
    "None": "The driver says that the GPU needs nothing.",
    "GPU Reset Required": "The driver asks for a GPU reset: stop every process on it, then nvidia-smi --gpu-reset.",
    "Node Reboot Required": "The driver asks for a reboot of the host.",
    "Drain P2P": "The driver asks to end peer-to-peer work with this GPU.",
    "Drain and Reset": "The driver asks to let the work on this GPU end, then to reset it.",
    "Recover IMEX Domain": "The driver asks to recover the IMEX domain.",
}


@cache
def catalogue() -> dict[int, XidEntry]:
    """All entries by number."""
    data = files("soakrig.soak.watch").joinpath("xid_catalogue.json").read_bytes()
    return {entry.number: entry for entry in TypeAdapter(tuple[XidEntry, ...]).validate_json(data)}


def severity_of(number: int) -> Severity:
    """What an Xid does to a run; an unknown number is a fault."""
    entry = catalogue().get(number)
    return "fault" if entry is None else entry.severity


def advice(signal: Signal, others: Iterable[Signal] = ()) -> str:
    """What to do about ``signal``, in a sentence or more; empty where nothing is known.

    The driver's own verdict (Xid 154, in ``signal`` or among ``others`` of its incident) comes before the table.
    """
    verdicts = [str(s.detail["recovery_to"]) for s in (signal, *others) if s.xid == 154 and "recovery_to" in s.detail]
    own = _verdict(verdicts[-1]) if verdicts else ""
    if signal.kind != "xid" or signal.xid is None:
        return " ".join(part for part in (own, _OTHER_KINDS.get(signal.kind, "")) if part)
    if signal.xid == 154 and own:
        return own
    entry = catalogue().get(signal.xid)
    if entry is None:
        known = "Not in the catalogue: a newer driver's number. See NVIDIA's Xid page; treat it as a fault."
        return f"{own} {known}".strip()
    parts = [own] if own else [entry.immediate]
    if entry.investigate != entry.immediate:
        parts.append(entry.investigate)
    return " ".join([entry.meaning, *(p for p in parts if p)])


def _verdict(name: str) -> str:
    return _RECOVERY.get(name, f"The driver's verdict on the GPU: {name}.")


_OTHER_KINDS = {
    "bus_lost": "The GPU does not answer over PCIe any more: reboot the host; check power, seating and temperature.",
    "probe_fail": "The GPU was dead when the driver looked for it: reboot, then a power cycle if that does not help.",
    "sxid": "An NVSwitch error: see the fabric manager's log; a fatal one needs a reset of all GPUs on the switch.",
    "gsp_ratelimit": "The GSP is dead; fewer Xid 119 after this line are no recovery. Reset the GPU.",
    "oom_kill": "The kernel killed a process for want of host memory: lower the host-memory use of the engine.",
    "hung_task": "A task hangs in the kernel. Look at its stack (/proc/PID/stack as root) and at who holds the lock.",
    "soft_lockup": "A task spins in the kernel. Look at its stack; the driver may be stuck.",
    "aer": "PCIe errors: check seating, riser and power; corrected ones are a warning of worse.",
    "uvm_fatal": "The unified-memory driver is dead until it is loaded again.",
}
