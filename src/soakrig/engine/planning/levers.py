"""What memory can be traded for: each lever frees bytes, bytes buy slots, slots miss less, and a step gets shorter.

Misses are read off the curve, which flattens: every further slot buys less. The straight line through its start is
given beside it, since that is how such levers are usually priced, and how they are usually overpriced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soakrig.errors import UsageError

from .curve import MissCurves
from .ledger import Ledger
from .quantity import Figure, Kind
from .steptime import StepModel

PER = 1000
"""Slopes are given in hit points for so many slots."""
_HALVED_BY_FP8 = ("bf16", "bfloat16", "fp16", "float16")


@dataclass(frozen=True, slots=True)
class Curve:
    """Misses per step and layer by slots a layer, between measured or replayed sizes in proportion; falling."""

    slots: tuple[float, ...]
    misses: tuple[float, ...]
    kind: Kind

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.slots, self.slots[1:], strict=False))
        falling = all(a >= b >= 0 for a, b in zip(self.misses, self.misses[1:], strict=False))
        if len(self.slots) != len(self.misses) or len(self.slots) < 2 or not (rising and falling):
            raise UsageError(
                f"a curve of {len(self.slots)} slots {list(self.slots)[:6]} and misses {list(self.misses)[:6]}: at "
                "least two points, slots rising and misses not, were expected",
                remedy="give [slots a layer, misses a step and layer] by rising slots",
            )

    @classmethod
    def of(cls, curves: MissCurves) -> Curve:
        """As many slots in each layer of a trace."""
        uniform = curves.uniform()
        return cls(tuple(range(len(uniform))), tuple(float(one) for one in uniform), "derived")

    def at(self, slots: float) -> float:
        """Misses per step and layer. Raises UsageError outside the curve: it is not drawn on."""
        if not self.slots[0] <= slots <= self.slots[-1]:
            raise UsageError(
                f"{slots:.1f} slots a layer; the curve goes from {self.slots[0]:g} to {self.slots[-1]:g}",
                remedy="measure or replay more sizes: a curve is not drawn on beyond its points",
            )
        return float(np.interp(slots, self.slots, self.misses))


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The engine as it runs: ``slots`` in ``layers`` layers, ``misses`` per step and layer as measured, ``accesses``
    routed ids per step and layer, ``tokens`` a step (token/step)."""

    slots: int
    layers: int
    misses: float
    accesses: float
    tokens: Figure

    @property
    def hit(self) -> float:
        """Hits per routed id."""
        return 1 - self.misses / self.accesses

    def rows(self, misses: float | None = None) -> Figure:
        """Missed rows of a step."""
        return Figure.of((self.misses if misses is None else misses) * self.layers, "row/step", "derived")


@dataclass(frozen=True, slots=True)
class Lever:
    """Something that frees ``frees`` bytes. ``scaleless``: slots then cost their weights alone."""

    name: str
    frees: Figure
    scaleless: bool = False


@dataclass(frozen=True, slots=True)
class Priced:
    """One lever: slots gained at the price that then holds, and what the model makes of them on the curve and on the
    line. Times are s/step; gains are shares of throughput."""

    lever: Lever
    slots: float
    slots_at_old_price: float
    misses: float
    step: Figure
    tokens_per_second: Figure
    gain: float
    linear_misses: float
    linear_gain: float
    curve_ended: bool
    """Whether the slots would reach beyond the curve; the misses are then those of its end."""

    def to_json(self) -> dict[str, Any]:
        """Fit for JSON; all but the freed bytes is modelled."""
        return {
            "name": self.lever.name,
            "frees": self.lever.frees.to_json(),
            "slots": self.slots,
            "slots_at_old_price": self.slots_at_old_price,
            "misses_per_step_per_layer": self.misses,
            "step": self.step.to_json(),
            "tokens_per_second": self.tokens_per_second.to_json(),
            "gain": self.gain,
            "linear": {"misses_per_step_per_layer": self.linear_misses, "gain": self.linear_gain},
            "curve_ended": self.curve_ended,
            "kind": "modelled",
        }


def known_levers(ledger: Ledger) -> list[Lever]:
    """What a ledger's own lines offer: KV cache to host memory, KV cache in 8 bits, scales off the device, and the
    residual (which somebody may own)."""
    found: list[Lever] = []
    for pool in ledger.pools:
        if pool.role == "kv":
            found.append(Lever(f"{pool.name} to host memory", pool.amount))
            if pool.dtype in _HALVED_BY_FP8:
                found.append(Lever(f"{pool.name} in fp8", pool.amount / 2))
        elif pool.role == "scales":
            found.append(Lever("scale copies off the device", pool.amount, scaleless=True))
    if ledger.residual.value > 0:
        found.append(Lever("the unattributed rest, if it can be had", ledger.residual))
    return found


def price_levers(
    levers: Sequence[Lever],
    ledger: Ledger,
    now: OperatingPoint,
    model: StepModel,
    curve: Curve,
    slope: float | None = None,
) -> list[Priced]:
    """Each lever alone. Misses are scaled as the curve scales from where the engine is, so that a curve that lies off
    the live figure moves the price by its shape only.

    ``slope``: hit points for 1,000 slots, for the straight line; None: the curve's own where the engine is.
    """
    here = now.slots / now.layers
    at_here = curve.at(here)
    slope = local_slope(curve, now) if slope is None else slope
    before = model.step(now.rows())
    found: list[Priced] = []
    for lever in levers:
        slots = ledger.worth(lever.frees, scales=not lever.scaleless)
        old = ledger.worth(lever.frees)
        more = min(here + slots / now.layers, curve.slots[-1]) if slots > 0 else here
        misses = now.misses * curve.at(more) / at_here if at_here else 0.0
        linear = straight(now, old, slope)
        step = model.step(now.rows(misses))
        found.append(
            Priced(
                lever,
                slots,
                old,
                misses,
                step,
                now.tokens / step,
                before.share(step) - 1,
                linear,
                before.share(model.step(now.rows(linear))) - 1,
                here + slots / now.layers > curve.slots[-1],
            )
        )
    return sorted(found, key=lambda one: -one.gain)


def local_slope(curve: Curve, now: OperatingPoint, reach: float = 4.0) -> float:
    """Hit points that the next 1,000 slots would bring if the curve went on as it does here."""
    here = now.slots / now.layers
    more = min(here + reach, curve.slots[-1])
    if more <= here:
        return 0.0
    per_slot = (curve.at(here) - curve.at(more)) / (more - here) / now.layers
    return 100 * per_slot / now.accesses * PER


def straight(now: OperatingPoint, slots: float, slope: float) -> float:
    """Misses per step and layer after ``slots`` more at ``slope`` hit points for 1,000 of them, never below none."""
    hit = now.hit + slope / 100 * slots / PER
    return now.accesses * max(1 - hit, 0.0)


def ceiling(now: OperatingPoint, model: StepModel) -> tuple[float, Figure]:
    """If every miss were free: throughput over what it is, and tokens a second. No lever of memory reaches beyond."""
    free = model.step(now.rows(0.0))
    return model.step(now.rows()).share(free), now.tokens / free
