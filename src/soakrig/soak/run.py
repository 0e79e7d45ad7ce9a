"""One run: one load against one target under watch, from the first question to the verdict on disk."""

from __future__ import annotations

import asyncio
import contextlib
import signal as signals
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from soakrig.clock import Clock
from soakrig.errors import StoreError
from soakrig.record.events import (
    EngineChecked,
    Event,
    RunEnded,
    SampleTaken,
    SignalSeen,
    SourceChanged,
    ToolLagged,
)
from soakrig.record.judge import Judge
from soakrig.record.manifest import Manifest, Plan
from soakrig.record.outcome import OutcomeName
from soakrig.record.request_log import RequestLog
from soakrig.record.result import Result
from soakrig.record.signal import Signal, SourceName, SourceState
from soakrig.record.store import RESULT, RunStore, new_run_id
from soakrig.soak.client import ChatClient, Timeouts
from soakrig.soak.conversation import Conversation
from soakrig.soak.evidence import Evidence
from soakrig.soak.fingerprint import fingerprint, host_facts
from soakrig.soak.liveness import RETRY_S
from soakrig.soak.load import Load
from soakrig.soak.probe import Probe, probe
from soakrig.soak.stage import Stage, make_liveness
from soakrig.soak.target import Target
from soakrig.soak.watch.all_watchers import Watchers, all_watchers
from soakrig.soak.watch.watcher import Sample, WatchGroup

MACHINE: tuple[SourceName, ...] = ("kernel_log", "nvml")
"""Sources that are the machine's: watched also while no engine runs."""


@dataclass
class RunSpec:
    """What a run is to do. ``conversations`` makes the load once the target has said what it is; ``settle_*``: how
    long the watchers go on after the last turn, since a fault's last lines come late; ``retry_s``: the pause before an
    engine that gave no sign of life is asked once more. ``tolerated``: outcomes that do not count towards
    ``max_bad``. ``procedure``: what drives the load, where it is more than its conversations."""

    reproducer: str
    plan: Plan
    conversations: Callable[[Probe], Sequence[Conversation]]
    procedure: Callable[[Stage], Awaitable[None]] | None = None
    seed: int = 0
    gates: list[str] = field(default_factory=list[str])
    accept: list[str] = field(default_factory=list[str])
    timeouts: Timeouts = field(default_factory=Timeouts)
    kernel_log: str = "auto"
    max_bad: int = 10
    tolerated: frozenset[OutcomeName] = frozenset()
    on_fault: Literal["stop", "continue"] = "stop"
    keep_text: bool = True
    transcript: dict[str, Any] | None = None
    load: dict[str, Any] = field(default_factory=dict[str, Any])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    launched: Literal["embedded", "vllm"] | None = None
    runs_dir: Path = Path("runs")
    run_id: str = ""
    settle_clean_s: float = 0.5
    settle_bad_s: float = 3.0
    retry_s: float = RETRY_S


@dataclass
class _Sink:
    """Takes what the watchers' threads see into the event loop, in order."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    take: Callable[[Event], None]

    def signal(self, signal: Signal) -> None:
        signal.time = signal.time or self.clock.time()
        signal.mono = signal.mono or self.clock.monotonic()
        self._post(SignalSeen(self.clock.time(), self.clock.monotonic(), signal))

    def sample(self, source: SourceName, sample: Sample) -> None:
        self._post(SampleTaken(self.clock.time(), self.clock.monotonic(), source, sample))

    def state(self, state: SourceState) -> None:
        self._post(SourceChanged(self.clock.time(), self.clock.monotonic(), state))

    def _post(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            self.loop.call_soon_threadsafe(self.take, event)


class SoakRun:
    """Runs one ``RunSpec``. ``observer`` sees every event after the judge has (live views).

    With ``deaf_afterwards``, SIGINT, SIGTERM and SIGHUP are ignored once the run is over: the verdict is there and
    only has to be shown. For a process that ends then.
    """

    def __init__(
        self,
        spec: RunSpec,
        target: Target,
        clock: Clock,
        observer: Callable[[Event, Judge], None] = lambda event, judge: None,
        *,
        deaf_afterwards: bool = False,
    ) -> None:
        self.spec, self.target, self.clock = spec, target, clock
        self.observer: Callable[[Event, Judge], None] | None = observer
        self.error: Exception | None = None
        self.view_error: Exception | None = None
        self.deaf_afterwards = deaf_afterwards
        self.folder: Path | None = None
        self._task: asyncio.Task[None] | None = None
        self._interrupts = 0
        self._ready, self._early = False, ""

    async def run(self) -> Result:
        """The whole run; its result is also in the run folder.

        Raises ``TargetError`` before anything is written when the target is no OpenAI-compatible server.
        """
        client = ChatClient(self.target, self.clock, self.spec.timeouts)
        async with client:
            probed = await probe(client, self.target.model)
            conversations = self.spec.conversations(probed)
            watchers = all_watchers(self.target, self.spec.kernel_log, self.clock, self._keep_kernel_line)
            manifest = self._manifest(probed)
            self.store = RunStore.create(self.spec.runs_dir, manifest)
            self.folder = self.store.folder
            self.judge = Judge(manifest)
            self.evidence = Evidence(self.store, self.spec.keep_text, self.target.engine_log)
            try:
                return await self._watched(client, probed, conversations, watchers)
            finally:
                self.store.close()

    async def _watched(
        self, client: ChatClient, probed: Probe, conversations: Sequence[Conversation], watchers: Watchers
    ) -> Result:
        client.progressing = watchers.progressing
        client.on_lag = lambda seconds: self._take(ToolLagged(self.clock.time(), self.clock.monotonic(), seconds))
        self.load = Load(
            client,
            make_liveness(client, probed, watchers, self.spec.accept, self.spec.retry_s),
            self.store,
            RequestLog(self.store, self.spec.keep_text),
            self.evidence,
            self.clock,
            self.spec.plan,
            self._tell,
            self.spec.accept,
            self.spec.max_bad,
            self.spec.tolerated,
        )
        self._ready = True
        if self._early:
            self.load.end("interrupted", f"{self._early} before the first turn")
        for state in watchers.absent:
            self._take(SourceChanged(self.clock.time(), self.clock.monotonic(), state))
        sink = _Sink(asyncio.get_running_loop(), self.clock, self._take)
        machine = WatchGroup([w for w in watchers.watchers if w.source in MACHINE], sink, self.clock)
        group = WatchGroup([w for w in watchers.watchers if w.source not in MACHINE], sink, self.clock)
        spec = self.spec
        stage = Stage(
            client, self.load, self.clock, self._take, sink, probed, conversations, watchers, group,
            spec.accept, spec.retry_s,
        )  # fmt: skip
        with self._signals():
            await asyncio.to_thread(machine.start)
            await asyncio.to_thread(group.start)
            try:
                await self._loaded(stage)
                await self._interruptible(self._settle(stage))
            finally:
                if not stage.gone:
                    await asyncio.to_thread(stage.group.stop)
                await asyncio.to_thread(machine.stop)
                await asyncio.sleep(0)  # what the watchers' last polls brought
            return await self._conclude()

    async def _loaded(self, stage: Stage) -> None:
        procedure = self.spec.procedure
        try:
            await self._interruptible(self._driven(procedure(stage) if procedure is not None else stage.run()))
        except StoreError as error:
            self.load.ended, self.load.detail = "store", error.message
        except Exception as error:
            self.load.ended, self.load.detail = "tool_error", f"{type(error).__name__}: {error}"
            self.error = error

    async def _driven(self, work: Awaitable[None]) -> None:
        await work
        if self.load.ended is None:
            self.load.end("completed")

    async def _interruptible(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that a second Ctrl-C ends at once."""
        self._task = asyncio.create_task(work)
        try:
            await self._task
        except asyncio.CancelledError:
            if self._interrupts < 2:
                raise
            self.load.end("interrupted", "stopped at once by a second Ctrl-C")

    async def _settle(self, stage: Stage) -> None:
        """Let late signals come in, then see whether the engine lives."""
        if self._interrupts >= 2:
            return
        bad = self.load.bad or self.load.dead or self.load.ended == "fault"
        await self.clock.sleep(self.spec.settle_bad_s if bad else self.spec.settle_clean_s)
        if stage.gone:
            return  # ended by the load itself, and asked before that
        status = stage.watchers.exit_status
        now, mono = self.clock.time(), self.clock.monotonic()
        if self.load.dead:
            self._take(EngineChecked(now, mono, False, "", status()))
            return
        life = await self.load.liveness.thorough()
        self._take(EngineChecked(self.clock.time(), self.clock.monotonic(), life.alive, life.how, status()))

    async def _conclude(self) -> Result:
        end = RunEnded(self.clock.time(), self.clock.monotonic(), self.load.ended or "tool_error", self.load.detail)
        try:
            self.store.check()
            await self.store.commit(end)
        except StoreError as error:
            end.reason, end.detail = "store", error.message
        self._tell(end)
        result = self.judge.result()
        try:
            self.store.write_json(RESULT, result.to_json())
        except StoreError as error:
            if end.reason != "store":
                self._tell(RunEnded(end.time, end.mono, "store", error.message))
                result = self.judge.result()
        return result

    # -- events --------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        """An event from outside the load: judge it, keep it, act on it."""
        self.store.append(event)
        self._tell(event)

    def _tell(self, event: Event) -> None:
        self.judge.feed(event)
        if isinstance(event, SampleTaken):
            self.evidence.sample(event)
        elif isinstance(event, SignalSeen):
            self._signal(event)
        if self.observer is not None:
            try:
                self.observer(event, self.judge)
            except Exception as error:  # a view must never end a run
                self.observer, self.view_error = None, error

    def _signal(self, event: SignalSeen) -> None:
        seen = event.signal
        if seen.severity != "fault" or (seen.injected and not self.judge.manifest.simulated):
            return
        self.evidence.freeze(seen.kind, event, self.load.in_flight(seen.mono))
        if self.spec.on_fault == "stop":
            self.load.end("fault", seen.signature or seen.raw[:200])

    def _keep_kernel_line(self, raw: str) -> None:
        self.store.write_lines("kernel.log", [raw.encode("utf-8", "replace")])

    # -- interruption --------------------------------------------------------------------------------------------

    def interrupt(self, how: str = "Ctrl-C") -> None:
        """The first call ends the run after the turns in flight; the second ends it at once."""
        self._interrupts += 1
        if not self._ready:
            self._early = self._early or how
        elif self._interrupts == 1:
            self.load.end("interrupted", f"{how} after {self.judge.exposure.turns} turns")
        elif self._task is not None:
            self._task.cancel()

    @contextlib.contextmanager
    def _signals(self):
        loop = asyncio.get_running_loop()
        handled: list[int] = []
        for number, name in ((signals.SIGINT, "Ctrl-C"), (signals.SIGTERM, "SIGTERM"), (signals.SIGHUP, "SIGHUP")):
            if signals.getsignal(number) is signals.SIG_IGN:
                continue  # nohup, or a background job of a script: whoever set that meant it
            with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: somebody else handles them
                loop.add_signal_handler(number, self.interrupt, name)
                handled.append(number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
                if self.deaf_afterwards:
                    signals.signal(number, signals.SIG_IGN)

    def _manifest(self, probed: Probe) -> Manifest:
        spec = self.spec
        settings = {**spec.settings, "engine": probed.settings} if probed.settings else dict(spec.settings)
        return Manifest(
            run_id=spec.run_id or new_run_id(spec.reproducer, self.clock.time()),
            created=self.clock.time(),
            reproducer=spec.reproducer,
            plan=spec.plan,
            seed=spec.seed,
            gates=spec.gates,
            accept=spec.accept,
            base_url=self.target.base_url,
            model=probed.model,
            launched=spec.launched,
            kernel_log=spec.kernel_log,
            stall_timeout_s=spec.timeouts.stall,
            text_kept=spec.keep_text,
            transcript=spec.transcript,
            load=spec.load,
            simulated=probed.simulated,
            settings=settings,
            fingerprint=fingerprint(settings, probed.version),
            host=host_facts(),
        )
