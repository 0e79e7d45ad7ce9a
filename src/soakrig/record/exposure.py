"""Exposure, counted while events come in: turns, tokens, and seconds with a turn in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from soakrig.record.events import TurnDone, TurnSent
from soakrig.record.outcome import WORK_DONE

RECENT_TURNS = 512
NEAREST_S = 5.0


@dataclass(slots=True)
class Span:
    """One turn's time in flight; ``end`` is None while it is, and ``ok`` how it ended."""

    conversation: int
    turn: int
    context_tokens: int
    start: float
    end: float | None = None
    ok: bool = False


@dataclass(slots=True)
class Moment:
    """What was in flight at a moment: the oldest turn, all of them, and the load until then."""

    span: Span | None
    exact: bool
    in_flight: list[tuple[int, int]]
    seconds_under_load: float
    spans: list[Span] = field(default_factory=list[Span])

    def settled(self, mono: float, error_s: float) -> Moment:
        """The same, once the ends of its turns are known: an end may be told after a signal that came later."""
        if not self.exact or not self.spans:
            return self
        still = [s for s in self.spans if s.end is None or s.end >= mono - error_s]
        if not still:
            return Moment(self.spans[-1], False, [], self.seconds_under_load, self.spans)
        return Moment(still[0], True, [(s.conversation, s.turn) for s in still], self.seconds_under_load, still)


@dataclass
class ExposureCount:
    """Counts exposure and remembers the last turns' time in flight. Memory does not grow with the run.

    ``close`` stops the count (the engine was found dead): what is sent later is no exposure.
    """

    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    busy_seconds: float = 0.0
    closed: bool = False
    _open: dict[tuple[int, int], Span] = field(default_factory=dict[tuple[int, int], Span])
    _recent: deque[Span] = field(default_factory=lambda: deque[Span](maxlen=RECENT_TURNS))
    _busy_since: float | None = None
    _latest_end: float = 0.0

    def sent(self, event: TurnSent) -> None:
        if not self._open and not self.closed:
            self._busy_since = event.mono
        span = Span(event.conversation, event.turn, event.context_tokens, event.mono)
        self._open[(event.conversation, event.turn)] = span

    def done(self, event: TurnDone) -> None:
        span = self._open.pop((event.conversation, event.turn), None)
        if span is not None:
            span.end, span.ok = event.mono, event.outcome == "ok"
            if event.prompt_tokens:
                span.context_tokens = event.prompt_tokens
            self._recent.append(span)
        self._latest_end = max(self._latest_end, event.mono)  # ends are told late where a question came between
        if not self._open:
            self._stop_busy(self._latest_end)
        if event.outcome in WORK_DONE and event.response_bytes and not self.closed:
            self.turns += 1
            self.prompt_tokens += event.prompt_tokens or 0
            self.output_tokens += event.output_tokens

    def close(self, mono: float) -> None:
        self._stop_busy(mono)
        self.closed = True

    def is_open(self, conversation: int, turn: int) -> bool:
        """Whether this turn is in flight."""
        return (conversation, turn) in self._open

    def unfinished(self) -> list[tuple[int, int]]:
        """Turns sent and never finished."""
        return sorted(self._open)

    def find(self, conversation: int | None, turn: int | None) -> Span | None:
        """The span of a turn, where it is among the recent ones."""
        spans = [*self._recent, *self._open.values()]
        return next((s for s in spans if (s.conversation, s.turn) == (conversation, turn)), None)

    def at(self, mono: float, error_s: float = 0.0) -> Moment:
        """What was in flight at ``mono``, known within ``error_s``; else the turn that ended last before it."""
        known = [*self._recent, *self._open.values()]
        hit = [s for s in known if s.start <= mono + error_s and (s.end is None or s.end >= mono - error_s)]
        inside = [s for s in hit if s.start <= mono and (s.end is None or s.end >= mono)] or _suspects(hit)
        inside.sort(key=lambda s: s.start)
        load = self.busy_seconds
        if self._busy_since is not None:
            load += max(0.0, mono - self._busy_since)
        if inside:
            names = [(s.conversation, s.turn) for s in inside]
            return Moment(inside[0], True, names, load, inside)
        before = [s for s in known if s.end is not None and s.end <= mono and mono - s.end <= NEAREST_S]
        last = max(before, key=lambda s: s.end or 0.0, default=None)
        return Moment(last, False, [], load, [])

    def _stop_busy(self, mono: float) -> None:
        if self._busy_since is not None:
            self.busy_seconds += max(0.0, mono - self._busy_since)
            self._busy_since = None


def _suspects(spans: list[Span]) -> list[Span]:
    """Of turns that may have been in flight: those that did not end ok, if any; and of each conversation the last."""
    bad = [span for span in spans if not span.ok] or spans
    latest: dict[int, Span] = {}
    for span in sorted(bad, key=lambda s: s.start):
        latest[span.conversation] = span
    return list(latest.values())
