"""The campaign: choose the next launch, carry it out, write it down, choose again; unattended, until it is decided.

The journal has every act before it is done, so that a campaign goes on after a kill, a crash or a reboot as if it had
not been away (``journal``). This module decides when to launch and when to end; what a launch does is ``arm_launch``'s
business, where it runs is the executor's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from soakrig.bisect.allocation import next_step
from soakrig.bisect.arm_launch import ArmLaunch
from soakrig.bisect.arms import BASE, CONTROL
from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.evidence import ArmRun, Evidence
from soakrig.bisect.executors import Executor, Stratum
from soakrig.bisect.journal import REBOOT, Journal
from soakrig.bisect.journal_rows import RunRow
from soakrig.bisect.ledger import Ledger
from soakrig.bisect.recovery import launch_mark, settle_leftovers
from soakrig.bisect.stop import Stop
from soakrig.clock import Clock, RealClock
from soakrig.errors import SoakrigError, StoreError
from soakrig.record.redaction import redact_flags, redact_settings
from soakrig.soak.watch.proc import create_time

EndKind = Literal["decided", "budget", "stopped", "wedged", "rebooting", "journal", "bug"]
"""``decided``: no launch is worth its time. ``journal``: it cannot be written any more."""
SESSION, ENDED, BUDGET, ENVIRONMENT = "session", "ended", "budget", "environment"
"""Notes of the campaign: a process took it up; there is no next launch; another budget in seconds; the variables of the
caller that every arm gets."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
"""Pause after a void launch; doubled from one to the next."""
ROOM = 16 << 20
"""Free bytes that a launch needs: its run folder takes megabytes, and without them every launch would be void."""


class End(NamedTuple):
    """Why there is no next launch. ``why`` is for people."""

    kind: EndKind
    why: str


@dataclass
class CampaignLoop:
    """Runs a campaign to its end. ``changed(note)`` is called after every entry of the journal, ``progress(text)`` with
    how far a start has come; both from any thread.

    ``reboot`` asks for the host's reboot.
    """

    journal: Journal
    campaign: Campaign
    executor: Executor
    stop: Stop = field(default_factory=Stop)
    clock: Clock = field(default_factory=RealClock)
    changed: Callable[[str], None] = lambda note: None
    progress: Callable[[str], None] = lambda text: None
    reboot: Callable[[], None] = field(default=lambda: reboot_host())

    def __post_init__(self) -> None:
        self._end: End | None = None
        self._failure: BaseException | None = None
        self._free = threading.Condition(threading.RLock())
        self._flying = 0
        self._earlier = 0  # launches of before this session
        self._arms = [planned.arm for planned in self.campaign.arms]

    def run(self) -> End:
        """Until there is no next launch. Raises ``StoreError`` when the journal cannot be written: then nothing of a
        launch is left running either, and ``resume`` goes on once it can."""
        me = os.getpid()
        self.journal.note(SESSION, pid=me, since=create_time(me))
        self._earlier = len(self.journal.runs())
        left = settle_leftovers(self.journal, self.campaign, self.executor)
        if left:
            self._over("wedged", left)
        lanes = [threading.Thread(target=self._lane, args=(one,), name=f"lane {one.name}") for one in self._strata()]
        if len(lanes) == 1:
            self._lane(self._strata()[0])
        else:
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        if self._failure is not None:
            raise self._failure
        end = self._end or End("stopped", "no host is left")
        if end.kind != "rebooting":  # the order has to be the last word of this boot
            self.journal.note(ENDED, kind=end.kind, why=end.why)
        self.changed("")
        return end

    def _strata(self) -> list[Stratum]:
        return list(self.executor.strata)

    def _lane(self, stratum: Stratum) -> None:
        """Launch after launch on one host and card."""
        voids = 0
        try:
            while (run := self._carried(stratum) or self._next(stratum)) is not None:
                done = self._launch(run, stratum)
                voids = voids + 1 if done.result == "void" else 0
                pause = min(FIRST_PAUSE_S * 2 ** (voids - 1), LAST_PAUSE_S) if voids else 0.0
                self.clock.wait(self.stop.event, max(pause, self.campaign.limits.cooldown))
        except BaseException as error:
            with self._free:
                self._failure = self._failure or error
                self._over("journal" if isinstance(error, StoreError) else "bug", str(error))

    def _carried(self, stratum: Stratum) -> RunRow | None:
        """A launch that an earlier process had planned; after a reboot the control comes first, and it is dropped."""
        run = next((run for run in self.journal.planned() if run.stratum == stratum.name), None)
        self._look_at_limits()
        if run is None or self._end is not None:
            return None
        if self._after_reboot(stratum) and run.arm != CONTROL:
            self.journal.move(run, "void", reason="planned before a reboot, after which the control comes first")
            self.journal.move(run, "settled")
            return None
        with self._free:
            self._flying += 1
        return run

    def _next(self, stratum: Stratum) -> RunRow | None:
        """The next launch, planned; None where there is none. Waits while other lanes may still change that."""
        with self._free:
            while True:
                self._look_at_limits()
                if self._end is not None or stratum.name not in [one.name for one in self._strata()]:
                    return None  # the end, or a host that was lost on the way
                evidence = Evidence(self._tried(), signature=self.campaign.signature)
                step = next_step(
                    evidence, self._arms, self.campaign.rule, after_reboot=self._after_reboot(stratum),
                    stratum=stratum.name or None,
                )  # fmt: skip
                if step.arm is not None:
                    run = self.journal.plan(step.arm.name, cap=self.campaign.cap, stratum=stratum.name, why=step.why)
                    self._flying += 1
                    return run
                if not self._flying:
                    self._over("decided", step.why)
                    return None
                self._free.wait()

    def _tried(self) -> tuple[ArmRun, ...]:
        """Runs to choose the next one from. Those that were void before this session are left out: who resumes may have
        freed the port or the disk, so an arm that was given up is tried again."""
        return tuple(run for run in self.journal.arm_runs() if not run.void or run.order > self._earlier)

    def _launch(self, run: RunRow, stratum: Stratum) -> RunRow:
        arm = self.campaign.arm(run.arm)
        launch = ArmLaunch(
            self.campaign, run.arm, run.id, self.journal.folder, launch_mark(self.journal, run), stratum.card,
            first_environment(self.journal),
        )  # fmt: skip
        try:
            self.journal.move(
                run, "launching", boot_id=stratum.boot_id or None, folder=launch.run_id,
                detail={
                    "settings": redact_settings(dict(arm.settings)), "unset": arm.unset,
                    "flags": redact_flags(list(arm.flags)), "machine": self.executor.machine(stratum),
                },
            )  # fmt: skip
            self.changed("")
            ledger = Ledger(self.journal, run, launch.run_id, self.changed, self.progress)
            self.executor.run(launch, stratum, ledger, self.stop)
            if ledger.left:
                self._wedged(run, ledger.left)
        finally:
            with self._free:
                self._flying -= 1
                self._free.notify_all()
        self.changed("")
        return next(one for one in self.journal.runs() if one.id == run.id)

    def _look_at_limits(self) -> None:
        if self.stop.why:
            self._over("stopped", f"stopped by {self.stop.why}")
        spent, budget = spent_seconds(self.journal), budget_seconds(self.journal, self.campaign)
        if spent >= budget:
            self._over("budget", f"the budget of {budget / 3600:.3g} h is spent")
        if self._end is None:
            need_room(self.journal.folder)

    def _after_reboot(self, stratum: Stratum) -> bool:
        """Whether the last launch there was before a reboot: the control comes first then."""
        last = next((run for run in reversed(self.journal.runs()) if run.stratum == stratum.name and run.boot_id), None)
        return last is not None and last.boot_id != (stratum.boot_id or self.journal.boot_id)

    def _wedged(self, run: RunRow, left: list[str]) -> None:
        why = f"run {run.id} of {run.arm} left {'; '.join(left)}: the host is wedged"
        with self._free:
            done = sum(note.what == REBOOT for note in self.journal.notes())
            if done >= self.campaign.allow_reboot or run.stratum:
                self._over("wedged", f"{why}. Only a reboot ends it")
                return
            self.changed(why)
            self.journal.note(REBOOT, why=why, number=done + 1, allowed=self.campaign.allow_reboot)
            try:
                self.reboot()
            except (OSError, subprocess.SubprocessError, SoakrigError) as error:
                self._over("wedged", f"{why}. The reboot could not be ordered: {error}")
            else:
                self._over("rebooting", f"{why}. Reboot {done + 1} of {self.campaign.allow_reboot} is ordered")

    def _over(self, kind: EndKind, why: str) -> None:
        with self._free:
            self._end = self._end or End(kind, why)
            self._free.notify_all()


def keep_environment(journal: Journal, environment: Mapping[str, str]) -> None:
    """Keep what arms get of the caller's environment: a resume from another shell, or by systemd, launches alike."""
    journal.note(ENVIRONMENT, variables={name: value for name, value in environment.items() if BASE.match(name)})


def first_environment(journal: Journal) -> dict[str, str] | None:
    """What ``keep_environment`` kept; None where it was not called."""
    return next((dict(note.detail["variables"]) for note in journal.notes() if note.what == ENVIRONMENT), None)


def budget_seconds(journal: Journal, campaign: Campaign) -> float:
    """The campaign's budget, or what a later ``resume`` made of it."""
    later = [note.detail["seconds"] for note in journal.notes() if note.what == BUDGET]
    return float(later[-1]) if later else campaign.budget


def spent_seconds(journal: Journal) -> float:
    """Seconds of all launches, from launch to settled, so far as they are known to have gone."""
    return sum(last - began for began, last in journal.spans().values())


def need_room(folder: Path) -> None:
    """Raises ``StoreError`` where a launch would find no room for its run folder."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise StoreError(f"{folder} cannot be looked at: {error.strerror or error}") from error
    if free < ROOM:
        raise StoreError(f"{free >> 10} KiB are free where {folder} is, {ROOM >> 10} KiB were expected")


def reboot_host() -> None:
    """Ask systemd for a reboot; the campaign goes on by its unit (``resume_unit``)."""
    subprocess.run(["systemctl", "reboot"], check=True, timeout=60)
