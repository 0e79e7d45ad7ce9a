"""The NVML watcher: GPU figures, Xid events, ECC, recovery action, read by a child process that may hang.

NVML is the second witness beside the kernel log: it has no pid, no text and no time of an event, and some Xids (79,
119, 120) never reach it. A child that misses its deadline is killed and is itself a finding; it is started again a few
times only, and not at all where even SIGKILL does not end it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soakrig.clock import Clock
from soakrig.errors import WatcherError
from soakrig.record.signal import Severity, Signal, SourceName, SourceState
from soakrig.soak.watch import proc
from soakrig.soak.watch.nvml_child import UNKNOWN_XID
from soakrig.soak.watch.nvml_session import NvmlSession
from soakrig.soak.watch.watcher import Sample, Seen
from soakrig.soak.watch.xid_catalogue import severity_of

RECOVERY_ACTIONS = {
    1: "GPU reset", 2: "node reboot", 3: "drain P2P", 4: "drain and reset", 5: "recover IMEX domain", 6: "bus reset",
    7: "system reboot",
}  # fmt: skip
"""NVML_GPU_RECOVERY_ACTION_* of nvml.h; 0 is none."""
THROTTLES = {0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
             0x80: "hardware power brake"}  # fmt: skip
"""Bits of nvmlClocksEventReasons that mean trouble; a power cap (0x4) and idling (0x1) do not."""
PHANTOM_MIB, PHANTOM_POLLS = 512.0, 3
_UVM = "/dev/nvidia-uvm"
_MIB = 1 << 20


def phantom_vram(used_mib: float, process_sum_mib: float | None, baseline_mib: float) -> float | None:
    """MiB of device memory in use that no process accounts for, beyond what the driver held at the start.

    None where a process's share is not known (NVML leaves it out for some): then nothing can be said. Never negative.
    """
    if process_sum_mib is None:
        return None
    return max(0.0, used_mib - process_sum_mib - baseline_mib)


@dataclass(slots=True)
class _Gpu:
    """What was last known of one GPU."""

    baseline_mib: float | None = None
    phantom_polls: int = 0
    told: set[str] = field(default_factory=set[str])
    last: dict[str, Any] = field(default_factory=dict[str, Any])


class NvmlWatcher:
    """Watches every GPU that NVML shows.

    Samples, over all GPUs: ``vram_used_mib``, ``vram_total_mib``, ``power_w`` (sums), ``gpu_util_percent``,
    ``temperature_c``, ``clocks_reasons`` (largest; a bit mask for one GPU), ``ecc_corrected``, ``ecc_uncorrected``
    (sums), ``vram_phantom_mib``; with several GPUs each also as ``gpu0.NAME``. Signals: ``xid``, other NVML events by
    their name, ``gpu_lost``, ``reset_required``, ``recovery_action``, ``ecc_uncorrected`` (faults),
    ``ecc_corrected``, ``throttle``, ``phantom_vram``, ``nvml_hung``, ``nvml_died`` (warnings).

    ``deadline`` and ``open_deadline`` are seconds for one answer; ``max_restarts`` counts over the whole run. ``env``
    is the child's environment, this process's own where None.
    """

    source: SourceName = "nvml"

    def __init__(
        self,
        clock: Clock,
        *,
        interval: float = 1.0,
        deadline: float = 5.0,
        open_deadline: float = 20.0,
        max_restarts: int = 2,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.interval = interval
        self._clock, self._deadline, self._open_deadline = clock, deadline, open_deadline
        self._restarts_left, self._env = max_restarts, env
        self._session: NvmlSession | None = None
        self._gpus: dict[str, _Gpu] = {}
        self._given_up = False
        self._lost_polls = 0
        self._signals: list[Signal] = []

    def open(self) -> SourceState:
        """Start the child. Raises WatcherError, whose text is a plain note, where there is no NVML or no GPU."""
        session = self._start()
        answer = session.answer(self._open_deadline)
        if answer is None:
            return self._no_answer(session)
        if (reason := _why_absent(answer)) is not None:
            self.close()
            raise WatcherError(reason)
        return self._opened(answer["ok"])

    def poll(self) -> Seen:
        """Ask for figures and events; waits for at most ``interval`` seconds, and goes on waiting at the next poll."""
        sample: Sample | None = None
        state: SourceState | None = None
        if not self._given_up:
            session = self._session or self._start()
            if session.op is None:
                session.ask("poll", self._deadline)
            op = session.op
            answer = session.answer(self.interval)
            if answer is None:
                state = self._no_answer(session) if session.overdue() else None
            elif op == "open":
                reason = _why_absent(answer)
                state = self._opened(answer["ok"]) if reason is None else self._end(f"after a restart: {reason}")
            elif "ok" in answer:
                sample = self._take(answer["ok"])
            else:
                state = self._partial(f"NVML gave no figures: {answer.get('failed') or answer.get('absent')}")
        signals, self._signals = self._signals, []
        return Seen(signals, sample, state)

    def close(self) -> None:
        """End the child; one that cannot be ended is left behind."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _start(self) -> NvmlSession:
        self._session = NvmlSession(self._clock, self._env)
        self._session.ask("open", self._open_deadline)
        return self._session

    def _no_answer(self, session: NvmlSession) -> SourceState:
        """The child hangs or died: tell, kill, and decide whether another one may try."""
        silence, self._session = session.give_up(), None
        self._lost_polls += 1
        detail: dict[str, Any] = {"op": silence.op, "seconds": silence.seconds, "restarts_left": self._restarts_left}
        if silence.exit_status is None:
            text = f"NVML did not answer ({silence.op}) for {silence.seconds:g} s; "
            text += f"the process {session.pid} that asked it was in state {silence.threads or 'unknown'}"
            text += "" if silence.ended else ", and SIGKILL does not end it"
            self._tell("nvml_hung", "warning", text, **detail, killed=silence.ended)
        else:
            text = f"the process that reads NVML ended by itself ({silence.op}), exit status {silence.exit_status}"
            self._tell("nvml_died", "warning", text, **detail, exit_status=silence.exit_status)
        if not silence.ended or self._restarts_left == 0:
            return self._end(f"{text}; it is not asked again")
        self._restarts_left -= 1
        return self._partial(text)

    def _end(self, text: str) -> SourceState:
        self.close()
        self._given_up = True
        return self._partial(text)

    def _partial(self, text: str) -> SourceState:
        return SourceState("nvml", "partial", text, lost=self._lost_polls)

    # What it answers

    def _opened(self, answer: dict[str, Any]) -> SourceState:
        shown = ", ".join(f"{gpu['name']} at {gpu['pci']}" for gpu in answer["gpus"])
        notes = [*answer["notes"], *([f"{self._lost_polls} times without an answer"] if self._lost_polls else [])]
        detail = "; ".join([f"driver {answer['driver']}: {shown}", *notes])
        return SourceState("nvml", "partial" if notes else "live", detail, lost=self._lost_polls)

    def _take(self, answer: dict[str, Any]) -> Sample:
        for event in answer["events"]:
            self._event(event)
        figures: list[tuple[int, Sample]] = []
        for gpu in answer["gpus"]:
            known = self._gpus.setdefault(gpu.get("uuid") or str(gpu["index"]), _Gpu())
            self._compare(gpu, known)
            figures.append((gpu["index"], self._figures(gpu, known)))
            known.last = gpu
        return _combine(figures)

    def _event(self, event: dict[str, Any]) -> None:
        kind, pci = event["kind"], event.get("pci")
        detail = {name: event[name] for name in ("gpuInstanceId", "computeInstanceId") if name in event}
        if kind == "error":
            lost = event["code"] in (15, 16)
            self._tell("nvml_events_lost", "warning", f"waiting for NVML events failed: {event['text']}", gpu_lost=lost)
        elif kind == "xid":
            number = int(event["data"])
            unknown = number == UNKNOWN_XID
            what = "an Xid whose number NVML does not know (999)" if unknown else f"Xid {number}"
            signal = self._tell("xid", "fault" if unknown else severity_of(number), f"NVML event: {what} on {pci}",
                                 pci=pci, **detail)  # fmt: skip
            signal.xid = None if unknown else number
            signal.signature = "Xid of unknown number" if unknown else f"Xid {number}"
        else:
            self._tell(kind, "fault", f"NVML event: {kind} on {pci}, data {event['data']}", pci=pci, **detail)

    def _compare(self, gpu: dict[str, Any], known: _Gpu) -> None:
        """Tell what changed against the last reading, each once an episode."""
        pci, last = gpu.get("pci"), known.last
        failed = gpu.get("failed")
        if failed and "failed" not in known.told:
            kind = "gpu_lost" if failed["code"] == 15 else "reset_required"
            self._tell(kind, "fault", f"GPU {gpu['index']} at {pci}: {failed['text']}", pci=pci)
        _mark(known.told, "failed", on=bool(failed))
        action = gpu.get("recovery_action") or 0
        if action and action != (last.get("recovery_action") or 0):
            name = RECOVERY_ACTIONS.get(action, f"action {action}")
            weight: Severity = "fault" if last else "warning"  # at the first look it is older than this run
            text = f"GPU {gpu['index']} at {pci} asks for: {name}"
            self._tell("recovery_action", weight, text, pci=pci, action=action, name=name)
        errors: tuple[tuple[str, Severity], ...] = (("ecc_uncorrected", "fault"), ("ecc_corrected", "warning"))
        for name, severity in errors:
            before, now = last.get(name), gpu.get(name)
            if before is not None and now is not None and now > before:
                text = f"GPU {gpu['index']} at {pci}: {name.replace('_', ' ')} errors {before} -> {now}"
                self._tell(name, severity, text, pci=pci, before=before, now=now)
        for bit, name in THROTTLES.items():
            on = bool((gpu.get("clocks_reasons") or 0) & bit)
            if on and name not in known.told:
                self._tell(
                    "throttle", "warning", f"GPU {gpu['index']} at {pci} is slowed: {name}", pci=pci, reason=name
                )
            _mark(known.told, name, on=on)

    def _figures(self, gpu: dict[str, Any], known: _Gpu) -> Sample:
        names = ("power_w", "temperature_c", "clocks_reasons", "ecc_corrected", "ecc_uncorrected")
        found: Sample = {name: float(gpu[name]) for name in names if gpu.get(name) is not None}
        if gpu.get("util_percent") is not None:
            found["gpu_util_percent"] = float(gpu["util_percent"])
        if gpu.get("memory"):
            used, total = (value / _MIB for value in gpu["memory"])
            found |= {"vram_used_mib": used, "vram_total_mib": total}
            self._phantom(gpu, known, used, found)
        return found

    def _phantom(self, gpu: dict[str, Any], known: _Gpu, used: float, found: Sample) -> None:
        rows = gpu.get("processes")
        if rows is None:
            return
        shares = [share for _, share in rows]
        held = None if None in shares else sum(shares) / _MIB
        if known.baseline_mib is None:
            known.baseline_mib = None if held is None else max(0.0, used - held)
            return
        phantom = phantom_vram(used, held, known.baseline_mib)
        if phantom is None:
            return
        found["vram_phantom_mib"] = phantom
        known.phantom_polls = known.phantom_polls + 1 if phantom > PHANTOM_MIB else 0
        if known.phantom_polls == PHANTOM_POLLS and not proc.device_holders(_UVM):
            # Inside a container NVML may hide processes; whoever uses CUDA still has this device open.
            text = f"GPU {gpu['index']}: {phantom:.0f} MiB are in use that no process holds"
            self._tell("phantom_vram", "warning", text, pci=gpu.get("pci"), mib=round(phantom, 1))

    def _tell(self, kind: str, severity: Severity, text: str, *, pci: str | None = None, **detail: Any) -> Signal:
        # An event happened at some time since the last poll; NVML does not say when.
        found = Signal(
            kind, "nvml", severity, text, time=self._clock.time(), mono=self._clock.monotonic(),
            error_s=self.interval, pci=pci, detail=detail,
        )  # fmt: skip
        self._signals.append(found)
        return found


def _why_absent(answer: dict[str, Any]) -> str | None:
    if "ok" not in answer:
        return f"no NVML here: {answer.get('absent', 'no reason given')}"
    if not answer["ok"]["gpus"]:
        return "; ".join(["no NVML here: it shows no GPU", *answer["ok"]["notes"]])
    return None


def _mark(told: set[str], name: str, *, on: bool) -> None:
    told.add(name) if on else told.discard(name)


def _combine(figures: Sequence[tuple[int, Sample]]) -> Sample:
    largest = {"gpu_util_percent", "temperature_c", "clocks_reasons"}
    total: Sample = {}
    for index, one in figures:
        for name, value in one.items():
            total[name] = max(total.get(name, 0.0), value) if name in largest else total.get(name, 0.0) + value
            if len(figures) > 1:
                total[f"gpu{index}.{name}"] = value
    return total
