"""Faults of a run: incidents of the watchers tied to the turn that was in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from soakrig.record.exposure import Moment
from soakrig.record.incident import Incident, group_incidents
from soakrig.record.result import Fault
from soakrig.record.signal import Signal

KEPT_SIGNALS = 5_000
"""Of each severity, so that a flood of warnings pushes no fault out."""
SAME_XID_S = 2.0
BEFORE_S, AFTER_S = 5.0, 30.0


@dataclass
class FaultBook:
    """Keeps the signals that can decide a run, with the moment of each; ``faults`` makes incidents of them.

    An NVML event of the same Xid on the same GPU within 2 s of a kernel-log line is the same event. Fault signals of
    other watchers (process, engine log, metrics) near a kernel incident belong to it; alone, they are faults of their
    own.
    """

    signals: list[Signal] = field(default_factory=list[Signal])
    moments: dict[int, Moment] = field(default_factory=dict[int, Moment])
    kept: dict[str, int] = field(default_factory=dict[str, int])
    dropped: int = 0

    def add(self, signal: Signal, moment: Moment) -> None:
        if signal.severity == "info" and signal.kind != "xid":
            return
        kept = self.kept.get(signal.severity, 0)
        if kept >= KEPT_SIGNALS:
            self.dropped += signal.severity == "fault"
            return
        self.kept[signal.severity] = kept + 1
        self.signals.append(signal)
        self.moments[id(signal)] = moment

    def injected(self) -> list[Signal]:
        """Fault lines that userspace wrote into the kernel log."""
        return [s for s in self.signals if s.injected and s.severity == "fault"]

    def faults(self, *, simulated: bool) -> list[Fault]:
        """Faults in order of time. Injected lines count only where a planted fault was announced."""
        counted = [s for s in self.signals if simulated or not s.injected]
        kernel = [s for s in counted if s.source == "kernel_log"]
        lines: dict[tuple[int | None, str | None], list[float]] = {}
        for line in kernel:
            lines.setdefault((line.xid, line.pci), []).append(line.mono)
        kernel += [
            s
            for s in counted
            if s.source == "nvml"
            and s.kind == "xid"
            and not any(abs(mono - s.mono) <= SAME_XID_S for mono in lines.get((s.xid, s.pci), []))
        ]
        kernel.sort(key=lambda s: s.mono)
        incidents = [i for i in group_incidents(kernel) if i.headline.severity == "fault"]
        found = [self._fault(i.headline, i.signature, _size(i)) for i in incidents]
        times = [(i.headline.mono - BEFORE_S, i.headline.mono + AFTER_S) for i in incidents]
        for signal in counted:
            if signal.source == "kernel_log" or (signal.source == "nvml" and signal.kind == "xid"):
                continue
            if signal.severity != "fault":
                continue
            near = next((n for n, (low, high) in enumerate(times) if low <= signal.mono <= high), None)
            if near is not None:
                found[near].signals += 1
                continue
            name = signal.signature or f"{signal.source}: {signal.kind}"
            found.append(self._fault(signal, name, 1))
            times.append((signal.mono - BEFORE_S, signal.mono + AFTER_S))
        return sorted(found, key=lambda fault: fault.time)

    def _fault(self, headline: Signal, signature: str, signals: int) -> Fault:
        moment = self.moments[id(headline)].settled(headline.mono, headline.error_s)
        span = moment.span
        attribution = "none"
        if span is not None:
            attribution = "nearest" if not moment.exact else "several" if len(moment.in_flight) > 1 else "exact"
        return Fault(
            signature=signature,
            xid=headline.xid,
            pci=headline.pci,
            pid=headline.pid,
            process=headline.process,
            source=headline.source,
            time=headline.time,
            turn=span.turn if span else None,
            conversation=span.conversation if span else None,
            context_tokens=span.context_tokens if span else None,
            seconds_under_load=round(moment.seconds_under_load, 3),
            raw=headline.raw,
            injected=headline.injected,
            attribution=attribution,
            in_flight=moment.in_flight,
            signals=signals,
            advice=str(headline.detail.get("advice", "")),
        )


def _size(incident: Incident) -> int:
    return 1 + len(incident.precursors) + len(incident.aftermath)
