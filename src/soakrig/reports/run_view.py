"""A run as its reports show it: gathered once from the folder, then drawn by every face."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from soakrig.errors import RecordError
from soakrig.record.corrections import Corrections
from soakrig.record.events import Event, Note, SampleTaken, SignalSeen, TurnDone
from soakrig.record.judge import Judge
from soakrig.record.latency import decode_rate
from soakrig.record.manifest import Manifest
from soakrig.record.result import Fault, Result
from soakrig.record.signal import Signal
from soakrig.record.store import RunReader
from soakrig.reports.run_evidence import Case, read_cases
from soakrig.reports.series import Series

AROUND_S = (5.0, 30.0)
"""Seconds before and after a fault within which signals and evidence are told with it (as ``record.faults`` has it)."""
MOST_SIGNALS = 40
"""Lines told with one fault; the run folder has them all."""
_KEPT = 100_000
"""Points kept of one sampled figure: a day at one a second."""


def _floats() -> array[float]:
    return array("d")


@dataclass
class Points:
    """A figure over the run: seconds since its first event, and the value. Past ``_KEPT`` points every other goes."""

    times: array[float] = field(default_factory=_floats)
    values: array[float] = field(default_factory=_floats)
    _stride: int = 1
    _seen: int = 0

    def add(self, at: float, value: float) -> None:
        self._seen += 1
        if self._seen % self._stride:
            return
        self.times.append(at)
        self.values.append(value)
        if len(self.times) >= _KEPT:
            self.times, self.values, self._stride = self.times[::2], self.values[::2], 2 * self._stride


@dataclass(frozen=True, slots=True)
class ToldFault:
    """A fault with what is told beside it: ``at`` is seconds since the run's first event."""

    number: int
    fault: Fault
    at: float
    signals: list[Signal]
    left_out: int
    cases: list[Case]


@dataclass
class RunView:
    """Everything that a report of one run is made of.

    ``at``: seconds since the first event of each finished turn; ``points``: sampled figures by ``source.name``, and
    ``turn.ttft_s``, ``turn.decode``, ``turn.context_tokens``. ``missing``: what the folder does not hold, in words.
    ``corrections``: what runs with the same settings say against it; whoever has looked beside the folder sets it.
    """

    folder: Path
    manifest: Manifest
    result: Result
    stored: bool
    running: bool
    series: Series
    turns: list[TurnDone]
    at: array[float]
    points: dict[str, Points]
    wall_s: float
    faults: list[ToldFault]
    other_cases: list[Case]
    notes: list[str]
    missing: list[str]
    corrections: Corrections | None = None

    @property
    def simulated(self) -> bool:
        return self.result.simulated or self.manifest.simulated


class _Gathered:
    """Takes a run's events one at a time."""

    def __init__(self, manifest: Manifest) -> None:
        self.judge, self.series = Judge(manifest), Series()
        self.turns: list[TurnDone] = []
        self.at = _floats()
        self.points: dict[str, Points] = {}
        self.signals: list[Signal] = []
        self.notes: list[str] = []
        self.first: float | None = None
        self.last = 0.0

    def feed(self, event: Event) -> None:
        self.judge.feed(event)
        self.series.feed(event)
        self.first = event.mono if self.first is None else self.first
        self.last = max(self.last, event.mono - self.first)
        at = event.mono - self.first
        if isinstance(event, TurnDone):
            self.turns.append(event)
            self.at.append(at)
            figures = (("ttft_s", event.ttft_s), ("decode", decode_rate(event)))
            for name, value in figures if event.outcome == "ok" else ():
                if value is not None:
                    self._add(f"turn.{name}", at, value)
            self._add("turn.context_tokens", at, float(event.context_tokens))
        elif isinstance(event, SampleTaken):
            for name, value in event.values.items():
                self._add(f"{event.source}.{name}", at, value)
        elif isinstance(event, SignalSeen):
            self.signals.append(event.signal)
        elif isinstance(event, Note):
            self.notes.append(event.text)

    def _add(self, name: str, at: float, value: float) -> None:
        self.points.setdefault(name, Points()).add(at, value)


def read_run(folder: Path, *, rejudge: bool = False) -> RunView:
    """The view of a run folder, finished, running or cut off at any byte. ``rejudge``: derive the verdict from the
    events whatever ``result.json`` says. Raises ``RecordError`` where it is no run, or where a line in the midst of its
    events is broken."""
    reader = RunReader(folder)
    gathered, missing = _Gathered(reader.manifest), list[str]()
    try:
        for event in reader.events():
            gathered.feed(event)
    except RecordError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        missing.append(f"the events: {error.message}")
    stored = None if rejudge else _stored(reader, missing)
    running = reader.running()
    if stored is None and not running and not rejudge:
        missing.append("result.json: the run was cut off, so its verdict was derived again from the events")
    result = gathered.judge.result() if stored is None else stored
    cases, unread = read_cases(folder)
    missing += unread
    faults, others = _told(result.faults, gathered.signals, cases, _start(gathered, result))
    return RunView(
        folder=folder,
        manifest=reader.manifest,
        result=result,
        stored=stored is not None,
        running=running,
        series=gathered.series,
        turns=gathered.turns,
        at=gathered.at,
        points=gathered.points,
        wall_s=gathered.last,
        faults=faults,
        other_cases=others,
        notes=gathered.notes,
        missing=missing,
    )


def _stored(reader: RunReader, missing: list[str]) -> Result | None:
    """``result.json``; None where it was cut. One that is whole and no result is refused: it may have been edited."""
    try:
        return reader.stored_result()
    except RecordError as error:
        if not isinstance(error.__cause__, orjson.JSONDecodeError):
            raise
        missing.append(f"result.json: {error.message}; {error.remedy}")
        return None


def _start(gathered: _Gathered, result: Result) -> float:
    """Wall-clock time of the run's first event; the first fault's where there is none."""
    if gathered.series.first_time is not None:
        return gathered.series.first_time
    return result.faults[0].time if result.faults else 0.0


def _told(
    faults: Sequence[Fault], signals: Sequence[Signal], cases: Sequence[Case], start: float
) -> tuple[list[ToldFault], list[Case]]:
    """Each fault with its signals and evidence; evidence that is near none comes back by itself."""
    left = list(cases)
    told: list[ToldFault] = []
    for number, fault in enumerate(faults, 1):
        near = [one for one in signals if _near(one.time, fault.time)]
        own = [case for case in left if case.time is not None and _near(case.time, fault.time)]
        left = [case for case in left if case not in own]
        told.append(
            ToldFault(number, fault, max(0.0, fault.time - start), near[:MOST_SIGNALS], len(near[MOST_SIGNALS:]), own)
        )
    return told, left


def _near(time: float, fault: float) -> bool:
    return -AROUND_S[0] <= time - fault <= AROUND_S[1]


def flat(data: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """Names and values of nested objects, inner ones by their path: ``engine.settings.OMP_NUM_THREADS.value``."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from flat(value, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, data
