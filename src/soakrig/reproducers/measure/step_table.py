"""Where a decode step goes: a torch profiler's trace, summed up by kind of kernel and step.

The trace is Chrome's JSON (``traceEvents`` with ``ph`` X, times in microseconds), as torch.profiler writes it. Steps
are vLLM's annotations ``execute_context_C(T)_generation_G(T)``; those with no context are decode steps.
"""

from __future__ import annotations

import gzip
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from soakrig.errors import RecordError

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
KINDS: Mapping[str, re.Pattern[str]] = {
    "attention": re.compile(r"attn|attention|flash_fwd|mla|sdpa|paged", re.IGNORECASE),
    "experts": re.compile(r"moe|marlin|expert|grouped_?(?:gemm|mm)|topk", re.IGNORECASE),
    "copies and gather": re.compile(r"memcpy|memset|copy_|gather|index_select|_to_copy", re.IGNORECASE),
    "dense GEMM": re.compile(
        r"gemm|gemv|matmul|cutlass|linear|addmm|(?<![a-z])b?mm(?![a-z])|cublas|nvjet", re.IGNORECASE
    ),
}
"""Kind -> names of its kernels or operators; the first that fits counts. Everything else is norm, activation, other."""
OTHER = "norm, activation, other"
_STEP = re.compile(r"execute_context_(?P<context>\d+)\([^)]*\)_generation_(?P<generation>\d+)\(")


@dataclass(frozen=True)
class Span:
    """A piece of work: times in microseconds; ``self_us`` without what is nested in it."""

    name: str
    start: float
    self_us: float


@dataclass(frozen=True)
class Step:
    """One step of the engine, in microseconds. ``decode``: it computed no prompt."""

    start: float
    end: float
    decode: bool


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, gzipped or not. Raises ``RecordError``."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = list(orjson.loads(raw)["traceEvents"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is no trace of a torch profiler: {error}") from error
    return [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]


def step_table(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Median milliseconds of each kind in a decode step, None where the trace has no decode step.

    On a device its kernels and copies count, which may overlap: ``busy_ms`` can exceed ``wall_ms``. Without a device
    the operators' own time counts.
    """
    on_device = any(event.get("cat") in DEVICE for event in events)
    steps = [step for step in _steps(events, on_device) if step.decode]
    if not steps:
        return None
    spans = _device_spans(events) if on_device else _operator_spans(events)
    sums: list[dict[str, float]] = [defaultdict(float) for _ in steps]
    starts = [step.start for step in steps]
    for span in spans:
        place = bisect_right(starts, span.start) - 1
        if place >= 0 and span.start < steps[place].end:
            sums[place][kind_of(span.name)] += span.self_us / 1000
    names = [*KINDS, OTHER]
    medians = {name: float(np.median([one.get(name, 0.0) for one in sums])) for name in names}
    busy = float(np.median([sum(one.values()) for one in sums]))
    return {
        "device": "gpu" if on_device else "cpu",
        "steps": len(steps),
        "wall_ms": float(np.median([(step.end - step.start) / 1000 for step in steps])),
        "busy_ms": busy,
        "rows": [
            {"what": name, "ms": medians[name], "share": medians[name] / busy if busy else None, "kind": "measured"}
            for name in sorted(names, key=lambda name: -medians[name])
        ],
        "kind": "measured",
    }


def kind_of(name: str) -> str:
    """Which row of the table a kernel or operator belongs to."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), OTHER)


def _steps(events: Iterable[dict[str, Any]], on_device: bool) -> list[Step]:
    """Annotated steps in order of time; where a device has its own copy of the annotations, those."""
    found: dict[str, list[Step]] = {"gpu_user_annotation": [], "user_annotation": []}
    for event in events:
        match = _STEP.match(str(event.get("name", "")))
        if match and event.get("cat") in found:
            start = float(event["ts"])
            step = Step(
                start, start + float(event.get("dur", 0.0)), match["context"] == "0" and match["generation"] != "0"
            )
            found[event["cat"]].append(step)
    chosen = found["gpu_user_annotation"] if on_device and found["gpu_user_annotation"] else found["user_annotation"]
    return sorted(chosen, key=lambda step: step.start)


def _device_spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    return [
        Span(str(event["name"]), float(event["ts"]), float(event.get("dur", 0.0)))
        for event in events
        if event.get("cat") in DEVICE
    ]


def _operator_spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Operators with their own time, thread by thread. One inside another belongs to the outer one's kind where that
    has one: ``aten::mm`` within an expert kernel is the expert's."""
    by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread[event.get("pid"), event.get("tid")].append(event)
    spans: list[Span] = []
    for thread in by_thread.values():
        thread.sort(key=lambda event: (float(event["ts"]), -float(event.get("dur", 0.0))))
        open_: list[tuple[float, str, int]] = []  # end, kind's name, place in spans
        for event in thread:
            start, length, name = float(event["ts"]), float(event.get("dur", 0.0)), str(event["name"])
            while open_ and open_[-1][0] <= start:
                open_.pop()
            if open_:
                outer = spans[open_[-1][2]]
                spans[open_[-1][2]] = Span(outer.name, outer.start, outer.self_us - length)
                if kind_of(open_[-1][1]) in ("attention", "experts"):
                    name = open_[-1][1]
            spans.append(Span(name, start, length))
            open_.append((start + length, name, len(spans) - 1))
    return spans
