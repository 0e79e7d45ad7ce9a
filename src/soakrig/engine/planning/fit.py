"""What a launch takes of host memory, the card, the KV cache and shared memory. The one place for these sums: the
registry's keys, the preflights and ``soak plan fit`` all come here. Nothing of a machine is looked at.

``CPU_OFFLOAD_GB``, ``--cpu-offload-gb`` and ``--kv-offloading-size`` say GB and mean GiB, all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .quantity import Figure, total

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, Placement

OFFLOAD, SLOTS = "CPU_OFFLOAD_GB", "VLLM_MOE_HOT_SLOTS"
SIZING = (OFFLOAD, SLOTS, "VLLM_MOE_DMA_STAGING")
"""The offload variables that decide how many bytes go where; the others say which experts they are."""


@dataclass(frozen=True, slots=True)
class Need:
    """Parts and their sum, all in bytes. Each part's source says what it is."""

    parts: tuple[Figure, ...]

    @property
    def total(self) -> Figure:
        return total(self.parts)

    def to_json(self) -> dict[str, Any]:
        """``total`` and ``parts`` as figures."""
        return {"total": self.total.to_json(), "parts": [part.to_json() for part in self.parts]}


def host_need(offload: Figure, transient: Figure) -> Need:
    """Host memory: what is offloaded stays there, and loading takes more for a while."""
    return Need((offload.labelled("offloaded"), transient.labelled("while it loads")))


def kv_cache(context: int, per_token: int) -> Figure:
    """The KV cache of one full context: ``context`` tokens of ``per_token`` bytes."""
    return (Figure.of(context, "token") * Figure.of(per_token, "B/token")).labelled("KV cache")


def longest_context(cap: int, per_token: int) -> int:
    """Tokens that a KV cache of ``cap`` bytes holds."""
    return cap // per_token


def kv_tier(size_gib: float, chunk: int | None = None) -> Figure:
    """Shared memory of a KV-offload tier of ``--kv-offloading-size`` GiB. ``chunk``: bytes that the tier is cut into;
    vLLM takes whole ones (v1/kv_offload/cpu/spec.py, 0.32), so that its message can name a little less."""
    size = Figure.of(size_gib, "GiB", "derived", "KV-offload tier")
    if not chunk:
        return size
    return Figure.of(int(size.value) // chunk * chunk, "B", "derived", "KV-offload tier in whole chunks")


def share_of_card(capacity: int, utilisation: float) -> float:
    """Bytes that ``gpu_memory_utilization`` asks a card of ``capacity`` bytes for."""
    return capacity * utilisation


def placed(checkpoint: Checkpoint, settings: Mapping[str, str]) -> Placement:
    """Where a checkpoint's bytes go under the offload variables ``settings`` (those of ``SIZING`` count).

    Experts leave layer by layer; a model without routed experts leaves by bytes, whichever they are. Raises UsageError
    for a value that makes no sense, or does not fit the model.
    """
    from soakrig.engine.offload.plan import OffloadPlan
    from soakrig.engine.offload.settings import OffloadSettings

    from .checkpoint import Placement, placement

    read = OffloadSettings.from_environment({name: settings[name] for name in SIZING if name in settings})
    if checkpoint.row_bytes or read.slots_asked:
        return placement(checkpoint, OffloadPlan.build(read, checkpoint.shape()))
    off = min(Figure.of(read.offload_gb or 0, "GiB").value, checkpoint.total)
    nothing = Figure.of(0, "B")
    return Placement(
        Figure.of(off, "B", "derived", "weights off the device"),
        Figure.of(checkpoint.total - off, "B", "derived", "everything else of the checkpoint"),
        nothing, nothing, 0,
    )  # fmt: skip


def card_need(place: Placement, kv: Figure | None) -> Need:
    """Memory of the card by parts, everything of the checkpoint counted. What comes on top (activations, graphs, the
    CUDA context) nobody knows before a launch. ``kv`` None: no cap, and then no part either."""
    parts = [
        (place.resident, "resident weights"),
        (place.slots, "slots"),
        (place.staging, "staging rows"),
        (kv, "KV cache"),
    ]
    return Need(tuple(part.labelled(name) for part, name in parts if part is not None and part.value))
