"""Whether the control itself changed in the course of a campaign."""

from __future__ import annotations

from scipy.special import bdtr, bdtrc

from soakrig.bisect.evidence import Evidence


def drift_p(evidence: Evidence) -> float | None:
    """Two-sided chance of so different a first and second half of the control's runs if its hazard stood still.

    The exact conditional test of both halves, on the control's clock, strata together; the smaller tail is doubled.
    None with fewer than two control runs or without a fault.
    """
    first = second = 0
    first_exposure = second_exposure = 0.0
    for stratum, clock in evidence.clocks.items():
        runs = [run for run in evidence.counted(evidence.control) if run.stratum == stratum]
        half = len(runs) // 2
        for place, run in enumerate(runs):
            fault = run.signature is not None
            if place < half:
                first, first_exposure = first + fault, first_exposure + clock.at(run.exposure)
            else:
                second, second_exposure = second + fault, second_exposure + clock.at(run.exposure)
    n, whole = first + second, first_exposure + second_exposure
    if n == 0 or first_exposure == 0.0 or second_exposure == 0.0:
        return None
    share = first_exposure / whole
    few = float(bdtr(first, n, share))
    many = float(bdtrc(first - 1, n, share)) if first else 1.0
    return min(1.0, 2.0 * min(few, many))
