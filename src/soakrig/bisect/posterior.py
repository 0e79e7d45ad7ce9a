"""How probable it is that an arm lowers the hazard by a factor: one shared hazard of the control, one ratio an arm.

It chooses the next arm and says when an arm is settled; no arm is cleared by it alone, since it needs a prior.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_HAZARDS = np.geomspace(0.03, 30.0, 61)
_RATIOS = np.concatenate(([0.0], np.geomspace(1 / 64, 4.0, 33), [1.0]))

_RATES = _HAZARDS[None, :, None] * _RATIOS[None, None, :]
_LOG_RATES = np.log(np.maximum(_RATES, 1e-290))


@dataclass(frozen=True)
class Prior:
    """What is believed of a ratio before a run: ``none`` (exactly 1), ``immune`` (exactly 0), the rest spread evenly
    over its logarithm from 1/64 to 4."""

    none: float = 0.6
    immune: float = 0.1

    def weights(self) -> NDArray[np.float64]:
        """Weight of each ratio of the grid."""
        spread = np.full(_RATIOS.size, (1.0 - self.none - self.immune) / (_RATIOS.size - 2))
        spread[0], spread[-1] = self.immune, self.none
        return spread


DEFAULT_PRIOR = Prior()


@dataclass(frozen=True)
class RatioPosterior:
    """Chance of each ratio of the grid for one arm."""

    weights: NDArray[np.float64]

    def at_least(self, factor: float) -> float:
        """P(the arm's hazard is at least ``factor`` times lower than the control's)."""
        low = 1.0 / factor + 1e-12 >= _RATIOS
        low[-1] = False  # the spike at 1 is no reduction, not even for a factor of 1
        return float(self.weights[low].sum())


def ratio_posteriors(
    control: Mapping[str, tuple[int, float]],
    arms: Mapping[str, Mapping[str, tuple[int, float]]],
    *,
    prior: Prior = DEFAULT_PRIOR,
) -> dict[str, RatioPosterior]:
    """What is known of each arm's ratio, given the faults and exposures of the control and of every arm.

    ``control``: faults and exposure on the clock by stratum; ``arms``: the same by arm. The control's hazard of each
    stratum runs over a grid around its estimate (even prior on its logarithm) and is shared by the arms of that
    stratum, so that faults of one arm sharpen what is known of the others. With several strata an arm's ratio is
    shared between them; what other arms say of a stratum's hazard is then taken stratum by stratum.
    """
    names = list(arms)
    if not names:
        return {}
    weights = prior.weights()
    likelihood = np.zeros((len(names), _RATIOS.size))
    for stratum, (control_faults, control_exposure) in control.items():
        seen = np.array([arms[name].get(stratum, (0, 0.0)) for name in names], dtype=np.float64)
        unit = control_exposure / control_faults if control_faults and control_exposure else 1.0
        faults, exposure = seen[:, 0, None, None], seen[:, 1, None, None] / unit
        log_arm = _log_rates(faults) - _RATES * exposure  # arm x hazard x ratio
        arm = np.exp(log_arm - log_arm.max(axis=(1, 2), keepdims=True))
        log_marginal = np.log(arm @ weights + 1e-300)
        log_shared = control_faults * np.log(_HAZARDS) - control_exposure / unit * _HAZARDS + log_marginal.sum(axis=0)
        log_others = log_shared[None, :] - log_marginal
        others = np.exp(log_others - log_others.max(axis=1, keepdims=True))
        likelihood += np.log(np.matmul(others[:, None, :], arm)[:, 0, :] + 1e-300)
    chance = weights * np.exp(likelihood - likelihood.max(axis=1, keepdims=True))
    chance /= chance.sum(axis=1, keepdims=True)
    return {name: RatioPosterior(row) for name, row in zip(names, chance, strict=True)}


def _log_rates(faults: NDArray[np.float64]) -> NDArray[np.float64]:
    """faults x log(rate), 0 where there is no fault even at rate 0."""
    return np.where(faults > 0, faults * _LOG_RATES, 0.0)
