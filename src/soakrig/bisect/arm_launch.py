"""One launch of an arm on this host: start the engine, prove the treatment, soak to the fault or the cap, tear down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.cards import Card, foreign, read_cards, wait_memory_back
from soakrig.bisect.journal_rows import Turn
from soakrig.bisect.launch_result import LaunchResult, read_result, void
from soakrig.bisect.stop import Stop
from soakrig.bisect.treatment import process_facts, prove_treatment
from soakrig.bisect.variables import known_settings
from soakrig.clock import Clock, RealClock
from soakrig.engine.bundled import launch_bundled
from soakrig.engine.keeper import descendants, every_stat, is_running, read_stat
from soakrig.engine.launcher import EngineProcess
from soakrig.errors import EngineStartError, SoakrigError, StoreError
from soakrig.record.events import Event, TurnDone
from soakrig.record.judge import Judge
from soakrig.record.result import Result
from soakrig.reproducers.engine_control import EngineControl
from soakrig.reproducers.registry import find_reproducer
from soakrig.soak.client import Timeouts
from soakrig.soak.run import RunSpec, SoakRun

STOP_GRACE_S = 10.0
ASK_S = 30.0


class Teller(Protocol):
    """Takes what happens in a launch, in order; each call returns once it is written down.

    What it raises ends the launch after a teardown.
    """

    def started(self, engine: Mapping[str, Any]) -> None:
        """The engine is there; ``engine``: pid, since, mark, argv and environment of its process, secrets hidden."""
        ...

    def ready(self, facts: Mapping[str, Any]) -> None:
        """It answers, and the treatment is proved; ``facts``: proofs by variable."""
        ...

    def probing(self) -> None:
        """The first turn is about to be sent."""
        ...

    def turn(self, turn: Turn) -> None:
        """A turn is over."""
        ...

    def ended(self, result: LaunchResult) -> None:
        """The result is known; the engine still runs."""
        ...

    def gone(self, left: list[str]) -> None:
        """The engine was torn down; ``left``: what did not end, in words."""
        ...

    def say(self, text: str) -> None:
        """For people, worth a line."""
        ...

    def progress(self, text: str) -> None:
        """For people: how far a start has come."""
        ...


@dataclass(frozen=True)
class ArmLaunch:
    """What to launch. ``arm``: its name. ``number``: the run's. ``folder``: the campaign's; run folders go below its
    ``runs``. ``mark``: of the engine's processes, so that a later process finds them.
    ``card``: CUDA_VISIBLE_DEVICES of the engine, None leaves the caller's. ``environment``: of the caller, None for
    that of the process that launches."""

    campaign: Campaign
    arm: str
    number: int
    folder: Path
    mark: str
    card: str | None = None
    environment: Mapping[str, str] | None = None

    @property
    def run_id(self) -> str:
        """Name of the run folder: ``0007-VLLM_MOE_DMA_STAGING-0``."""
        return f"{self.number:04d}-{re.sub(r'[^A-Za-z0-9._]+', '-', self.arm).strip('-.')[:60]}"

    @property
    def visible(self) -> str | None:
        """CUDA_VISIBLE_DEVICES of the engine; None where that of this process counts."""
        if self.card is not None or self.environment is None:
            return self.card
        return self.environment.get("CUDA_VISIBLE_DEVICES")

    @property
    def runs_dir(self) -> Path:
        return self.folder / "runs"


class _NotToldError(Exception):
    """The teller raised; its cause is what it raised."""


@dataclass
class ArmLauncher:
    """Carries launches out on this host, one at a time. ``read_cards``: the state of the GPUs that
    CUDA_VISIBLE_DEVICES names (None: all), None where there is no NVML; a seam, as there is no card everywhere."""

    clock: Clock = field(default_factory=RealClock)
    read_cards: Callable[[str | None], list[Card] | None] = lambda visible: cards_here(visible)
    _level: list[Card] | None = None

    def run(self, launch: ArmLaunch, tell: Teller, stop: Stop) -> None:
        """One launch, whole. Raises what ``tell`` raises, after the engine is gone; whatever else goes wrong makes the
        launch void."""
        occupied = self._occupied(launch, stop)
        if occupied:
            tell.ended(void(occupied))
            tell.gone([])
            return
        control = EngineControl(
            lambda number: self._start(launch, tell, lambda: control.give_up(), number),
            self.clock,
            vram=find_reproducer(launch.campaign.reproducer).vram,
            give_up=lambda: f"stopped by {stop.why}" if stop.why else "",
        )
        left: list[str] = []
        try:
            try:
                result = self._carried_out(launch, control, tell, stop)
            except _NotToldError as error:
                raise error.__cause__ or error from None
            except SoakrigError as error:
                result = _failed(error, stop)
            except Exception as error:
                tell.say("".join(traceback.format_exception(error)))
                result = void(f"a bug of soakrig: {type(error).__name__}: {error}")
            tell.ended(result)
        finally:
            if control.engine is not None:
                left = end_engine(control.engine, launch.campaign.limits.teardown, self.clock)
        tell.gone(left or control.stuck)

    def _carried_out(self, launch: ArmLaunch, control: EngineControl, tell: Teller, stop: Stop) -> LaunchResult:
        engine = control.start_engine()
        _told(tell.started, {"since": engine.create_time, "mark": launch.mark, **process_facts(engine.pid)})
        campaign = launch.campaign
        treatment = prove_treatment(
            campaign.arm(launch.arm), engine.pid, known_settings(campaign.engine), _settings(engine), engine.log_path
        )
        if treatment.failure:
            return void(f"treatment not in effect: {treatment.failure}")
        _told(tell.ready, {"proofs": dict(treatment.proofs)})
        result = self._soak(launch, control, tell, stop)
        if result.result == "clean" and control.engine and (found := self._foreign(launch, control.engine)):
            return void(found)  # a foreign load shifts the timing, and can hide the fault
        return result

    def _start(self, launch: ArmLaunch, tell: Teller, give_up: Callable[[], str], number: int) -> EngineProcess:
        arm = launch.campaign.arm(launch.arm)
        caller = dict(os.environ if launch.environment is None else launch.environment)
        if launch.card is not None:
            caller["CUDA_VISIBLE_DEVICES"] = launch.card
        order = launch.campaign.order(arm, caller=caller, mark=launch.mark)
        folder = launch.runs_dir / launch.run_id
        if number > 1:  # the load restarts it: a log of its own
            folder /= f"engine-{number}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make {folder}: {error.strerror or error}") from error
        reproducer = find_reproducer(launch.campaign.reproducer)
        if reproducer.order is not None:
            order = reproducer.order(launch.campaign.options, order)
        return launch_bundled(order, folder, tell.say, tell.progress, give_up)

    def _soak(self, launch: ArmLaunch, control: EngineControl, tell: Teller, stop: Stop) -> LaunchResult:
        campaign = launch.campaign
        arm, limits = campaign.arm(launch.arm), campaign.limits
        reproducer, options = find_reproducer(campaign.reproducer), campaign.options
        order = campaign.order(arm)
        spec = RunSpec(
            reproducer=campaign.reproducer,
            plan=campaign.planned,
            conversations=lambda probe: reproducer.load(options, probe),
            procedure=reproducer.drive(options, control),
            seed=options.seed,
            timeouts=Timeouts(stall=limits.stall, first_byte=max(limits.first_byte, limits.stall)),
            kernel_log=campaign.kernel_log,
            max_bad=limits.max_bad,
            tolerated=campaign.tolerated,
            load=options.recorded(),
            settings={**order.recorded(), "arm": arm.name},
            launched=order.launched,
            runs_dir=launch.runs_dir,
            run_id=launch.run_id,
        )
        watched = _Watched(campaign, tell)
        soaking = SoakRun(spec, control.target, self.clock, watched)
        watched.soaking = soaking
        _told(tell.probing)
        result = asyncio.run(_driven(soaking, stop, limits.run))
        if watched.error is not None:
            raise _NotToldError from watched.error
        found = read_result(result, campaign.unit, campaign.cap, campaign.tolerated)
        if found.result == "void" and stop.why:
            return LaunchResult("interrupted", found.exposure, reason=f"stopped by {stop.why}")
        return found

    def _occupied(self, launch: ArmLaunch, stop: Stop) -> str:
        """Why the card is not as it was before the first launch; empty where it is, or where there is none."""
        try:
            cards = self.read_cards(launch.visible)
            if cards is None:
                return ""
            if found := foreign(cards, lambda pid: False):
                return found
            self._level = cards if self._level is None else self._level
            return wait_memory_back(
                self._level,
                lambda: self.read_cards(launch.visible),
                self.clock,
                stop.event,
                launch.campaign.limits.teardown,
            )
        except SoakrigError as error:
            return error.message

    def _foreign(self, launch: ArmLaunch, engine: EngineProcess) -> str:
        cards = self.read_cards(launch.visible)
        if cards is None:
            return ""
        ours = {engine.pid} | {stat.pid for stat in descendants([engine.pid], every_stat())}
        return foreign(cards, lambda pid: pid in ours)


@dataclass
class _Watched:
    """Observes a run: tells each turn, and ends the run when that cannot be written down."""

    campaign: Campaign
    tell: Teller
    soaking: SoakRun | None = None
    error: Exception | None = None

    def __call__(self, event: Event, judge: Judge) -> None:
        if not isinstance(event, TurnDone) or self.error is not None:
            return
        work = 1.0 if self.campaign.unit == "turns" else float(event.output_tokens)
        if event.outcome in ("post_mortem", "aborted"):
            work = 0.0
        try:
            self.tell.turn(Turn(event.turn, event.outcome, work, event.conversation))
        except Exception as error:
            self.error = error
            if self.soaking is not None:
                self.soaking.interrupt("the journal")


async def _driven(soaking: SoakRun, stop: Stop, limit: float | None) -> Result:
    loop = asyncio.get_running_loop()
    if limit is not None:
        loop.call_later(limit, soaking.interrupt, f"the limit of {limit:g} s for a launch")
    with stop.telling(lambda how: _soon(loop, soaking, how)):
        return await soaking.run()


def _soon(loop: asyncio.AbstractEventLoop, soaking: SoakRun, how: str) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
        loop.call_soon_threadsafe(soaking.interrupt, how)


def _told(call: Callable[..., None], *args: Any) -> None:
    try:
        call(*args)
    except Exception as error:
        raise _NotToldError from error


def _settings(engine: EngineProcess) -> dict[str, Any] | None:
    """The body of the engine's ``/soakrig/settings``, None where it has none."""
    try:
        reply = httpx.get(f"{engine.base_url}/soakrig/settings", timeout=ASK_S, trust_env=False)
        body: Any = reply.json() if reply.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return body if isinstance(body, dict) else None  # pyright: ignore[reportUnknownVariableType]


def _failed(error: SoakrigError, stop: Stop) -> LaunchResult:
    if stop.why:
        return LaunchResult("interrupted", reason=f"stopped by {stop.why}")
    what = "the engine did not start: " if isinstance(error, EngineStartError) else ""
    first, *words = error.message.strip().split("\n")
    if first.endswith(":") and words:  # its log's last lines follow: the first error among them, else the last
        first += " " + next((line for line in words if line.startswith("error")), words[-1]).strip()
    return void(what + first)


def cards_here(visible: str | None) -> list[Card] | None:
    """The GPUs that an engine of this process would see; ``visible``: CUDA_VISIBLE_DEVICES, None for this process's.
    None where there is no NVML."""
    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return read_cards(visible, RealClock(), order=os.environ.get("CUDA_DEVICE_ORDER"))


def end_engine(engine: EngineProcess, deadline: float, clock: Clock) -> list[str]:
    """Stop an engine; what is still there ``deadline`` seconds later, in words (empty as a rule)."""
    left = engine.stop(min(STOP_GRACE_S, deadline))
    end = clock.monotonic() + deadline
    never = threading.Event()
    while left and clock.monotonic() < end:
        clock.wait(never, 0.5)
        left = [one for one in left if (stat := read_stat(one.pid)) is not None and is_running(stat)]
    return [f"process {one.pid} ({one.name}) in state {one.state}" for one in left]
