"""The minimisation: choose the next load, launch it, write it down, choose again; unattended, until it is minimal.

The journal is the bisect's, with a load in place of an arm's settings, and so is everything that a launch does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soakrig.bisect.arm_launch import ArmLaunch
from soakrig.bisect.campaign import (
    BUDGET,
    ENDED,
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    SESSION,
    End,
    first_environment,
    keep_environment,
    need_room,
    spent_seconds,
)
from soakrig.bisect.executors import Executor
from soakrig.bisect.journal import Journal
from soakrig.bisect.journal_rows import RunRow
from soakrig.bisect.ledger import Ledger
from soakrig.bisect.minimize.decision import Demand
from soakrig.bisect.minimize.hunt import Hunt
from soakrig.bisect.minimize.loads import loads_seen
from soakrig.bisect.minimize.material import Material
from soakrig.bisect.minimize.requests import least_context, shaped, whole_shape
from soakrig.bisect.minimize.search import Path as SearchPath
from soakrig.bisect.minimize.search import Search
from soakrig.bisect.minimize.shape import Shape
from soakrig.bisect.recovery import launch_mark, settle_leftovers
from soakrig.bisect.stop import Stop
from soakrig.clock import Clock, RealClock
from soakrig.errors import RecordError
from soakrig.record.redaction import redact_flags, redact_settings
from soakrig.record.request_log import StoredRequest, read_requests, write_requests
from soakrig.soak.watch.proc import create_time

SEARCH, SOURCE, LOADS = "search", "source", "loads"
"""In the folder of a minimisation: the journal and its launches; the run's requests; the loads that were launched."""
VOIDS = 3
"""Launches in a row that say nothing, after which there is no sense in another."""


@dataclass(frozen=True)
class Minimisation:
    """What is to be made small, and how. ``folder``: of the minimisation; ``run``: the run that it began with."""

    folder: Path
    run: str
    hunt: Hunt
    material: Material
    demand: Demand

    @property
    def whole(self) -> Shape:
        return whole_shape(self.material)

    def to_json(self) -> dict[str, Any]:
        """For the journal; the requests are in ``SOURCE``."""
        return {
            "minimize": 1,
            "run": self.run,
            "hunt": self.hunt.as_said(),
            "material": self.material.facts(),
            "demand": {"useful": self.demand.useful, "error": self.demand.error},
        }

    def path(self, journal: Journal) -> SearchPath:
        """How far the search has come."""
        return self.walk(journal)[0]

    def walk(self, journal: Journal) -> tuple[SearchPath, dict[Shape, str]]:
        """The same, with the loads that cannot be used and why."""
        loads = loads_seen(journal, self.material, self.whole)
        search = Search(
            self.whole,
            self.material.turns,
            lambda tools: least_context(self.material, tools),
            self.demand,
            loads.seen,
            lambda shape: loads.refused.get(shape, ""),
        )
        return search.walk(), loads.refused

    def write(self, shape: Shape, folder: Path) -> Path:
        """The requests of a shape, in a folder that ``soak run --transcript`` takes."""
        write_requests(folder, shaped(self.material, shape))
        return folder


def begin(folder: Path, run: Path, hunt: Hunt, material: Material, demand: Demand) -> tuple[Minimisation, Journal]:
    """A new minimisation in ``folder``. The journal is the caller's to close. Raises as ``Journal.create``."""
    made = Minimisation(folder, str(run.resolve()), hunt, material, demand)
    journal = Journal.create(folder / SEARCH, made.to_json())
    try:
        write_requests(folder / SOURCE, material.conversations)
        keep_environment(journal, os.environ)
    except BaseException:
        journal.close()
        raise
    return made, journal


def reopen(journal: Journal) -> Minimisation:
    """The minimisation of an open journal. Raises ``RecordError`` where it is of something else."""
    data: Mapping[str, Any] = journal.campaign
    folder = journal.folder.parent
    if data.get("minimize") != 1:
        raise RecordError(
            f"{journal.folder} is no minimisation", remedy="`soak bisect resume` goes on with a campaign."
        )
    by_number: dict[int, list[StoredRequest]] = {}
    for one in read_requests(folder / SOURCE):
        by_number.setdefault(one.conversation, []).append(one)
    return Minimisation(
        folder,
        data["run"],
        Hunt.from_json(data["hunt"]),
        Material.from_facts(data["material"], list(by_number.values())),
        Demand(**data["demand"]),
    )


def is_minimisation(folder: Path) -> bool:
    """Whether a folder is one that ``begin`` has made."""
    return (folder / SEARCH).is_dir()


@dataclass
class MinimizeLoop:
    """Runs a minimisation to its end. ``changed(note)`` after every entry of the journal, ``progress(text)`` with how
    far a start has come."""

    journal: Journal
    made: Minimisation
    executor: Executor
    stop: Stop = field(default_factory=Stop)
    clock: Clock = field(default_factory=RealClock)
    changed: Callable[[str], None] = lambda note: None
    progress: Callable[[str], None] = lambda text: None

    def run(self) -> End:
        """Until there is no next launch. Raises ``StoreError`` when the journal cannot be written: then nothing of a
        launch is left running either."""
        me = os.getpid()
        self.journal.note(SESSION, pid=me, since=create_time(me))
        left = settle_leftovers(self.journal, self.made.hunt, self.executor)
        end = End("wedged", left) if left else self._launches()
        self.journal.note(ENDED, kind=end.kind, why=end.why)
        self.changed("")
        return end

    def _launches(self) -> End:
        voids, why = 0, ""
        self._drop_planned()
        while True:
            path = self.made.path(self.journal)
            if path.next is None:
                return End("decided", path.why)
            if self.stop.why:
                return End("stopped", f"stopped by {self.stop.why}")
            if voids >= VOIDS:
                return End("wedged", f"{VOIDS} launches in a row said nothing: {why}")
            budget = budget_of(self.journal, self.made.hunt)
            if spent_seconds(self.journal) >= budget:
                return End("budget", f"the budget of {budget / 3600:.3g} h is spent")
            need_room(self.journal.folder)
            run, left = self._launch(path, path.next)
            if left:
                return End("wedged", f"launch {run.id} left {'; '.join(left)}: only a reboot ends it")
            voids, why = (voids + 1, run.reason) if run.result == "void" else (0, "")
            pause = min(FIRST_PAUSE_S * 2 ** (voids - 1), LAST_PAUSE_S) if voids else 0.0
            self.clock.wait(self.stop.event, pause)

    def _drop_planned(self) -> None:
        """What an earlier process had chosen and not begun is chosen again, with what is known now."""
        for run in self.journal.planned():
            self.journal.move(run, "void", reason="chosen by a process that ended before it was begun")
            self.journal.move(run, "settled")

    def _launch(self, path: SearchPath, shape: Shape) -> tuple[RunRow, list[str]]:
        turns = -(-path.turns // shape.conversations)
        load = self.made.write(shape, self.made.folder / LOADS / shape.name)
        hunt = self.made.hunt.sending(load.resolve(), shape.conversations, turns)
        run = self.journal.plan(shape.name, cap=hunt.cap, why=path.why)
        stratum = self.executor.strata[0]
        launch = ArmLaunch(
            hunt, shape.name, run.id, self.journal.folder, launch_mark(self.journal, run), stratum.card,
            first_environment(self.journal),
        )  # fmt: skip
        self.journal.move(
            run, "launching", folder=launch.run_id,
            detail={
                "settings": redact_settings(dict(hunt.settings)), "flags": redact_flags(list(hunt.flags)),
                "load": str(load), "machine": self.executor.machine(stratum),
            },
        )  # fmt: skip
        self.changed("")
        ledger = Ledger(self.journal, run, launch.run_id, self.changed, self.progress)
        self.executor.run(launch, stratum, ledger, self.stop)
        return next(one for one in self.journal.runs() if one.id == run.id), ledger.left


def budget_of(journal: Journal, hunt: Hunt) -> float:
    """Seconds: the first one's, or what a later call made of it."""
    later = [note.detail["seconds"] for note in journal.notes() if note.what == BUDGET]
    return float(later[-1]) if later else hunt.budget
