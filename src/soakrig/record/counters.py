"""The engine's own token counter against the tokens that came in: what answers has to be what is watched."""

from __future__ import annotations

from dataclasses import dataclass

from soakrig.record.events import SampleTaken, TurnDone

COUNTER = "generation_tokens"
LATE_S = 30.0
SHARE = 0.5


@dataclass
class CounterWatch:
    """Notices ok turns that the engine's counter knows nothing of: a response cache, a proxy that answers for a frozen
    engine, or a metrics page of somebody else.

    ``contradiction`` is set when the counter stood still over two scrapes in a row although a turn with tokens had
    begun and ended between its last movement and the first of the two. A page that is only refreshed late takes it back
    by catching up: within ``LATE_S`` of the first doubt, and by about as many tokens as came in.
    """

    contradiction: str = ""
    _proved: str = ""
    _value: float | None = None
    _since: float = 0.0
    _tokens: int = 0
    _doubt_since: float | None = None

    def turn(self, event: TurnDone) -> None:
        if event.outcome == "ok" and self._value is not None and event.mono - event.duration_s > self._since:
            self._tokens += event.output_tokens

    def sample(self, event: SampleTaken) -> None:
        value = event.values.get(COUNTER) if event.source == "metrics" else None
        if value is None:
            return
        if value != self._value:
            if self.contradiction and not self._caught_up(value, event.mono):
                self._proved = self.contradiction
            self.contradiction = self._proved
            self._value, self._since = value, event.mono
            self._tokens, self._doubt_since = 0, None
            return
        if self._doubt_since is not None and not self._proved:
            self.contradiction = (
                f"the engine's own token counter stood still at {value:g} for {event.mono - self._since:.1f} s while "
                f"{self._tokens} tokens of ok turns came in: what answers is not what /metrics counts"
            )
        if self._tokens and self._doubt_since is None:
            self._doubt_since = event.mono

    def _caught_up(self, value: float, mono: float) -> bool:
        late = self._doubt_since is not None and mono - self._doubt_since >= LATE_S
        return not late and value - (self._value or 0.0) >= SHARE * self._tokens
