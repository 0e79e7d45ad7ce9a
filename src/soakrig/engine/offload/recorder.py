"""Captures the routed ids of every engine step into a fixed buffer on the device, and writes them as trace rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from soakrig.errors import UsageError

from .plan import OffloadPlan
from .trace import BAD_ID, SENTINEL, TraceHeader, TraceWriter


class Recorder:
    """One trace file. ``take`` once a layer in each step, then ``write``: no host sync before that."""

    def __init__(self, plan: OffloadPlan, path: str, max_tokens: int, device: torch.device) -> None:
        try:
            self._writer = TraceWriter(path, TraceHeader.of(plan))
        except OSError as error:
            raise UsageError(
                f"VLLM_MOE_ROUTING_TRACE={path} cannot be written: {error.strerror}",
                remedy="give a file in a folder that can be written to",
            ) from error
        self._ids = torch.full(
            (max_tokens, len(plan.model.layers), plan.model.top_k), SENTINEL, dtype=torch.int16, device=device
        )

    def take(self, place: int, ids: Tensor, experts: int) -> None:
        """Keep the ``ids`` [tokens, k] of the layer at ``place`` among all MoE layers."""
        valid = (ids >= 0) & (ids < experts)
        marked = torch.where((ids == -1) | (ids == experts), SENTINEL, BAD_ID)
        self._ids[: ids.shape[0], place] = torch.where(valid, ids, marked).to(torch.int16)

    def write(self, marks: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Append the step's rows, one for each mark. A layer that was not routed in this step has sentinels."""
        rows = self._ids[: len(marks)]
        try:
            self._writer.append(marks, rows.cpu().numpy())
        finally:
            rows.fill_(SENTINEL)

    def forget(self) -> None:
        """Drop the ids of a step that was not ended."""
        self._ids.fill_(SENTINEL)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
