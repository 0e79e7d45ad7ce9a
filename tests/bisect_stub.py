"""A stub executor for tests of the campaign's loop: it stands in for launches, and for nothing else.

What a launch comes to is drawn from a made-up world, or scripted; it is told through the same ``Teller`` that a real
launch tells, in the same order, and what the teller raises goes through as from a real one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bisect_world import XID, draw
from soakrig.bisect.arm_launch import ArmLaunch, Teller
from soakrig.bisect.campaign import CampaignLoop
from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.executors import Stratum
from soakrig.bisect.journal import Journal
from soakrig.bisect.journal_rows import Turn
from soakrig.bisect.launch_result import LaunchResult, void
from soakrig.bisect.stop import Stop
from soakrig.clock import FakeClock

Outcome = Callable[[ArmLaunch, Stratum], LaunchResult]
CLEAN_TURN_S, LAUNCH_S = 10.0, 240.0


def campaign(*names: str, **fields: Any) -> Campaign:
    """A campaign over variables of those names, each 1 in the control and 0 else; launches of 20 turns at most."""
    return Campaign.from_json({"turns": 20, "variables": {name: ["1", "0"] for name in names}, **fields})


def faulted(turn: float = 3, signature: str = XID) -> LaunchResult:
    return LaunchResult("faulted", turn, signature)


def clean(turns: float = 20) -> LaunchResult:
    return LaunchResult("clean", turns)


def interrupted() -> LaunchResult:
    return LaunchResult("interrupted", reason="stopped by Ctrl-C")


def guilty(*names: str, hazard: float = 1 / 8, seed: int = 0) -> Outcome:
    """A world in which the fault needs each of ``names`` at the control's value; of none, it comes in every arm."""
    rng = random.Random(seed)

    def outcome(launch: ArmLaunch, stratum: Stratum) -> LaunchResult:
        values = launch.campaign.arm(launch.arm).values
        here = hazard if all(values[name] == "1" for name in names) else 0.0
        turn = draw(rng, here, int(launch.campaign.cap))
        return clean(launch.campaign.cap) if turn is None else faulted(turn)

    return outcome


def by_arm(script: Mapping[str, LaunchResult], otherwise: Outcome | None = None) -> Outcome:
    """The same for every launch of an arm; other arms fault at turn 3 unless ``otherwise`` says more."""
    return lambda launch, stratum: (
        script.get(launch.arm) or (faulted() if otherwise is None else otherwise(launch, stratum))
    )


@dataclass
class StubExecutor:
    """``outcome`` says what a launch comes to; ``left`` what its teardown leaves, by the launch's number. ``launched``:
    every launch with its stratum. ``cleared``: marks that were asked to be cleared; ``stuck``: what that leaves.
    ``during(launch, stop)`` is called before the
    result is told. ``proofs``: told when a launch is ready."""

    outcome: Outcome
    clock: FakeClock = field(default_factory=FakeClock)
    strata: Sequence[Stratum] = (Stratum(),)
    left: Mapping[int, list[str]] = field(default_factory=dict[int, list[str]])
    during: Callable[[ArmLaunch, Stop], None] = lambda launch, stop: None
    stuck: list[str] = field(default_factory=list[str])
    launched: list[tuple[ArmLaunch, Stratum]] = field(default_factory=list[tuple[ArmLaunch, Stratum]])
    cleared: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    proofs: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def arms(self) -> list[str]:
        """Arms in the order of their launches."""
        return [launch.arm for launch, _ in self.launched]

    def machine(self, stratum: Stratum) -> dict[str, Any]:
        return {"made_up": stratum.name or "this host"}

    def run(self, launch: ArmLaunch, stratum: Stratum, tell: Teller, stop: Stop) -> None:
        self.launched.append((launch, stratum))
        self.clock.wait(threading.Event(), LAUNCH_S)
        result = self.outcome(launch, stratum)
        if result.result != "void":
            tell.started({"pid": 1, "since": 0.0, "mark": launch.mark})
            tell.ready({"proofs": dict(self.proofs)})
            tell.probing()
            self.clock.wait(threading.Event(), CLEAN_TURN_S * result.exposure)
            if result.exposure:
                tell.turn(Turn(1, "ok", result.exposure))
        self.during(launch, stop)
        tell.ended(result)
        tell.gone(self.left.get(launch.number, []))

    def clear(self, mark: str, stratum: Stratum) -> list[str]:
        self.cleared.append((mark, stratum.name))
        return self.stuck

    def close(self) -> None:
        """Nothing is held."""


class WaitingClock(FakeClock):
    """Remembers every wait of the loop that is given it."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.waited.append(seconds)
        return super().wait(event, seconds)


def loop(journal: Journal, spec: Campaign, executor: StubExecutor, **fields: Any) -> CampaignLoop:
    """A loop on the executor's clock."""
    given: dict[str, Any] = {"clock": executor.clock, **fields}
    return CampaignLoop(journal, spec, executor, **given)


def create(folder: Path, spec: Campaign, executor: StubExecutor, boot_id: str = "boot-one") -> Journal:
    """A new journal on the executor's clock."""
    return Journal.create(folder, spec.to_json(), boot_id=boot_id, now=executor.clock.time)


def resume(folder: Path, executor: StubExecutor, boot_id: str = "boot-one") -> Journal:
    """The journal again, on the executor's clock."""
    return Journal.resume(folder, boot_id=boot_id, now=executor.clock.time)


def voids(*arms: str, reason: str = "the engine did not start: made up") -> Outcome:
    """Those arms are void, each time; the others fault at turn 3."""
    return by_arm({arm: void(reason) for arm in arms})


def names(executor: StubExecutor, arms: Collection[str]) -> list[str]:
    """Launched arms out of ``arms``, in order."""
    return [arm for arm in executor.arms if arm in arms]


def settled(journal: Journal) -> bool:
    """Every run has one result and is settled, and their numbers have no gap."""
    runs = journal.runs()
    numbers = [run.id for run in runs] == list(range(1, len(runs) + 1))
    return numbers and all(run.state == "settled" and run.result is not None for run in runs)
