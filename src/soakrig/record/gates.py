"""Gates: ``ttft_p99 < 20s``. A figure, a comparison and a limit that the operator set for a run."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from soakrig.errors import UsageError
from soakrig.record.result import GateResult, Result

_FORM = re.compile(r"^\s*([A-Za-z_][\w]*)\s*(<=|>=|<|>)\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|%|tok/s)?\s*$")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _ok_rate(result: Result) -> float | None:
    sent = sum(result.outcomes.values())
    return 100.0 * result.outcomes.get("ok", 0) / sent if sent else None


@dataclass(frozen=True)
class _Figure:
    unit: str  # "s", "tok/s", "%" or "" for a plain number
    read: Callable[[Result], float | None]
    text: str


FIGURES: dict[str, _Figure] = {
    "ttft_p50": _Figure("s", lambda r: r.latency.ttft_s.p50, "time to first token, median"),
    "ttft_p90": _Figure("s", lambda r: r.latency.ttft_s.p90, "time to first token, 90th percentile"),
    "ttft_p99": _Figure("s", lambda r: r.latency.ttft_s.p99, "time to first token, 99th percentile"),
    "first_answer_p50": _Figure("s", lambda r: r.latency.first_answer_s.p50, "the same without reasoning, median"),
    "first_answer_p99": _Figure("s", lambda r: r.latency.first_answer_s.p99, "the same, 99th percentile"),
    "decode_p10": _Figure("tok/s", lambda r: r.latency.decode_tokens_per_s.p10, "decode rate of the slowest tenth"),
    "decode_p50": _Figure("tok/s", lambda r: r.latency.decode_tokens_per_s.p50, "decode rate, median"),
    "throughput": _Figure("tok/s", lambda r: r.latency.throughput_tokens_per_s, "tokens of ok turns over wall time"),
    "ok_rate": _Figure("%", _ok_rate, "ok turns of all turns sent"),
    "turns": _Figure("", lambda r: float(r.exposure.turns), "turns done under watch"),
    "hazard_upper_95": _Figure("", lambda r: r.hazard.upper_95, "bound on the chance of a fault per turn"),
    "tool_lag_max": _Figure("s", lambda r: r.tool.lag_max_s, "longest standstill of the tool itself"),
}


@dataclass(frozen=True)
class Gate:
    """One parsed gate; ``limit`` is in the figure's own unit."""

    text: str
    name: str
    compare: str
    limit: float

    def check(self, result: Result) -> GateResult:
        """Whether it held; a figure that could not be had is neither held nor broken."""
        value = FIGURES[self.name].read(result)
        held = None if value is None else _COMPARE[self.compare](value, self.limit)
        return GateResult(gate=self.text, value=value, held=held)


def parse_gate(text: str) -> Gate:
    """Read one gate. Raises ``UsageError`` with the known figures when it is none."""
    match = _FORM.match(text)
    if match is None:
        raise UsageError(
            f"--gate {text!r} is no gate; expected FIGURE < LIMIT, like 'ttft_p99 < 20s' or 'decode_p50 > 15'",
            remedy=f"Figures: {', '.join(FIGURES)}. Comparisons: < <= > >=.",
        )
    name, compare, number, unit = match.groups()
    figure = FIGURES.get(name)
    if figure is None:
        near = difflib.get_close_matches(name, FIGURES, n=1)
        raise UsageError(
            f"--gate names the figure {name!r}, which does not exist" + (f"; {near[0]!r} was meant?" if near else ""),
            remedy=f"Figures: {', '.join(FIGURES)}.",
        )
    limit = float(number)
    if unit == "ms" and figure.unit == "s":
        limit /= 1000.0
    elif unit is not None and unit != figure.unit:
        raise UsageError(
            f"--gate {text!r}: {name} is measured in {figure.unit or 'a plain number'}, not in {unit}",
            remedy=f"Write '{name} {compare} {number}{figure.unit}'.",
        )
    return Gate(" ".join(text.split()), name, compare, limit)
