"""The judge: reads the events of a run, one at a time, and says what they support.

The same code judges while a run goes on, at its end, and again from disk (``soak report --rejudge``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from soakrig.record.counters import CounterWatch
from soakrig.record.events import (
    EngineChecked,
    EngineSwitched,
    Event,
    FindingMade,
    RunEnded,
    SampleTaken,
    SignalSeen,
    SourceChanged,
    ToolLagged,
    TurnDone,
    TurnSent,
)
from soakrig.record.exposure import ExposureCount
from soakrig.record.faults import KEPT_SIGNALS, FaultBook
from soakrig.record.finding import Finding
from soakrig.record.gates import parse_gate
from soakrig.record.hazard import upper_95
from soakrig.record.latency import LatencyCount
from soakrig.record.manifest import Manifest
from soakrig.record.offload import OffloadCount
from soakrig.record.outcome import OUTCOMES
from soakrig.record.result import (
    EXIT_CODES,
    EngineEnd,
    Exposure,
    Fault,
    FirstBad,
    Hazard,
    Result,
    Source,
    ToolHealth,
    no_sources,
)
from soakrig.record.verdict import Verdict

LAG_LIMIT_S = 5.0
"""A standstill of the tool longer than this makes a run inconclusive: it was not watching then."""


class Judge:
    """Feed it every event in order, then ask for the ``result``; asking changes nothing and may be repeated."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.exposure = ExposureCount()
        self.latency = LatencyCount()
        self.faults = FaultBook()
        self.outcomes: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.first_bad: FirstBad | None = None
        self.sources = no_sources()
        self.untrusted: list[str] = []
        self.was_live: set[str] = set()
        self.engine = EngineEnd()
        self.last_ok: dict[int, int] = {}
        self.tool = ToolHealth()
        self.ended: RunEnded | None = None
        self.first_sent: float | None = None
        self.last_done: float | None = None
        self.counters = CounterWatch()
        self.offload = OffloadCount()
        self.findings: list[Finding] = []
        self._death: EngineChecked | None = None

    def feed(self, event: Event) -> None:
        """Take one event in. Notes change nothing."""
        match event:
            case TurnSent():
                if self.first_sent is None:
                    self.first_sent = event.mono
                self.exposure.sent(event)
            case TurnDone():
                self._turn(event)
            case SignalSeen():
                signal = event.signal
                self.faults.add(signal, self.exposure.at(signal.mono or event.mono, signal.error_s))
            case SourceChanged():
                self._source(event)
            case EngineChecked():
                self._engine(event)
            case ToolLagged():
                self.tool.lags += 1
                self.tool.lag_max_s = max(self.tool.lag_max_s, event.seconds)
            case SampleTaken():
                self.counters.sample(event)
                self.offload.sample(event)
            case FindingMade():
                self.findings.append(event.finding)
            case EngineSwitched():
                if not self.counters.contradiction:
                    self.counters = CounterWatch()  # the next engine counts from zero
            case RunEnded():
                self.ended = event
            case _:
                pass

    def result(self) -> Result:
        """What the events so far support."""
        unfinished = self.exposure.unfinished()
        outcomes = {name: self.outcomes[name] for name in OUTCOMES if self.outcomes[name]}
        if unfinished:
            outcomes["aborted"] = outcomes.get("aborted", 0) + len(unfinished)
        faults = self._all_faults()
        trials = sum(outcomes.values()) - outcomes.get("post_mortem", 0) - outcomes.get("aborted", 0)
        bad = trials - outcomes.get("ok", 0)
        hazard = Hazard(faults=min(trials, max(len(faults), bad)), exposure=trials)
        hazard.upper_95 = upper_95(hazard.faults, hazard.exposure)
        wall = (self.last_done or 0.0) - (self.first_sent or 0.0) if self.first_sent is not None else 0.0
        result = Result(
            run_id=self.manifest.run_id,
            verdict="inconclusive",
            exit_code=EXIT_CODES["inconclusive"],
            reasons=[],
            simulated=self.manifest.simulated,
            exposure=Exposure(
                turns=self.exposure.turns,
                prompt_tokens=self.exposure.prompt_tokens,
                output_tokens=self.exposure.output_tokens,
                busy_seconds=round(self.exposure.busy_seconds, 3),
            ),
            outcomes=outcomes,
            first_bad=self.first_bad,
            faults=faults,
            engine=self.engine,
            latency=self.latency.latency(wall),
            sources=self.sources,
            hazard=hazard,
            gates=[],
            tool=self.tool,
            offload=self.offload.figures(),
            findings=list(self.findings),
            accepted=dict(self.accepted),
            ended=self.ended.reason if self.ended else "cut_off",
            settings=self.manifest.settings,
            fingerprint=self.manifest.fingerprint,
        )
        result.gates = [parse_gate(text).check(result) for text in self.manifest.gates]
        verdict = self._verdict(result, unfinished)
        result.verdict, result.exit_code, result.reasons = verdict.name, EXIT_CODES[verdict.name], verdict.reasons
        result.unknown = verdict.unknowns
        return result

    # -- one event -----------------------------------------------------------------------------------------------

    def _turn(self, event: TurnDone) -> None:
        if not self.exposure.is_open(event.conversation, event.turn):
            name = f"turn {event.turn} of conversation {event.conversation}"
            self.untrusted.append(f"{name} ends twice in the events, or was never sent")
            return
        self.exposure.done(event)
        self.latency.add(event)
        self.counters.turn(event)
        self.outcomes[event.outcome] += 1
        self.accepted.update(event.accepted)
        self.last_done = max(self.last_done or event.mono, event.mono)
        if event.outcome == "ok":
            self.last_ok[event.conversation] = max(event.turn, self.last_ok.get(event.conversation, 0))
        elif self.first_bad is None and event.outcome != "aborted":
            self.first_bad = FirstBad(
                conversation=event.conversation, turn=event.turn, outcome=event.outcome, why=event.why
            )

    def _source(self, event: SourceChanged) -> None:
        state = event.state
        before = self.sources[state.name]
        worst = state.state
        late = before.state == "absent" and (self.first_sent is not None or state.name in self.was_live)
        if worst == "live" and (late or (state.name in self.was_live and before.state == "partial")):
            worst = "partial"  # a gap does not heal, and what came late was not watched before
            state = replace(state, detail=f"not watched for the whole run; {state.detail}")
        if worst != "absent":
            self.was_live.add(state.name)
        elif state.name in self.was_live and before.state != "absent":
            state.detail = f"lost in mid-run: {state.detail}"
        if state.untrusted:
            self.untrusted.append(state.detail)
        detail = state.detail or before.detail
        self.sources[state.name] = Source(state=worst, detail=detail, lost=max(state.lost, before.lost))

    def _engine(self, event: EngineChecked) -> None:
        if self.engine.alive is False:
            if event.exit_status is not None:
                self.engine.exit_status = event.exit_status
            return
        self.engine.alive, self.engine.how = event.alive, event.how
        self.engine.exit_status = event.exit_status
        if event.alive is False:
            self.exposure.close(event.mono)
            self._death = event
            conversation = event.conversation
            if conversation is None:
                conversation = max(self.last_ok, key=lambda c: self.last_ok[c], default=0)
            self.engine.died_after_turn = self.last_ok.get(conversation, 0)

    # -- the end -------------------------------------------------------------------------------------------------

    def _all_faults(self) -> list[Fault]:
        faults = self.faults.faults(simulated=self.manifest.simulated)
        for fault in faults:
            self._prefer_turn_of_death(fault)
        if self._death is not None and not faults:
            found = self.exposure.find(self._death.conversation, self._death.turn)
            span = found or self.exposure.at(self._death.mono).span
            status = self.engine.exit_status
            faults.append(
                Fault(
                    signature="engine death" + (f", exit status {status}" if status is not None else ""),
                    source="liveness",
                    time=self._death.time,
                    turn=span.turn if span else None,
                    conversation=span.conversation if span else None,
                    context_tokens=span.context_tokens if span else None,
                    seconds_under_load=round(self.exposure.busy_seconds, 3),
                    raw=self.engine.how,
                    attribution="exact" if found else "nearest" if span else "none",
                )
            )
        return faults

    def _prefer_turn_of_death(self, fault: Fault) -> None:
        """Where a signal's time does not tell which of several turns it hit, the one that found the death does."""
        death = self._death
        if death is None or fault.attribution != "several":
            return
        span = self.exposure.find(death.conversation, death.turn)
        if span is not None and (span.conversation, span.turn) in fault.in_flight:
            fault.conversation, fault.turn, fault.context_tokens = span.conversation, span.turn, span.context_tokens
            fault.attribution = "exact"

    def _verdict(self, result: Result, unfinished: list[tuple[int, int]]) -> Verdict:
        verdict = Verdict()
        for fault in result.faults:
            place = "with no turn in flight"
            if fault.turn is not None:
                near = "" if fault.attribution == "exact" else f" ({fault.attribution})"
                place = f"at turn {fault.turn} of conversation {fault.conversation}{near}"
                if fault.context_tokens:
                    place += f", {fault.context_tokens} context tokens"
            verdict.fail(f"fault: {fault.signature} {place}")
        if self.engine.alive is False:
            verdict.fail(f"the engine died after turn {self.engine.died_after_turn}: {self.engine.how}")
        if result.offload is not None and result.offload.bad_ids:
            count = result.offload.bad_ids
            verdict.fail(f"{count} expert id{'s' if count > 1 else ''} out of range in the engine's routing")
        for name, count in result.outcomes.items():
            if name not in ("ok", "aborted"):
                verdict.fail(f"{count} turn{'s' if count > 1 else ''} {name}")
        for finding in result.findings:
            if finding.says == "fault":
                verdict.fail(finding.text)
            elif finding.says == "unknown":
                verdict.unknown(finding.text)
        for gate in result.gates:
            if gate.held is False:
                verdict.fail(f"gate broken: {gate.gate}, measured {gate.value:.4g}")
            elif gate.held is None:
                verdict.unknown(f"gate not measured: {gate.gate}")
        self._unknowns(verdict, result, unfinished)
        self._remarks(verdict, result)
        return verdict

    def _unknowns(self, verdict: Verdict, result: Result, unfinished: list[tuple[int, int]]) -> None:
        log = self.sources["kernel_log"]
        if log.state != "live":
            verdict.unknown(f"the kernel log was not watched for the whole run ({log.state}): {log.detail}")
        elif log.lost:
            verdict.unknown(f"{log.lost} kernel-log records were lost")
        for detail in self.untrusted:
            verdict.unknown(detail)
        if self.ended is None:
            verdict.unknown("the run was cut off: its events end without an end")
        elif self.ended.reason in ("interrupted", "stopped", "store", "tool_error"):
            verdict.unknown(f"the run ended early ({self.ended.reason}): {self.ended.detail}")
        missing = self._missing()
        if missing:
            verdict.unknown(f"exposure not reached: {missing}")
        aborted = self.outcomes["aborted"] + len(unfinished)
        if aborted:
            verdict.unknown(f"{aborted} turn{'s' if aborted > 1 else ''} cut short by this tool")
        if self.engine.alive is None:
            how = f": {self.engine.how}" if self.engine.how else ""
            verdict.unknown(f"whether the engine lives was not found out at the end{how}")
        if self.tool.lag_max_s > LAG_LIMIT_S:
            verdict.unknown(f"this tool stood still for {self.tool.lag_max_s:.1f} s and did not watch in that time")
        if self.counters.contradiction:
            verdict.unknown(self.counters.contradiction)
        injected = self.faults.injected()
        if injected and not self.manifest.simulated:
            verdict.unknown(
                f"{len(injected)} fault line{'s' if len(injected) > 1 else ''} in the kernel log came from userspace, "
                f"not from the kernel (injected): {injected[0].signature or injected[0].raw}"
            )
        if self.faults.dropped:
            verdict.unknown(f"{self.faults.dropped} fault signals beyond the first {KEPT_SIGNALS} were not judged")

    def _missing(self) -> str:
        plan = self.manifest.plan
        if plan.turns is not None:
            planned, done = plan.total_turns, self.exposure.turns
            return f"{done} of {planned} turns" if done < planned else ""
        load = self.exposure.busy_seconds
        wanted = plan.seconds or 0.0
        if self.first_sent is None or self.last_done is None:
            return f"0 of {wanted:g} s"
        span = self.last_done - self.first_sent
        return f"{span:.1f} of {wanted:.1f} s (busy {load:.1f} s)" if span < wanted else ""

    def _remarks(self, verdict: Verdict, result: Result) -> None:
        for name, count in self.accepted.items():
            verdict.remark(f"accepted by --accept {name}: {count} turn{'s' if count > 1 else ''}")
        if result.simulated:
            verdict.remark("simulated: the engine ran with a planted fault (SOAKRIG_PLANT)")
        if verdict.name == "pass" and self.manifest.plan.seconds is not None:
            verdict.remark(f"busy {result.exposure.busy_seconds:.1f} s of {self.manifest.plan.seconds:.1f} s of load")
        if verdict.name == "pass" and result.hazard.upper_95 is not None:
            verdict.remark(
                f"{result.hazard.exposure} clean turns exclude, at 95 %, a fault rate above "
                f"{100 * result.hazard.upper_95:.2g} % per turn; they do not show that there is no fault, and they "
                "speak of this load and these settings only"
            )
