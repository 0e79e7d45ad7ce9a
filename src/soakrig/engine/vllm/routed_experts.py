"""The layer in the place of vLLM's ``RoutedExperts``: same weights, same kernel, found through the offload core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from soakrig.engine.offload.offloaded_layer import Part

from .host import Host
from .parts import hook

PLANTED_BEYOND = 1000
"""How far past the last expert a planted id points: no sentinel, and no row of any buffer."""
_host: Host | None = None
_layers: dict[str, Any] = {}
"""Layer name -> module, for the custom operator: a compiled graph can only name what it calls."""


def current_host() -> Host:
    """The host of this process. It exists once the plug-in is installed."""
    assert _host is not None
    return _host


class OffloadedExperts:
    """Mixed in before vLLM's class (``RoutedExperts`` or one of its kin)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        host = current_host()
        if host.settings.offloads:
            # Made on the host: all experts at once may not fit the device. vLLM moves one layer at a time to repack it.
            with torch.device("cpu"):
                super().__init__(*args, **kwargs)
        else:
            super().__init__(*args, **kwargs)
        me: Any = self
        me.soakrig_number = host.adopt(me)
        _layers[me.layer_name] = me

    def update_param_tp_status(self) -> None:
        """vLLM calls this once a layer's weights are loaded and repacked."""
        me: Any = self
        above: Any = getattr(super(), "update_param_tp_status", None)
        if above is not None:
            above()
        current_host().take(me.soakrig_number)

    def forward_modular(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's: the weighted sum over each token's experts."""
        me: Any = self
        if torch.compiler.is_compiling():
            # Opaque to the compiler. Shared experts are run by the caller in this mode (no overlap on the CPU).
            return torch.ops.soakrig.routed_experts(x, topk_weights, topk_ids, me.layer_name)
        return self.soakrig_forward(x, topk_weights, topk_ids, *args, **kwargs)

    def soakrig_forward(self, x: Tensor, weights: Tensor, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Through the store: one call of the engine's kernel for each part."""
        me: Any = self
        host = current_host()
        store = host.store
        if store is None:  # before the model is finished nothing is anywhere else
            return self._kernel(x, weights, ids, *args, **kwargs)
        number: int = me.soakrig_number
        if planted := host.planted_rows(number):
            ids = ids.clone()
            ids[planted, 0] = me.local_num_experts + PLANTED_BEYOND
        layer = store.offloaded.get(number)
        if layer is None:
            (part,) = store.parts(number, ids)
            if part.rows is ids:
                return self._kernel(x, weights, ids, *args, **kwargs)
            return self._kernel(x, *_masked(weights, part.rows), *args, **kwargs)
        if ids.numel() > store.plan.staging_rows and x.is_cuda and torch.cuda.is_current_stream_capturing():
            most = store.plan.staging_rows
            raise RuntimeError(
                f"a graph of {len(ids)} tokens routes {ids.numel()} ids, and only {most} can be captured; start with "
                f"--max-cudagraph-capture-size {most // ids.shape[1]}"
            )
        out: Tensor | None = None
        pairs: Tensor | None = None
        for part in store.parts(number, ids):
            host.tensors[number].point_at(part.tensors)
            if part.tokens is None:
                pairs = x.new_zeros((ids.numel(), x.shape[-1])) if pairs is None else pairs
                self._add_pairs(pairs, part, x, weights)
                continue
            rows = part.rows[part.tokens]
            found = self._kernel(x[part.tokens], *_masked(weights[part.tokens], rows), *args, **kwargs)
            if len(rows) == len(ids):
                return found
            out = x.new_zeros((len(ids), *found.shape[1:])) if out is None else out
            out[part.tokens] = found
        if pairs is not None:
            # One reduction over a token's experts, in the wider type, rounded once.
            return pairs.view(*ids.shape, -1).sum(dim=1, dtype=torch.float32).to(x.dtype)
        return torch.zeros_like(x) if out is None else out

    def _kernel(self, x: Tensor, weights: Tensor, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        above: Any = super()
        return above.forward_modular(x, weights, ids, *args, **kwargs)

    def _add_pairs(self, pairs: Tensor, part: Part, x: Tensor, weights: Tensor) -> None:
        """Each pair of the part as a token with one expert: its output, weighted, at its own place."""
        rows = part.rows.reshape(-1)
        places = torch.nonzero(rows >= 0).reshape(-1)
        if not len(places):
            return
        tokens = places // part.rows.shape[1]
        pairs[places] = self._kernel(
            x[tokens].contiguous(), weights.reshape(-1)[places].view(-1, 1), rows[places].view(-1, 1)
        )


def _masked(weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and rows with what is nobody's row at row 0, weighing nothing."""
    nobody = rows < 0
    return weights.masked_fill(nobody, 0), rows.masked_fill(nobody, 0)


def _routed_experts(x: Tensor, weights: Tensor, ids: Tensor, layer: str) -> Tensor:
    return _layers[layer].soakrig_forward(x, weights, ids)


def _routed_experts_shape(x: Tensor, weights: Tensor, ids: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)


def install(host: Host) -> None:
    """Have vLLM make our layer wherever it makes a ``RoutedExperts`` or a class derived from it."""
    global _host
    _host = host
    operator: Any = torch.library.custom_op("soakrig::routed_experts", _routed_experts, mutates_args=())
    operator.register_fake(_routed_experts_shape)
    base = hook("RoutedExperts")
    for one in (base, *_derived(base)):
        _register(one)

    def init_subclass(cls: Any, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        if not issubclass(cls, OffloadedExperts):
            _register(cls)

    # Model files that define kin of their own are imported later.
    base.__init_subclass__ = classmethod(init_subclass)


def _derived(base: Any) -> list[Any]:
    found: list[Any] = []
    for one in base.__subclasses__():
        found += [one, *_derived(one)]
    return found


def _register(base: Any) -> None:
    ours = type(f"Offloaded{base.__name__}", (OffloadedExperts, base), {})
    hook("register_oot")(name=base.__name__)(ours)
