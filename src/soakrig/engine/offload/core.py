"""The offload core: takes over where routed experts live, and tells an expert kernel where to find each of them.

The host (the embedded engine, a plug-in) calls, in every engine step, ``begin_step``, then ``parts`` once a layer, then
``end_step``. docs/offload.md has the semantics.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from soakrig.errors import EngineStartError, SoakrigError

from .arena import Arena
from .bank import Bank, check_parameters, row_bytes
from .counters import ACCESSES, COUNTERS, STEPS
from .host_memory import HostMemory
from .offloaded_layer import LARGE, SMALL, OffloadedLayer, Part
from .plan import STAGING_ROWS, LayerPlan, OffloadPlan
from .prefill import check_ids
from .profile import HotProfile, write_profile

if TYPE_CHECKING:  # what they bring (numba) is imported only where something is offloaded
    from .recorder import Recorder
    from .slots import StepBuffers

_log = logging.getLogger("soakrig.engine")


@dataclass(frozen=True, slots=True)
class StepReport:
    """``step``: number of the engine step, from 1; ``bad_tokens``: rows of its batch with an id out of range."""

    step: int
    bad_tokens: list[int]


class ExpertStore:
    """All routed experts of a model, behind an offload plan.

    ``max_tokens``: the largest batch of an engine step. Use: ``add_layer`` (or ``add_bank``) for every layer,
    ``finish``, then steps. ``one_source``: the host's kernel takes one set of tensors for all pairs of a token, so that
    what is read in place is read there whole, slots or not.
    """

    def __init__(self, plan: OffloadPlan, device: torch.device, max_tokens: int, *, one_source: bool = False) -> None:
        self.plan = plan
        self._one_source = one_source
        self.device = device
        self.steps = 0
        self._place = {shape.layer: number for number, shape in enumerate(plan.model.layers)}
        self._experts = {shape.layer: shape.experts for shape in plan.model.layers}
        self._planned = {layer.layer: layer for layer in plan.layers}
        self._resident: dict[int, dict[str, Tensor]] = {}
        self._banks: dict[int, Bank] = {}
        self.offloaded: dict[int, OffloadedLayer] = {}
        self._memory = HostMemory()
        self._memories = [self._memory]
        self._said: set[str] = set()
        self._arenas: list[Arena] = []
        self._buffers: StepBuffers | None = None
        self._counts = torch.zeros((len(self._place), 2, len(COUNTERS)), dtype=torch.int64, device=device)
        self._bad_tokens = torch.zeros(max_tokens, dtype=torch.uint8, device=device)
        self._refused = torch.zeros(1, dtype=torch.int64, device=device)
        self._recorder: Recorder | None = None
        self._marks: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(0, dtype=np.uint8)

    def add_layer(self, layer: int, parameters: Mapping[str, Tensor]) -> None:
        """Take a layer's experts over: name -> [experts, ...], on any device.

        Raises EngineStartError where they do not fit the plan.
        """
        if layer not in self._place or layer in self._resident or layer in self._banks:
            raise EngineStartError(f"layer {layer} was added twice, or is none of the {len(self._place)} of the plan")
        planned = self._planned.get(layer)
        experts = self._experts[layer]
        if planned is None:
            checked = check_parameters(layer, experts, parameters)
            self._resident[layer] = {name: tensor.to(self.device) for name, tensor in checked.items()}
            return
        found = sum(row_bytes(tensor) for tensor in check_parameters(layer, experts, parameters).values())
        if found != planned.row_bytes:
            raise EngineStartError(
                f"an expert of layer {layer} has {found} bytes; the plan was made for {planned.row_bytes}"
            )
        self._banks[layer] = Bank(layer, experts, parameters, self._memory)

    def add_bank(self, bank: Bank) -> None:
        """Take a layer that the host has put into a bank already, since the plan came later than the weights.

        Raises EngineStartError where it does not fit the plan.
        """
        planned = self._planned.get(bank.layer)
        twice = bank.layer in self._banks
        if twice or planned is None or planned.experts != bank.experts or planned.row_bytes != bank.row_bytes:
            raise EngineStartError(
                f"the bank of layer {bank.layer} has {bank.experts} experts of {bank.row_bytes} bytes; the plan has "
                f"{planned}{', and there is a bank already' if twice else ''}"
            )
        self._banks[bank.layer] = bank
        self._memories.append(bank.memory)

    def add_foreign(self, layer: int) -> None:
        """Leave a resident layer's experts with the host: its parts have rows (the ids, checked) and no tensors."""
        if layer not in self._place or layer in self._planned:
            raise EngineStartError(f"layer {layer} is none of those that the plan leaves on the device")
        self._resident[layer] = {}

    def finish(self) -> None:
        """Pin the banks and allocate every buffer, before the host measures memory. Raises EngineStartError."""
        missing = [layer for layer in self._place if layer not in self._resident and layer not in self._banks]
        if missing:
            raise EngineStartError(f"the plan has {len(self._place)} layers, but these came without experts: {missing}")
        if self.device.type == "cuda":
            for memory in self._memories:
                memory.pin()
        if self.plan.skew is not None and len({layer.experts for layer in self.plan.layers}) > 1:
            raise EngineStartError(
                "the offloaded layers have different numbers of experts, and a profile holds one",
                remedy="unset VLLM_MOE_SKEW_PERLAYER",
            )
        classes: dict[tuple[Any, ...], list[LayerPlan]] = {}
        for layer in self.plan.layers:
            shapes = self._banks[layer.layer].row_shapes
            classes.setdefault(tuple(sorted((name, str(kind)) for name, kind in shapes.items())), []).append(layer)
        if self.plan.arena and len(classes) > 1:
            raise EngineStartError(
                f"the offloaded layers have {len(classes)} different row shapes; one arena needs one",
                remedy="give VLLM_MOE_HOT_SLOTS a number or a map",
            )
        if classes:
            from .slots import StepBuffers

            self._buffers = StepBuffers(self.device)
            for layers in classes.values():
                self._allocate(layers, self._buffers)
            self._warm_up()
            self.restart()
        if self.plan.trace is not None:
            from .recorder import Recorder

            self._recorder = Recorder(self.plan, self.plan.trace, len(self._bad_tokens), self.device)

    def restart(self) -> None:
        """Forget all steps so far, a host's warm-up runs say: counters at zero, the slots as start-up fills them.

        Buffers stay where they are.
        """
        self.steps = 0
        self._counts.zero_()
        self._bad_tokens.zero_()
        for one in self.offloaded.values():
            one.skew.zero_()
        layers = [self.offloaded[layer.layer] for layer in self.plan.layers]
        for pool in {id(one.slots.pool): one.slots.pool for one in layers}.values():
            mine = [one for one in layers if one.slots.pool is pool]
            pool.preload(one.slots.key_base + expert for one in mine for expert in one.plan.hot)
        for one in layers:
            one.load_hot()
        if self._recorder is not None:
            self._recorder.forget()

    def begin_step(self, marks: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Start an engine step of ``len(marks)`` tokens: 0 for a decode row, 1 prefill, 2 padding.

        A host that knows the marks only behind the step gives any here, and the right ones to ``end_step``.
        """
        self._marks = marks
        self._bad_tokens.zero_()

    def parts(self, layer: int, ids: Tensor) -> Iterator[Part]:
        """Where the experts of ``ids`` [tokens, k] (int32 or int64) are: every routed pair is in exactly one part.

        Compute a part before asking for the next one, and the step's next layer after the last: staging rows are
        used again. Sentinels (-1 and the number of experts) and bad ids are in no part; bad ones are counted and their
        tokens reported by ``end_step``.
        """
        if self._recorder is not None:
            self._recorder.take(self._place[layer], ids, self._experts[layer])
        resident = self._resident.get(layer)
        if resident is not None:
            rows = self._check_resident(layer, ids)
            return iter((Part(rows, resident, slice(0, len(rows))),))
        return self.offloaded[layer].parts(ids)

    def end_step(self, marks: np.ndarray[Any, np.dtype[np.uint8]] | None = None) -> StepReport:
        """The safe point after a step: waits for the device, says which tokens had bad ids, writes the trace rows.

        Raises SoakrigError where the gather refused an id that the books gave it: the step computed with a wrong row.
        """
        self.steps += 1
        self._marks = self._marks if marks is None else marks
        if self._recorder is not None:
            with self._spared("the routing trace"):
                self._recorder.write(self._marks)
        if self.refused:
            raise SoakrigError(
                f"the gather refused {self.refused} ids of the slot cache's own books by step {self.steps}: this step "
                "was computed with wrong weights",
                remedy="please report this, with the engine's settings",
            )
        bad = self._bad_tokens[: len(self._marks)]
        rows = [int(row) for row in torch.nonzero(bad).reshape(-1)] if bool(bad.any()) else []
        return StepReport(self.steps, rows)

    def counters(self) -> list[list[list[int]]]:
        """Cumulative: [MoE layers][small, large][COUNTERS]. Waits for the device."""
        return self._counts.tolist()

    @property
    def refused(self) -> int:
        """Ids that the gather itself refused: 0 unless the books are wrong."""
        return int(self._refused)

    def flush(self) -> None:
        """Write the profile, and the trace's rows, to disk. A file that cannot be written ends no engine: it is said
        once, in the log, and left.

        Before the first step there is no profile, and one of an earlier run stays."""
        if self.plan.skew is not None and self.steps:
            counts = {layer: one.skew.cpu().numpy() for layer, one in self.offloaded.items()}
            model, experts = self.plan.model.name, self.plan.layers[0].experts
            profile = HotProfile(model, self.plan.asked_gb, experts, self.steps, counts)
            with self._spared("the hot profile"):
                write_profile(self.plan.skew, profile)
        if self._recorder is not None:
            with self._spared("the routing trace"):
                self._recorder.flush()

    def close(self) -> None:
        """Flush, close the trace, unlock host memory."""
        self.flush()
        if self._recorder is not None:
            with self._spared("the routing trace"):
                self._recorder.close()
            self._recorder = None
        for memory in self._memories:
            memory.close()

    @contextmanager
    def _spared(self, what: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            if what not in self._said:
                self._said.add(what)
                _log.error("%s cannot be written and is not whole: %s", what, error)

    def memory(self) -> dict[str, Any]:
        """Bytes: bank asked, resident (measured) and pinned; slots and staging on the device."""
        slots = sum(arena.slots * arena.row_bytes for arena in self._arenas)
        return {
            "bank_bytes_asked": sum(memory.asked for memory in self._memories),
            "bank_bytes_resident": sum(memory.resident() for memory in self._memories),
            "bank_bytes_pinned": sum(memory.pinned for memory in self._memories),
            "slot_bytes": slots,
            "staging_bytes": sum(arena.bytes for arena in self._arenas) - slots,
        }

    def addresses(self) -> dict[str, int]:
        """Every buffer that a captured graph would hold, by name."""
        named: dict[str, Tensor] = {"counts": self._counts, "bad_tokens": self._bad_tokens, "refused": self._refused}
        named |= {f"skew.{layer}": one.skew for layer, one in self.offloaded.items()}
        if self._buffers is not None:
            named |= {f"step.{name}": tensor for name, tensor in self._buffers.tensors().items()}
        for number, arena in enumerate(self._arenas):
            named |= {f"arena.{number}.{name}": tensor for name, tensor in arena.tensors.items()}
        for layer, one in self.offloaded.items():
            named |= {f"slots.{layer}.{name}": tensor for name, tensor in one.slots.pool.state.items()}
        for layer, bank in self._banks.items():
            named |= {f"bank.{layer}.{name}": tensor for name, tensor in bank.host.items()}
        for layer, resident in self._resident.items():
            named |= {f"resident.{layer}.{name}": tensor for name, tensor in resident.items()}
        return {name: tensor.data_ptr() for name, tensor in named.items()}

    def check_addresses(self, before: Mapping[str, int]) -> None:
        """Raise EngineStartError where a buffer moved since ``before``: a graph captured then reads freed memory."""
        now = self.addresses()
        moved = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        if moved:
            raise EngineStartError(
                f"{len(moved)} buffers moved after graph capture, {moved[0]} from {before.get(moved[0])} to "
                f"{now.get(moved[0])}; replays would read what is there no more"
            )

    def _allocate(self, layers: list[LayerPlan], buffers: StepBuffers) -> None:
        """Device rows and books for the layers of one row shape, the hot sets copied in."""
        from .slots import Tally, layer_slots
        from .staging import Staging

        plan, device = self.plan, self.device
        total = plan.arena or sum(layer.slots for layer in layers)
        shapes = self._banks[layers[0].layer].row_shapes
        arena = Arena(shapes, total, plan.staging_rows if plan.staging else 0, device)
        self._arenas.append(arena)
        staging_row = arena.staging_row if plan.staging else -1
        tallies = [
            Tally(
                self._counts[self._place[layer.layer], SMALL],
                torch.zeros(layer.experts, dtype=torch.int64, device=device),
                self._bad_tokens,
            )
            for layer in layers
        ]
        books = layer_slots(layers, plan.arena, staging_row, buffers, tallies)
        for layer, slots, tally in zip(layers, books, tallies, strict=True):
            bank = self._banks[layer.layer]
            staging = Staging(bank, arena, self._refused)
            large = self._counts[self._place[layer.layer], LARGE]
            self.offloaded[layer.layer] = OffloadedLayer(
                layer, plan, bank, arena, slots, staging, tally, large, one_source=self._one_source
            )

    def _warm_up(self) -> None:
        """Compile what the first steps would wait for, and a graph capture could not: steps of sentinels, whose count
        is taken back. On CUDA there is a kernel for each type of id and width of a step (16, 32, 64 pairs)."""
        top_k = self.plan.model.top_k
        cuda = self.device.type == "cuda"
        # A token of more choices than that has large layer-steps only.
        shapes = [(tokens, top_k) for tokens in sorted({pairs // top_k or 1 for pairs in (16, 32, STAGING_ROWS)})]
        shapes = [shape for shape in shapes if shape[0] * top_k <= STAGING_ROWS]
        for one in self.offloaded.values():
            for shape in shapes if cuda else shapes[:1]:
                for dtype in (torch.int32, torch.int64) if cuda else (torch.int64,):
                    found = one.slots.assign(torch.full(shape, -1, dtype=dtype, device=self.device))
                    if self.plan.staging:
                        one.staging.gather(found.src, found.dst)
            if not cuda:
                break
        self._counts.zero_()

    def _check_resident(self, layer: int, ids: Tensor) -> Tensor:
        counts = self._counts[self._place[layer], SMALL if ids.numel() <= STAGING_ROWS else LARGE]
        if not ids.is_cuda:
            low, high = (int(edge) for edge in ids.aminmax())
            if low >= 0 and high < self._experts[layer]:
                numbers = counts.numpy()
                numbers[STEPS] += 1
                numbers[ACCESSES] += ids.numel()
                return ids
        checked = check_ids(ids, self._experts[layer], counts, self._bad_tokens)
        counts[STEPS] += checked.valid.any()
        counts[ACCESSES] += checked.valid.sum()
        return torch.where(checked.valid, ids, -1)
