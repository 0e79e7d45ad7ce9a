"""What a campaign has seen: runs of arms, which of them count, and beside which controls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from soakrig.bisect.exposure_clock import ExposureClock, counted_clock, nelson_aalen
from soakrig.bisect.statistics import Cell
from soakrig.errors import RecordError

Role = Literal["control", "all_off", "one", "add_back", "pair"]
"""``control``: every variable as in the failing set-up. ``all_off``: every variable at its other value. ``one``: one
at its other value. ``add_back``: all off but one. ``pair``: all off but two."""

ClockKind = Literal["nelson_aalen", "counted"]

FAULTS_PER_BLOCK = 3
"""A block of launches holds this many faults of the control, so that an arm meets controls of its own hours."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Settings to run, by what they are for. ``variables``: those the role speaks of (changed, or put back)."""

    name: str
    role: Role
    variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One launch of an arm.

    ``exposure``: turns (or generated tokens) until the fault, the faulting one included, or until ``cap``. ``order``:
    the place among the launches of the campaign. ``signature``: of its fault, None without one. ``void``: why the run
    says nothing (variable not in effect, infrastructure), empty where it counts. ``stratum``: the host and card.
    """

    arm: str
    exposure: float
    cap: float
    order: int
    signature: str | None = None
    void: str = ""
    stratum: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.exposure <= self.cap:
            raise RecordError(
                f"run {self.order} of arm {self.arm!r} has exposure {self.exposure:g}; expected 0 to {self.cap:g}",
                remedy="Count the turns until the fault, the faulting one included; the journal's row may be damaged.",
            )
        if not self.void and self.exposure == 0.0:
            raise RecordError(
                f"run {self.order} of arm {self.arm!r} did no work and is not void",
                remedy="A run without a turn proves nothing: mark it void with its reason.",
            )


@dataclass(frozen=True)
class Evidence:
    """The runs of a campaign. ``signature``: the fault that is looked for; None takes the control's commonest.

    A fault of another signature makes its run void. In the control such a run still counts as exposure without the
    fault: left out, it would raise the control's hazard, and a void must never speak for an arm.
    """

    runs: tuple[ArmRun, ...]
    control: str = "control"
    signature: str | None = None
    clock_kind: ClockKind = "nelson_aalen"

    def __post_init__(self) -> None:
        twice = [order for order, n in Counter(run.order for run in self.runs).items() if n > 1]
        if twice:
            raise RecordError(
                f"two runs have the place {twice[0]} among the launches, expected one each",
                remedy="A run must not be counted twice: look at the journal.",
            )
        object.__setattr__(self, "runs", tuple(sorted(self.runs, key=lambda run: run.order)))

    def plus(self, *runs: ArmRun) -> Evidence:
        """The same evidence and more runs."""
        return replace(self, runs=(*self.runs, *runs))

    @cached_property
    def pooled_signature(self) -> str | None:
        """The signature that is pooled: the asked one, else the commonest of the control (the first among equals)."""
        if self.signature is not None:
            return self.signature
        for own in (True, False):
            seen = Counter(
                run.signature
                for run in self.runs
                if run.signature is not None and not run.void and (run.arm == self.control or not own)
            )
            if seen:
                return seen.most_common(1)[0][0]
        return None

    def void_reason(self, run: ArmRun) -> str:
        """Why ``run`` does not count for its arm, empty where it does."""
        if run.void:
            return run.void
        if run.signature is not None and run.signature != self.pooled_signature:
            return f"another fault: {run.signature}"
        return ""

    def of(self, arm: str) -> list[ArmRun]:
        """All runs of an arm, void ones too."""
        return [run for run in self.runs if run.arm == arm]

    def counted(self, arm: str) -> list[ArmRun]:
        """The runs that count for an arm; a control's run with another fault is one without a fault here."""
        kept = [run for run in self.of(arm) if not run.void]
        if arm == self.control:
            return [replace(run, signature=None) if self.void_reason(run) else run for run in kept]
        return [run for run in kept if not self.void_reason(run)]

    def void(self, arm: str) -> list[tuple[ArmRun, str]]:
        """The void runs of an arm with the reason of each."""
        return [(run, why) for run in self.of(arm) if (why := self.void_reason(run))]

    @cached_property
    def _controls(self) -> dict[str, list[ArmRun]]:
        found: dict[str, list[ArmRun]] = {}
        for run in self.counted(self.control):
            found.setdefault(run.stratum, []).append(run)
        return found

    @cached_property
    def control_faults(self) -> dict[str, int]:
        """Faults of the control by stratum."""
        return {name: sum(run.signature is not None for run in runs) for name, runs in self._controls.items()}

    @cached_property
    def clocks(self) -> dict[str, ExposureClock]:
        """The control's clock of each stratum that has a control: no arm is held against another host's."""
        make = nelson_aalen if self.clock_kind == "nelson_aalen" else self._counted_clock
        return {
            name: make([run.exposure for run in runs], [run.signature is not None for run in runs])
            for name, runs in self._controls.items()
        }

    def _counted_clock(self, exposure: Sequence[float], faulted: Sequence[bool]) -> ExposureClock:
        caps = {run.cap for run in self.runs if not run.void}
        if len(caps) > 1:
            raise RecordError(
                f"runs of different caps ({', '.join(f'{cap:g}' for cap in sorted(caps))}) were to be pooled by count",
                remedy="Count them on the control's Nelson-Aalen clock: a hazard may grow with the turn.",
            )
        return counted_clock(exposure, faulted)

    @cached_property
    def blocks(self) -> dict[int, int]:
        """Block of each launch, by its order. It begins with a control, ends after ``FAULTS_PER_BLOCK`` faults of it.

        Hosts drift (temperature, driver state). Within a block an arm meets controls of its own hours; only the shape
        of the clock is shared by all blocks. Each stratum is cut on its own.
        """
        found: dict[int, int] = {}
        state: dict[str, tuple[int, int, bool]] = {}
        number = 0
        for run in self.runs:
            block, faults, others = state.get(run.stratum, (-1, 0, False))
            is_control = run.arm == self.control
            if block < 0 or (is_control and others and faults >= FAULTS_PER_BLOCK):
                block, faults, others = number, 0, False
                number += 1
            fault = is_control and run.signature is not None and not self.void_reason(run)
            state[run.stratum] = (block, faults + fault, others or not is_control)
            found[run.order] = block
        return found

    @cached_property
    def _control_cells(self) -> dict[float, dict[int, tuple[int, float]]]:
        """Faults and exposure on the clock of the control in each block, by the cap it is cut at; filled when asked."""
        return {}

    def _control_within(self, cap: float) -> dict[int, tuple[int, float]]:
        if cap not in self._control_cells:
            found: dict[int, tuple[int, float]] = {}
            for stratum, runs in self._controls.items():
                clock = self.clocks[stratum]
                for run in runs:
                    faults, exposure = found.get(self.blocks[run.order], (0, 0.0))
                    fault = run.signature is not None and run.exposure <= cap
                    found[self.blocks[run.order]] = (faults + fault, exposure + clock.at(min(run.exposure, cap)))
            self._control_cells[cap] = found
        return self._control_cells[cap]

    def control_faults_within(self, arm: str) -> dict[str, int]:
        """Faults of the control by stratum, up to the longest cap of the arm's runs."""
        cap = self._cap(arm)
        return {
            name: sum(run.signature is not None and run.exposure <= cap for run in runs)
            for name, runs in self._controls.items()
        }

    def _cap(self, arm: str) -> float:
        return max((run.cap for run in self.counted(arm)), default=math.inf)

    def newest_cell(self, arm: str) -> Cell | None:
        """Arm and control side by side in the newest block of the arm's newest run; None where it never ran."""
        cells = self.cells(arm)
        return cells[-1] if cells else None

    def cells(self, arm: str, *, usable: Iterable[str] | None = None) -> list[Cell]:
        """Arm and control side by side, one cell a block, exposure on the control's clock.

        Only strata in ``usable`` (None: all that have a control). Blocks in which the arm did not run are left out: a
        control of other hours says little. The control is cut at the arm's cap: how it fares later says nothing of so
        short runs, and its later faults would pass for knowledge of them.
        """
        strata = set(self.clocks) if usable is None else set(usable) & set(self.clocks)
        found: dict[int, tuple[int, float]] = {}
        for run in self.counted(arm):
            if run.stratum in strata:
                block = self.blocks[run.order]
                faults, exposure = found.get(block, (0, 0.0))
                added = self.clocks[run.stratum].at(run.exposure)
                found[block] = (faults + (run.signature is not None), exposure + added)
        control = self._control_within(self._cap(arm))
        cells: list[Cell] = []
        for block, (faults, exposure) in found.items():
            control_faults, control_exposure = control.get(block, (0, 0.0))
            cells.append(Cell(control_faults, control_exposure, faults, exposure))
        return cells

    def totals(self, arm: str) -> dict[str, tuple[int, float]]:
        """Faults and exposure on the control's clock by stratum, blocks together."""
        found: dict[str, tuple[int, float]] = {}
        for run in self.counted(arm):
            if run.stratum in self.clocks:
                faults, exposure = found.get(run.stratum, (0, 0.0))
                added = self.clocks[run.stratum].at(run.exposure)
                found[run.stratum] = (faults + (run.signature is not None), exposure + added)
        return found
