"""Latency of ok turns. Time to first token and decode are kept apart from the first line to the last."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from soakrig.record.events import TurnDone
from soakrig.record.result import Latency, Quantiles, Rates


def _floats() -> array[float]:
    return array("d")


def quantile(values: array[float] | list[float], q: float) -> float | None:
    """Linear interpolation between order statistics (Hyndman and Fan's type 7), None without values."""
    if not values:
        return None
    import numpy as np

    return float(np.quantile(np.asarray(values), q))


def decode_rate(event: TurnDone) -> float | None:
    """Tokens a second after the first: (n - 1) / (last token - first token); None below two tokens."""
    if event.ttft_s is None or event.last_token_s is None or event.output_tokens < 2:
        return None
    span = event.last_token_s - event.ttft_s
    return (event.output_tokens - 1) / span if span > 0 else None


@dataclass
class LatencyCount:
    """Collects figures of ok turns: 24 bytes a turn, so that a soak of a million turns stays small."""

    ttft: array[float] = field(default_factory=_floats)
    answer: array[float] = field(default_factory=_floats)
    decode: array[float] = field(default_factory=_floats)
    ok: int = 0
    left_out: int = 0
    tokens: int = 0
    by_usage: int = 0

    def add(self, event: TurnDone) -> None:
        if event.outcome != "ok":
            self.left_out += 1
            return
        self.ok += 1
        self.tokens += event.output_tokens
        self.by_usage += event.counted == "usage"
        if event.ttft_s is not None:
            self.ttft.append(event.ttft_s)
        if event.first_answer_s is not None:
            self.answer.append(event.first_answer_s)
        rate = decode_rate(event)
        if rate is not None:
            self.decode.append(rate)

    def latency(self, wall_s: float) -> Latency:
        """``wall_s``: from the first request to the end of the last, drain included."""
        counted = "none"
        if self.ok:
            counted = "usage" if self.by_usage == self.ok else "deltas" if self.by_usage == 0 else "mixed"
        return Latency(
            ttft_s=_quantiles(self.ttft),
            first_answer_s=_quantiles(self.answer),
            decode_tokens_per_s=Rates(
                p10=quantile(self.decode, 0.1), p50=quantile(self.decode, 0.5), p90=quantile(self.decode, 0.9)
            ),
            throughput_tokens_per_s=self.tokens / wall_s if self.ok and wall_s > 0 else None,
            turns=self.ok,
            left_out=self.left_out,
            counted=counted,
        )


def _quantiles(values: array[float]) -> Quantiles:
    return Quantiles(p50=quantile(values, 0.5), p90=quantile(values, 0.9), p99=quantile(values, 0.99))
