"""One vLLM worker's side of the offload core: collects the MoE layers as they load, then steps the store with them."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from soakrig.engine.embedded.plant import hold
from soakrig.engine.offload.bank import Bank, row_bytes
from soakrig.engine.offload.core import ExpertStore
from soakrig.engine.offload.counters import WINDOW_STEPS, History
from soakrig.engine.offload.host_memory import HostMemory
from soakrig.engine.offload.metrics import window_report
from soakrig.engine.offload.plan import GIB, STAGING_ROWS, LayerShape, ModelShape, OffloadPlan
from soakrig.engine.offload.trace import DECODE, PREFILL
from soakrig.errors import EngineStartError, UsageError

from .expert_tensors import ExpertTensors, expert_tensors
from .planted import WorkerPlant
from .settings import VllmSettings

_log = logging.getLogger("vllm.soakrig")
_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


Scheduled = tuple[str, int, bool]
"""Of a step: a request, its tokens, whether they are decode; in the order of the batch."""


Written = tuple[int, tuple[list[int], ...]]
"""Of a request in a step: tokens that lay before it, and its blocks of the key/value cache, group by group."""
FLUSH_S = 5.0
"""How old a profile and a trace on disk get under load; an idle engine writes them at once."""


class Host:
    """The MoE layers of one model in one worker process.

    ``adopt`` when a layer is made, ``take`` once its weights are in the engine's own final layout, ``finish`` when the
    model is loaded and before memory is profiled; then steps.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self.settings = settings
        self.store: ExpertStore | None = None
        self.history = History(0)
        self._addresses: dict[str, int] = {}
        self.modules: dict[int, Any] = {}
        self._flushed = self._reported = 0
        self._flush_at = 0.0
        self.bad: dict[str, Written] = {}
        """Requests to fail that no model output has carried yet."""
        self.tensors: dict[int, ExpertTensors] = {}
        self._banks: dict[int, Bank] = {}
        self._off_bytes = 0
        self._serving = False
        plant = settings.plant
        self.plant = WorkerPlant(plant, holds=hold(settings, plant.when)) if plant is not None else None
        self.scheduled: Callable[[], list[Scheduled]] | None = None
        """What the running step computes; None outside of steps (warm-up, profiling)."""

    @property
    def plan(self) -> OffloadPlan | None:
        return self.store.plan if self.store is not None else None

    def adopt(self, module: Any) -> int:
        """Number a new layer. Raises EngineStartError for what the plug-in cannot serve."""
        parallel = module.moe_config.moe_parallel_config
        for what, size in (("tensor", parallel.tp_size), ("data", parallel.dp_size), ("expert", parallel.ep_size)):
            if size > 1:
                raise EngineStartError(
                    f"{what} parallelism of {size} and offloaded experts: this plug-in serves one card",
                    remedy="serve with one card, or unset the offload variables",
                )
        found = _NUMBER.search(module.layer_name)
        number = int(found.group(1)) if found else len(self.modules)
        if number in self.modules:
            raise EngineStartError(
                f"two MoE layers are numbered {number}: {self.modules[number].layer_name} and {module.layer_name}"
            )
        self.modules[number] = module
        return number

    def take(self, number: int) -> None:
        """The layer's weights are final: put its experts into a bank where they are to leave, and free their place."""
        module = self.modules[number]
        if self.store is not None:
            raise EngineStartError(
                f"the weights of {module.layer_name} came again, and its experts are in host memory already",
                remedy="start the engine anew with the other weights",
            )
        if getattr(module.quant_method, "is_monolithic", False):
            raise EngineStartError(
                f"the kernel of {module.layer_name} ({type(module.quant_method).__name__}) routes by itself, so that "
                "nobody can tell it where experts are",
                remedy="choose another one: --moe-backend triton, marlin or flashinfer_cutlass",
            )
        tensors = expert_tensors(module)
        self.tensors[number] = tensors
        if not self._leaves():
            return
        memory = HostMemory()
        bank = Bank(number, module.local_num_experts, tensors.rows(), memory)
        self._banks[number] = bank
        self._off_bytes += bank.experts * bank.row_bytes
        tensors.release()

    def refuse(self, config: Any) -> None:
        """Raise EngineStartError where vLLM's own offload would take the same weights, or layers are elsewhere."""
        pipeline = config.parallel_config.pipeline_parallel_size
        if pipeline > 1:
            raise EngineStartError(
                f"pipeline parallelism of {pipeline} and offloaded experts: this plug-in serves one card",
                remedy="serve with one card, or unset the offload variables",
            )
        if getattr(config, "use_v2_model_runner", False):
            raise EngineStartError(
                "Model Runner V2 keeps its requests elsewhere, and this plug-in reads those of the first one",
                remedy="set VLLM_USE_V2_MODEL_RUNNER=0, or unset the offload variables",
            )
        draft = getattr(getattr(config, "speculative_config", None), "method", None)
        if self.settings.trace is not None and draft not in (None, "ngram"):
            raise EngineStartError(
                f"VLLM_MOE_ROUTING_TRACE beside a draft model ({draft}): its passes would overwrite rows of the trace",
                remedy="unset VLLM_MOE_ROUTING_TRACE, or serve without --speculative-config",
            )
        offload = getattr(config, "offload_config", None)
        if offload is None or not self.settings.offloads:
            return
        gib, params = offload.uva.cpu_offload_gb, offload.uva.cpu_offload_params
        if gib and (not params or any("expert" in one or one.startswith(("w13", "w2")) for one in params)):
            raise EngineStartError(
                f"--cpu-offload-gb {gib:g} with --cpu-offload-params {', '.join(sorted(params)) or '(all)'} and this "
                "plug-in would both move the routed experts",
                remedy="name other parameters in --cpu-offload-params, or unset one of the two",
            )
        if offload.prefetch.offload_group_size:
            raise EngineStartError(
                f"--offload-group-size {offload.prefetch.offload_group_size} moves whole layers, the routed experts "
                "among them, and so does this plug-in",
                remedy="unset one of the two",
            )

    def finish(self, model: Any, max_tokens: int, device: torch.device) -> None:
        """Build the plan and the store, and hand every offloaded layer its device rows.

        Raises EngineStartError or UsageError for what does not fit the model.
        """
        numbers = sorted(self.modules)
        if not numbers:
            raise EngineStartError(
                f"{model.model} has no layer with routed experts, and offload was asked for",
                remedy="serve a mixture-of-experts model, or unset the offload variables",
            )
        late = [number for number in numbers if number not in self.tensors]
        if late:
            raise EngineStartError(
                f"the weights of layers {late} were never reported as loaded; this vLLM loads otherwise"
            )
        shapes = tuple(
            LayerShape(number, self.modules[number].local_num_experts, self._row_bytes(number)) for number in numbers
        )
        top_k = self.modules[numbers[0]].top_k
        if top_k > STAGING_ROWS and self.settings.split == "rows":
            raise EngineStartError(
                f"a token of this model is routed to {top_k} experts, and VLLM_MOE_PREFILL_SPLIT=rows has "
                f"{STAGING_ROWS} staging rows for them",
                remedy="unset VLLM_MOE_PREFILL_SPLIT",
            )
        name = f"{Path(model.model).name}-l{len(numbers)}-e{shapes[0].experts}-k{top_k}-r{shapes[0].row_bytes}"
        plan = OffloadPlan.build(self.settings, ModelShape(name, shapes, top_k))
        if {layer.layer for layer in plan.layers} != self._banks.keys():
            raise EngineStartError(
                f"layers {sorted(self._banks)} were put into host memory, and the plan has "
                f"{[layer.layer for layer in plan.layers]}; layers loaded in another order than they are numbered"
            )
        if not plan.staging and (plan.arena or any(layer.slots for layer in plan.layers)):
            # Its kernels take one set of tensors, and what is read in place is in the bank.
            layers = tuple(replace(layer, slots=0, hot=()) for layer in plan.layers)
            said = "VLLM_MOE_DMA_STAGING=0: every expert is read in the bank, so that there are no slots"
            plan = replace(plan, layers=layers, arena=0, warnings=(*plan.warnings, said))
        for warning in plan.warnings:
            _log.warning("soakrig: %s", warning)
        self._serving = False
        store = ExpertStore(plan, device, max_tokens, one_source=True)
        for number in numbers:
            if number in self._banks:
                store.add_bank(self._banks[number])
            else:
                store.add_foreign(number)
        store.finish()
        self.store = store
        self._addresses = store.addresses()
        for number, layer in store.offloaded.items():
            self.tensors[number].point_at(layer.arena.tensors if plan.staging else layer.bank.in_place(device))

    @property
    def first_layer(self) -> int:
        """Number of the first MoE layer."""
        return min(self.modules)

    def planted_rows(self, number: int) -> list[int]:
        """Rows of the running step whose first expert is to be one that does not exist: in the first MoE layer only."""
        if self.plant is None or self.scheduled is None or number != self.first_layer:
            return []
        return self.plant.rows(self.scheduled())

    def begin_step(self, tokens: int, scheduled: Callable[[], list[Scheduled]]) -> None:
        """A step with requests in it begins: what ran before the first one was warm-up, and is forgotten.

        ``scheduled`` is asked once the batch is in order.
        """
        self.scheduled = scheduled
        assert self.store is not None
        if not self._serving:
            self._serving = True
            self.store.check_addresses(self._addresses)  # graphs were captured in between
            self.store.restart()
            self.history = History(len(self.store.plan.model.layers))
        self.store.begin_step(np.zeros(tokens, dtype=np.uint8))

    def end_step(self) -> list[str]:
        """The step is over; returns the requests that were routed to an expert which does not exist."""
        assert self.store is not None
        assert self.scheduled is not None
        scheduled = self.scheduled()
        self.scheduled = None
        marks = [np.full(count, DECODE if decode else PREFILL, dtype=np.uint8) for _, count, decode in scheduled]
        bad = self.store.end_step(np.concatenate(marks) if marks else np.zeros(0, dtype=np.uint8)).bad_tokens
        found: list[str] = []
        if self.store.steps % WINDOW_STEPS == 0:
            self.history.add(self.store.steps, self.store.counters())
        start = 0
        for request, count, _ in scheduled:
            if any(start <= token < start + count for token in bad):
                found.append(request)
            start += count
        return found

    def window(self, query: Mapping[str, str]) -> dict[str, Any]:
        """For ``/soakrig/offload``: figures between two steps, or of the whole life; ``error`` for another query."""
        assert self.store is not None
        if self.store.steps > self.history.step:
            self.history.add(self.store.steps, self.store.counters())
        try:
            return window_report(self.store.plan, self.history, query)
        except UsageError as error:
            return {"error": {"message": str(error), "type": "invalid_request_error", "code": 400}}

    def report(self) -> dict[str, Any]:
        """What the server side shows when asked: settings, plan, memory (slow on a large bank: /proc/self/smaps)."""
        assert self.store is not None
        return {
            "settings": self.settings.report(),
            "plan": self.store.plan.to_json(),
            "memory": self.store.memory(),
        }

    def newest(self) -> dict[str, Any]:
        """What the server side asks for every second, between steps: the counters."""
        assert self.store is not None
        self._flush()
        return {"step": self.store.steps, "counters": self.store.counters()}

    def _flush(self) -> None:
        """Write profile and trace where there is news: the server asks for a report every second, busy or not."""
        assert self.store is not None
        steps, idle = self.store.steps, self.store.steps == self._reported
        self._reported = steps
        if steps != self._flushed and (idle or time.monotonic() >= self._flush_at):
            self.store.flush()
            self._flushed, self._flush_at = steps, time.monotonic() + FLUSH_S

    def _leaves(self) -> bool:
        """Whether the layer that is loaded now leaves the device: the rule of ``OffloadPlan``, as layers come."""
        if not self.settings.offloads:
            return False
        asked = self.settings.offload_gb
        return asked is None or self._off_bytes < asked * GIB

    def _row_bytes(self, number: int) -> int:
        bank = self._banks.get(number)
        if bank is not None:
            return bank.row_bytes
        return sum(row_bytes(tensor) for tensor in self.tensors[number].rows().values())
