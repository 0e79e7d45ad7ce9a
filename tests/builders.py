"""Events and manifests with everything but the point of the test filled in."""

from __future__ import annotations

from typing import Any

from soakrig.record.events import (
    EngineChecked,
    Event,
    RunEnded,
    SignalSeen,
    SourceChanged,
    TurnDone,
    TurnSent,
)
from soakrig.record.judge import Judge
from soakrig.record.manifest import Manifest, Plan
from soakrig.record.signal import Signal, SourceState

T0 = 1_000.0


def manifest(**fields: Any) -> Manifest:
    base: dict[str, Any] = {
        "run_id": "20261129-150000-agent-loop-0000",
        "created": T0,
        "reproducer": "agent-loop",
        "plan": Plan(conversations=1, turns=fields.pop("turns", 3)),
        "seed": 0,
        "base_url": "http://127.0.0.1:1",
        "model": "m",
    }
    return Manifest(**{**base, **fields})


def sent(turn: int, at: float, conversation: int = 0, context: int = 7000) -> TurnSent:
    return TurnSent(at, at, conversation, turn, context, 30_000)


def done(turn: int, at: float, outcome: Any = "ok", conversation: int = 0, **fields: Any) -> TurnDone:
    base: dict[str, Any] = {
        "status": 200,
        "finish_reason": "stop",
        "duration_s": 1.0,
        "ttft_s": 0.25,
        "first_answer_s": 0.5,
        "last_token_s": 1.0,
        "prompt_tokens": 7000 + 100 * turn,
        "output_tokens": 31,
        "counted": "usage",
        "deltas": 31,
        "response_bytes": 6000,
        "context_tokens": 7000 + 100 * turn,
        "why": "" if outcome == "ok" else f"made {outcome}",
    }
    return TurnDone(at, at, conversation, turn, outcome, **{**base, **fields})


def turns(first: int, last: int, start: float = T0, conversation: int = 0) -> list[Event]:
    """Ok turns of one second each, half a second apart."""
    events: list[Event] = []
    for n in range(first, last + 1):
        at = start + 1.5 * (n - first)
        events += [sent(n, at, conversation), done(n, at + 1.0, conversation=conversation)]
    return events


def source(name: Any, state: Any, detail: str = "", at: float = T0, **fields: Any) -> SourceChanged:
    return SourceChanged(at, at, SourceState(name, state, detail, **fields))


def kernel_live(at: float = T0) -> SourceChanged:
    return source("kernel_log", "live", "kmsg", at)


def xid(number: int, at: float, **fields: Any) -> SignalSeen:
    base: dict[str, Any] = {
        "kind": "xid",
        "source": "kernel_log",
        "severity": "fault",
        "raw": f"NVRM: Xid (PCI:0000:01:00): {number}, pid=77, name=python3, Ch 00000008",
        "time": at,
        "mono": at,
        "xid": number,
        "pci": "0000:01:00",
        "pid": 77,
        "process": "python3",
        "signature": f"Xid {number}",
    }
    return SignalSeen(at, at, Signal(**{**base, **fields}))


def alive(at: float = T0 + 100) -> EngineChecked:
    return EngineChecked(at, at, True, "a canary request was answered")


def dead(at: float, turn: int, conversation: int = 0, how: str = "gone", status: int | None = None) -> EngineChecked:
    return EngineChecked(at, at, False, how, status, conversation, turn)


def ended(at: float = T0 + 101, reason: Any = "completed", detail: str = "") -> RunEnded:
    return RunEnded(at, at, reason, detail)


def judged(*events: Event, **fields: Any) -> Judge:
    judge = Judge(manifest(**fields))
    for event in events:
        judge.feed(event)
    return judge
