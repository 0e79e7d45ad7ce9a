"""Figures of a run over its turns and its time, gathered from events and kept small however long the run is."""

from __future__ import annotations

from dataclasses import dataclass, field

from soakrig.record.events import Event, SampleTaken, TurnDone
from soakrig.record.outcome import MARKS, OutcomeName

MOST_POINTS = 512


@dataclass
class Track:
    """One figure over time: at most 512 points; beyond that neighbours are merged and the larger one is kept, so that
    a peak never vanishes."""

    values: list[float] = field(default_factory=list[float])
    _stride: int = 1
    _held: list[float] = field(default_factory=list[float])

    def add(self, value: float) -> None:
        self._held.append(value)
        if len(self._held) < self._stride:
            return
        self.values.append(max(self._held))
        self._held.clear()
        if len(self.values) >= MOST_POINTS:
            pairs = zip(self.values[::2], self.values[1::2], strict=False)
            self.values = [max(pair) for pair in pairs]
            self._stride *= 2

    def all(self) -> list[float]:
        return [*self.values, max(self._held)] if self._held else self.values


@dataclass
class Series:
    """Feed it events. ``marks``: one character a turn in the order of their end (the newest 4,096); ``tracks``: every
    sampled figure by ``source.name``, and the turns' TTFT and context."""

    marks: list[str] = field(default_factory=list[str])
    marks_dropped: int = 0
    tracks: dict[str, Track] = field(default_factory=dict[str, Track])
    first_time: float | None = None
    last_time: float = 0.0

    def feed(self, event: Event) -> None:
        if self.first_time is None:
            self.first_time = event.time
        self.last_time = event.time
        if isinstance(event, TurnDone):
            self._turn(event)
        elif isinstance(event, SampleTaken):
            for name, value in event.values.items():
                self._track(f"{event.source}.{name}").add(value)

    def _turn(self, event: TurnDone) -> None:
        outcome: OutcomeName = event.outcome
        self.marks.append(MARKS[outcome])
        if len(self.marks) > 2 * 4096:
            self.marks_dropped += len(self.marks) - 4096
            del self.marks[:-4096]
        self._track("turn.context_tokens").add(float(event.context_tokens))
        if event.outcome == "ok" and event.ttft_s is not None:
            self._track("turn.ttft_s").add(event.ttft_s)

    def _track(self, name: str) -> Track:
        return self.tracks.setdefault(name, Track())


BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"


def sparkline(values: list[float], width: int = 48, *, ascii_only: bool = False) -> str:
    """The values as one line of bars; each bar is the largest of its share. Empty without values."""
    if not values:
        return ""
    width = min(width, len(values))
    shares = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    peaks = [max(share) for share in shares]
    low, high = min(peaks), max(peaks)
    bars = ASCII_BLOCKS if ascii_only else BLOCKS
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((peak - low) * scale)] for peak in peaks)
