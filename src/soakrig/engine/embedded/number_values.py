"""Numbers that satisfy a JSON schema's bounds: a handful of candidates for the model to choose from."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

CANDIDATES = 6
SPAN = 100
"""Width of the range where the schema bounds only one side, or none."""


def integers(schema: Mapping[str, Any], rng: random.Random) -> list[int]:
    """Up to ``CANDIDATES`` integers within the schema's bounds and ``multipleOf``; never empty.

    Where the bounds leave no integer at all, the lower bound's own is returned: a schema that nothing satisfies.
    """
    low, high = _bounds(schema)
    first = math.floor(low) + 1 if _exclusive(schema, "exclusiveMinimum", low) else math.ceil(low)
    last = math.ceil(high) - 1 if _exclusive(schema, "exclusiveMaximum", high) else math.floor(high)
    step = schema.get("multipleOf")
    unit = int(step) if isinstance(step, int | float) and step >= 1 and float(step).is_integer() else 1
    start = math.ceil(first / unit)
    stop = math.floor(last / unit)
    if stop < start:
        return [first]
    return list(dict.fromkeys(unit * rng.randint(start, stop) for _ in range(CANDIDATES)))


def numbers(schema: Mapping[str, Any], rng: random.Random) -> list[float]:
    """Up to ``CANDIDATES`` numbers within the schema's bounds, two decimals where they fit; never empty."""
    step = schema.get("multipleOf")
    low, high = _bounds(schema)
    if isinstance(step, int | float) and step > 0:
        start, stop = math.ceil(low / step), math.floor(high / step)
        if _exclusive(schema, "exclusiveMinimum", start * step):
            start += 1
        if _exclusive(schema, "exclusiveMaximum", stop * step):
            stop -= 1
        return list(dict.fromkeys(step * rng.randint(start, max(start, stop)) for _ in range(CANDIDATES)))
    found: list[float] = []
    for _ in range(CANDIDATES):
        value = round(rng.uniform(low, high), 2)
        inside = low <= value <= high
        touching = _exclusive(schema, "exclusiveMinimum", value) or _exclusive(schema, "exclusiveMaximum", value)
        found.append(value if inside and not touching else (low + high) / 2)
    return list(dict.fromkeys(found))


def _bounds(schema: Mapping[str, Any]) -> tuple[float, float]:
    lows = [schema[key] for key in ("minimum", "exclusiveMinimum") if _is_number(schema.get(key))]
    highs = [schema[key] for key in ("maximum", "exclusiveMaximum") if _is_number(schema.get(key))]
    if lows and highs:
        return max(lows), min(highs)
    if lows:
        return max(lows), max(lows) + SPAN
    if highs:
        return min(min(highs), 0), min(highs)
    return 0, SPAN


def _exclusive(schema: Mapping[str, Any], key: str, value: float) -> bool:
    return _is_number(schema.get(key)) and schema[key] == value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
