"""Faults planted into the embedded engine's worker by a test, in the engine's own process.

Python loads this where the folder is on PYTHONPATH, which a test puts there; without ``SOAKRIG_TEST_PLANT`` it does
nothing. ``stale``: one copy of an expert in 500 is left out, so that its row keeps what was there. ``partial_sums``:
each group of a large step is reduced by itself and the rounded sums are added up.
"""

from __future__ import annotations

import os
import sys
from typing import Any

PLANT = os.environ.get("SOAKRIG_TEST_PLANT", "")
EVERY = 500


def plant_stale() -> None:
    import numpy as np

    from soakrig.engine.offload.staging import Staging

    whole, copies = Staging.gather, 0

    def gather(staging: Any, src: Any, dst: Any) -> None:
        nonlocal copies
        before = copies
        places = np.flatnonzero(src >= 0)
        copies += len(places)
        if before // EVERY != copies // EVERY:
            src = src.copy()
            src[places[EVERY - before % EVERY - 1]] = -1
        whole(staging, src, dst)

    Staging.gather = gather  # type: ignore[method-assign]


def plant_partial_sums() -> None:
    import torch

    from soakrig.engine.embedded import experts

    whole = experts.by_expert

    def partial_sums(parts: Any, hidden: Any, weights: Any) -> Any:
        total = torch.zeros_like(hidden)
        for part in parts:
            total += whole([part], hidden, weights)
        return total

    experts.by_expert = partial_sums


if PLANT and "soakrig.engine.embedded.worker" in sys.orig_argv:
    {"stale": plant_stale, "partial_sums": plant_partial_sums}[PLANT]()
