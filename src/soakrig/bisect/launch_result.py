"""What one launch of an arm came to, read from its run's result: faulted, clean or void, and by which signature."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from soakrig.bisect.run_states import RunResult
from soakrig.record.finding import finding_signature
from soakrig.record.outcome import OUTCOMES, OutcomeName
from soakrig.record.result import Fault, Result

Unit = Literal["turns", "output_tokens"]
"""What exposure is counted in."""
_DEVICE = ("kernel_log", "nvml")
_PROCESS = ("process", "liveness")
_NO_FAULT = ("ok", "aborted", "post_mortem")


@dataclass(frozen=True)
class LaunchResult:
    """``exposure``: until the fault, the faulting turn included, or until the end; at most the launch's cap.
    ``signature``: of its fault, None without one. ``reason``: why it is void, interrupted, or the host lost."""

    result: RunResult
    exposure: float = 0.0
    signature: str | None = None
    reason: str = ""


def void(reason: str) -> LaunchResult:
    """A launch that says nothing, with the first line of why."""
    return LaunchResult("void", reason=reason.strip().split("\n", 1)[0] or "no reason was given")


def turn_signature(outcome: str) -> str:
    """Signature of a fault that shows in a turn alone, with an engine that lives: ``turn error_frame``."""
    return f"turn {outcome}"


def read_result(result: Result, unit: Unit, cap: float, tolerated: Collection[OutcomeName] = ()) -> LaunchResult:
    """A fault makes it faulted; without one it is clean only where everything was seen and done, else void.

    ``tolerated``: outcomes of turns that are no fault here.
    """
    sent = sum(n for name, n in result.outcomes.items() if name not in ("post_mortem", "aborted"))
    done = float(sent) if unit == "turns" else float(result.exposure.output_tokens)
    signature = signature_of(result, tolerated)
    if signature is not None:
        if not sent:
            return void(f"{signature} before the first turn was over")
        # A token at least: the fault may come before the first of them.
        return LaunchResult("faulted", min(max(done, 1.0), cap), signature)
    if result.verdict == "inconclusive" or result.unknown:
        return void("; ".join(result.unknown or result.reasons) or "the run was inconclusive")
    if done <= 0:
        return void(f"{sent} turns without a token: nothing to count as clean")
    return LaunchResult("clean", min(done, cap))


def signature_of(result: Result, tolerated: Collection[OutcomeName] = ()) -> str | None:
    """One name for a run's fault, the same for the same fault; None without one.

    The first fault of the device, else how the engine ended, else another watcher's, else the outcome of a turn. What
    the watchers of a dying engine say first is a race, so it does not name the fault. A finding
    names what nothing else shows.
    """
    device = _first(result.faults, _DEVICE)
    if device is not None:
        return device.signature
    if result.engine.alive is False or _first(result.faults, _PROCESS) is not None:
        status = result.engine.exit_status
        if status is None:
            return "engine death, no answer" if result.engine.alive is False else "engine process died"
        return f"engine death, exit status {status}" if status >= 0 else f"engine death, signal {-status}"
    if result.faults:
        return result.faults[0].signature
    if result.offload is not None and result.offload.bad_ids:
        return "expert id out of range"
    bad = (name for name in OUTCOMES if result.outcomes.get(name) and name not in (*_NO_FAULT, *tolerated))
    turn = next((turn_signature(name) for name in bad), None)
    found = (finding_signature(one.name) for one in result.findings if one.says == "fault")
    return turn or next(found, None)


def told_by_device(result: Result) -> bool:
    """Whether a run's fault has the name of a device's fault: no later word of a watcher would change it."""
    return _first(result.faults, _DEVICE) is not None


def _first(faults: list[Fault], sources: tuple[str, ...]) -> Fault | None:
    return next((fault for fault in faults if fault.source in sources), None)
