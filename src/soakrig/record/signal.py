"""A signal: something a watcher saw. And the state of the source that it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SourceName = Literal["kernel_log", "nvml", "process", "engine_log", "metrics"]
SOURCE_NAMES: tuple[SourceName, ...] = ("kernel_log", "nvml", "process", "engine_log", "metrics")

Severity = Literal["fault", "warning", "info"]
"""fault: fails a run. warning: shown, does not decide. info: kept for the timeline."""


@dataclass(slots=True)
class Signal:
    """One thing that one watcher saw.

    ``kind`` is a short name (``xid``, ``sxid``, ``bus_lost``, ``oom_kill``, ``process_exit``, ``death_line`` ...).
    ``time`` is seconds since the epoch and ``mono`` the monotonic clock, both of the moment meant by the source where
    it says one (else of the reading); ``error_s`` bounds how wrong they may be. Fields that the source does not carry
    stay None. ``detail`` holds what only this kind has.
    """

    kind: str
    source: SourceName
    severity: Severity
    raw: str
    time: float = 0.0
    mono: float = 0.0
    error_s: float = 0.0
    xid: int | None = None
    pci: str | None = None
    pid: int | None = None
    process: str | None = None
    engine: str | None = None
    client: str | None = None
    fault_type: str | None = None
    access: str | None = None
    address: str | None = None
    injected: bool = False
    signature: str | None = None
    detail: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class SourceState:
    """How well a source could be watched.

    ``live``: seen for the whole window. ``partial``: seen with gaps, or without a proof that there were none.
    ``absent``: not seen. ``detail`` says why and how to allow it; ``lost`` counts records known to be missing.
    ``untrusted`` is set when the watcher itself failed or contradicts what was seen: any run is then inconclusive.
    """

    name: SourceName
    state: Literal["live", "partial", "absent"]
    detail: str = ""
    lost: int = 0
    untrusted: bool = False
