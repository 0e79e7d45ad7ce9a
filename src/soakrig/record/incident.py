"""An incident: signals that belong together, with the one that says most as its headline.

One GPU fault prints many lines: early ones (PCIe errors, shader exceptions), the fault itself, and clean-up that may
reach other GPUs a minute later. Counting each line as a fault would make one night look like forty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from soakrig.record.signal import Signal

BURST_S = 10.0
"""Signals of one GPU closer together than this are one event."""
AFTERMATH_S = 120.0
"""Clean-up lines are taken as consequences for this long after the headline; late ones were seen at 60-70 s."""
PRECURSOR_S = 60.0
"""Warnings are taken as forerunners for this long before the fault."""

_OPEN_S = 300.0  # a hung task is reported when it has hung for two minutes

_CLEANUP_XIDS = frozenset({13, 32, 43, 45, 69, 154})
_CLEANUP_KINDS = frozenset(
    {"sxid", "segfault", "trap", "coredump", "hung_task", "hung_task_owner", "task_dump", "stack_frame", "nvrm_other",
     "continuation", "gpu_serial", "gsp_ratelimit", "bus_lost", "oom_reaped", "suppressed", "soft_lockup",
     "amdgpu_process", "amdgpu_fault_addr", "amdgpu_reset", "aer_norecover", "aer_status", "aer_bit"}
)  # fmt: skip
_SPREADING_KINDS = frozenset(
    {"sxid", "segfault", "trap", "coredump", "hung_task", "hung_task_owner", "task_dump", "stack_frame"}
)
"""Consequences that carry no GPU, or another one than the GPU at fault."""
_SAME_EVENT_KINDS = frozenset({"bus_lost", "probe_fail"})
"""Prints of the fault itself, which the driver may put before or after the Xid."""
_NEVER_MEMBERS = frozenset({"gpu_ident", "gap", "quoted", "not_kernel_form"})


@dataclass(slots=True)
class Incident:
    """Signals that belong together.

    ``precursors`` came before ``headline`` and may have led to it, ``aftermath`` came with or after it; both in order
    of time. ``signature`` is the headline's. ``first`` and ``last`` are monotonic seconds of the outermost members.
    """

    headline: Signal
    precursors: list[Signal] = field(default_factory=list[Signal])
    aftermath: list[Signal] = field(default_factory=list[Signal])
    first: float = 0.0
    last: float = 0.0

    @property
    def signature(self) -> str:
        """Name for comparing faults: no addresses, pids or channels."""
        return self.headline.signature or self.headline.kind

    @property
    def count(self) -> int:
        """How many signals belong to it, the headline included."""
        return 1 + len(self.precursors) + len(self.aftermath)

    @property
    def signals(self) -> list[Signal]:
        """All members in order of time."""
        return [*self.precursors, self.headline, *self.aftermath]

    @property
    def recovery(self) -> str | None:
        """The driver's own verdict (Xid 154), the last one it gave: "GPU Reset Required", or None."""
        said = [str(s.detail["recovery_to"]) for s in self.signals if s.xid == 154 and "recovery_to" in s.detail]
        return said[-1] if said else None


def group_incidents(signals: Iterable[Signal]) -> list[Incident]:
    """Incidents of ``signals`` in order of their first member; stable for signals of equal time."""
    grouper = IncidentGrouper()
    for signal in sorted(signals, key=lambda s: s.mono):
        grouper.add(signal)
    return grouper.incidents


class IncidentGrouper:
    """The same, one signal at a time; each signal's ``mono`` orders it, and it should not be far behind the last.

    Only fault signals start an incident. Warnings and notes wait for ``PRECURSOR_S`` to become precursors of one, or
    join one that is open.
    """

    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self._open: list[Incident] = []
        self._waiting: list[Signal] = []

    def add(self, signal: Signal) -> Incident | None:
        """Take one signal in; the incident that it now belongs to, or None."""
        if signal.kind in _NEVER_MEMBERS:
            return None
        self._open = [i for i in self._open if signal.mono - i.last <= _OPEN_S]
        found = self._home(signal)
        if found is not None:
            _insert(found, signal)
        elif signal.severity == "fault":
            found = self._start(signal)
        elif signal.severity == "warning":
            self._waiting = [s for s in self._waiting if signal.mono - s.mono <= PRECURSOR_S][-200:]
            self._waiting.append(signal)
        return found

    def _home(self, signal: Signal) -> Incident | None:
        """The open incident that explains ``signal``: of its own GPU if there is one, else the newest."""
        fits = [i for i in self._open if _belongs(signal, i)]
        return max(fits, key=partial(_nearness, signal), default=None)

    def _start(self, signal: Signal) -> Incident:
        early = [s for s in self._waiting if signal.mono - s.mono <= PRECURSOR_S and _same_origin(s, signal)]
        self._waiting = []
        first = min([signal.mono, *(s.mono for s in early)])
        incident = Incident(signal, precursors=early, first=first, last=signal.mono)
        self.incidents.append(incident)
        self._open.append(incident)
        return incident


def _belongs(signal: Signal, incident: Incident) -> bool:
    head = incident.headline
    if not _same_origin(signal, head):
        return False
    when = signal.mono
    if signal.kind in ("hung_task", "soft_lockup"):
        when = max(head.mono, when - float(signal.detail.get("secs", 0)))  # it says how long it has lasted already
    since_head, since_last = when - head.mono, when - incident.last
    same_gpu = head.pci is None or signal.pci is None or head.pci == signal.pci
    if signal.kind == "xid":
        if since_head > AFTERMATH_S:
            return False
        if same_gpu:
            return since_last <= BURST_S or signal.xid in _CLEANUP_XIDS or _rank(head) == _GSP_RANK
        return signal.xid == 154 or (signal.xid in (43, 45) and since_last <= BURST_S)
    if signal.severity == "info" and not same_gpu:
        return False
    if signal.kind in _SPREADING_KINDS:
        return since_head <= AFTERMATH_S
    if signal.kind in _CLEANUP_KINDS:
        return same_gpu and since_head <= AFTERMATH_S
    return same_gpu and since_last <= BURST_S and since_head <= AFTERMATH_S


_GSP_RANK = 4


def _rank(signal: Signal) -> int:
    """How well a signal names the fault; the lowest is the headline, the earlier of equals."""
    if signal.severity != "fault":
        return 9
    if signal.kind == "xid":
        match signal.xid:
            case 13:
                return 1  # a shader exception before an MMU fault is its forerunner
            case 154:
                return 3  # a verdict about another fault
            case 43 | 45:
                return 5  # clean-up
            case _:
                return 0
    if signal.kind in ("gsp_ratelimit", "nvrm_other", "sxid", "bus_lost", "probe_fail"):
        return 2 if signal.kind in _SAME_EVENT_KINDS else _GSP_RANK
    if signal.kind.startswith("aer"):
        return 6
    return 2


def _insert(incident: Incident, signal: Signal) -> None:
    """Add ``signal`` and settle again which member is the headline."""
    incident.first = min(incident.first, signal.mono)
    incident.last = max(incident.last, signal.mono)
    head = incident.headline
    if _rank(signal) < _rank(head):
        early = [*incident.precursors, head, *incident.aftermath]
        incident.headline = signal
        incident.precursors = [s for s in early if s.mono <= signal.mono and s.kind not in _SAME_EVENT_KINDS]
        incident.aftermath = [s for s in early if s.mono > signal.mono or s.kind in _SAME_EVENT_KINDS]
    elif signal.mono < head.mono:
        incident.precursors.append(signal)
    else:
        incident.aftermath.append(signal)


def _nearness(signal: Signal, incident: Incident) -> tuple[bool, float]:
    return incident.headline.pci == signal.pci, incident.last


def _same_origin(one: Signal, other: Signal) -> bool:
    """Kernel's word and injected text are kept apart, and so are boots."""
    boots = one.detail.get("boot_id"), other.detail.get("boot_id")
    return one.injected == other.injected and (None in boots or boots[0] == boots[1])
