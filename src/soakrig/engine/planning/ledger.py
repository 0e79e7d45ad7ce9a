"""Who owns device memory: named pools against capacity and what is free. What nobody owns is a line of its own.

The residual is never spread over the pools and never taken for headroom: it is ``unattributed`` until somebody names
its owner, and what it would be worth in slots says how much that name matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from soakrig.errors import UsageError

from .quantity import Figure, bytes_text, total

UNATTRIBUTED = "unattributed"
_GIB_OVER_GB = 2**30 / 10**9


@dataclass(frozen=True, slots=True)
class Pool:
    """One owner of memory: ``amount`` in bytes, and ``role``: ``kv`` and ``scales`` are what levers may move."""

    name: str
    amount: Figure
    role: str = ""
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class SlotPrice:
    """Bytes of a slot: its ``weights``, and the ``scales`` that lie beside them on the device (0 where they do not).

    A miss fetches both whatever a slot costs: what is moved and what is kept are different figures.
    """

    weights: Figure
    scales: Figure

    @property
    def whole(self) -> Figure:
        """A slot with its scales."""
        return (self.weights + self.scales).labelled("weights and scales")

    @property
    def scale_share(self) -> float:
        """Scales as a part of the whole."""
        return self.scales.share(self.whole)


@dataclass(frozen=True, slots=True)
class Ledger:
    """``pools`` against ``capacity`` and the ``free`` that was read; ``slots`` of ``price``, which are pools too.

    Raises UsageError with all three numbers where pools and free memory sum above the capacity: then a figure is of
    another moment, another card or another unit.
    """

    capacity: Figure
    free: Figure
    pools: tuple[Pool, ...]
    slots: int = 0
    price: SlotPrice | None = None
    layers: int = 0

    def __post_init__(self) -> None:
        excess = self.accounted.value + self.free.value - self.capacity.value
        if excess <= 0:
            return
        text = ", ".join(f"{pool.name} {bytes_text(pool.amount.value)}" for pool in self.pools)
        hint = "take all figures of one launch"
        if self.accounted.value / _GIB_OVER_GB + self.free.value <= self.capacity.value:
            hint += "; read as GB where GiB was written, the pools would fit"
        raise UsageError(
            f"the budget sums above its capacity: {bytes_text(self.accounted.value)} in pools and "
            f"{bytes_text(self.free.value)} free, of {bytes_text(self.capacity.value)}: "
            f"{bytes_text(excess)} too much ({text})",
            remedy=hint,
        )

    @property
    def accounted(self) -> Figure:
        """The sum of the pools."""
        return total(pool.amount for pool in self.pools).labelled("sum of the pools")

    @property
    def residual(self) -> Figure:
        """What is neither free nor in any pool."""
        return (self.capacity - self.accounted - self.free).labelled(UNATTRIBUTED)

    def worth(self, amount: Figure, *, scales: bool = True) -> float:
        """``amount`` in slots, at the price with or without scales. Raises UsageError without a price."""
        if self.price is None:
            raise UsageError("the budget has no price of a slot", remedy="add a [slots] table with weights and scales")
        return amount.share(self.price.whole if scales else self.price.weights)

    def to_json(self) -> dict[str, Any]:
        """Every line with its kind and source; ``unattributed`` with what it is worth."""
        residual: dict[str, Any] = {"amount": self.residual.to_json()}
        slots: dict[str, Any] | None = None
        if self.price is not None:
            residual["slots_with_scales"] = self.worth(self.residual)
            residual["slots_without_scales"] = self.worth(self.residual, scales=False)
            slots = {
                "count": self.slots,
                "weights": self.price.weights.to_json(),
                "scales": self.price.scales.to_json(),
                "whole": self.price.whole.to_json(),
                "scale_share": self.price.scale_share,
            }
        return {
            "capacity": self.capacity.to_json(),
            "free": self.free.to_json(),
            "accounted": self.accounted.to_json(),
            "pools": [{"name": pool.name, "role": pool.role, **pool.amount.to_json()} for pool in self.pools],
            UNATTRIBUTED: residual,
            "slots": slots,
        }


def slot_pools(count: int, price: SlotPrice) -> list[Pool]:
    """The slots as pools of their own: weights and device-side scales apart, since one lever drops the scales."""
    found = [Pool("expert slots: weights", (price.weights * count).labelled(f"{count} x {price.weights.value:,.0f} B"))]
    if price.scales.value:
        amount = (price.scales * count).labelled(f"{count} x {price.scales.value:,.0f} B")
        found.append(Pool("expert slots: scales", amount, "scales"))
    return found


def pinned_bytes(sizes: Sequence[Figure], *, rounded: bool) -> Figure:
    """Host memory of tensors of these sizes: as they are, or each rounded up to a power of two as PyTorch's pinned
    allocator does (pytorch/pytorch#150517)."""
    if not rounded:
        return total(sizes)
    return total(Figure.of(1 << max(int(size.value) - 1, 0).bit_length(), "B", size.kind) for size in sizes)
