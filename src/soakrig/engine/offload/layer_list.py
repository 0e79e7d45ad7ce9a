"""Layer numbers as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable


def layer_list(layers: Iterable[int]) -> str:
    """``0-3, 7 (5 layers)``; ``none`` for no layer."""
    numbers = sorted(set(layers))
    if not numbers:
        return "none"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"{text} ({len(numbers)} layer{'s' if len(numbers) > 1 else ''})"
