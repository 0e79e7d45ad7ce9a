"""What a number of turns without (or with) faults supports: a bound, never "fixed"."""

from __future__ import annotations


def upper_95(faults: int, exposure: int) -> float | None:
    """One-sided 95 % upper bound on the chance of a fault per turn after ``faults`` in ``exposure`` turns.

    Clopper and Pearson (Biometrika 26, 1934): the p at which so few faults have chance 5 %. Without a fault it is
    1 - 0.05**(1/n). None without exposure; 1.0 when every turn faulted.
    """
    if exposure <= 0:
        return None
    if faults <= 0:
        return 1.0 - 0.05 ** (1.0 / exposure)
    if faults >= exposure:
        return 1.0
    from scipy.stats import beta  # slow to import, and most runs have no fault

    return float(beta.ppf(0.95, faults + 1, exposure - faults))


def turns_for(hazard: float, confidence: float = 0.95) -> int:
    """Clean turns after which a per-turn ``hazard`` is excluded at ``confidence``: ln(1-c) / ln(1-h), rounded up."""
    import math

    if not 0.0 < hazard < 1.0 or not 0.0 < confidence < 1.0:
        raise ValueError(f"hazard and confidence lie between 0 and 1, got {hazard} and {confidence}")
    return math.ceil(math.log1p(-confidence) / math.log1p(-hazard))
