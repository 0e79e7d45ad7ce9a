"""Whole runs against loopback servers: the verdict, the exit code, and what stays on disk."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from builders import manifest
from soakrig.errors import TargetError, UsageError
from soakrig.record.events import EngineChecked, SignalSeen, TurnDone, TurnSent
from soakrig.record.request_log import read_requests
from soakrig.record.store import RunReader
from soakrig.reproducers.reproducer import LoadOptions
from soakrig.soak.run import SoakRun
from soakrig.soak.transcript import TranscriptConversation, read_transcript
from wire import loopback
from wire.soaking import is_canary, soak, spec
from wire.test_outcomes import CASES

BAD = [(handler, name) for handler, name in CASES if name != "ok"]


def test_a_good_server_passes(tmp_path: Path) -> None:
    result, run = soak(loopback.good, spec(tmp_path, turns=5))
    assert (result.verdict, result.exit_code) == ("pass", 0), result.reasons
    assert result.outcomes == {"ok": 5}
    assert run.folder is not None
    reader = RunReader(run.folder)
    assert reader.stored_result() == result
    assert reader.judge().result() == result, "judged again from disk, the same"


@pytest.mark.parametrize(("handler", "outcome"), BAD, ids=[handler.__name__ for handler, _ in BAD])
def test_no_bad_server_is_ever_ok(tmp_path: Path, handler: loopback.Handler, outcome: str) -> None:
    result, run = soak(handler, spec(tmp_path, turns=2, stall=0.4))
    assert (result.verdict, result.exit_code) == ("fail", 1)
    assert "ok" not in result.outcomes
    assert result.first_bad is not None
    assert result.first_bad.outcome == outcome
    assert run.folder is not None
    assert list((run.folder / "evidence").iterdir())


def test_the_seed_s_case_a_proxy_that_goes_on_answering_200(tmp_path: Path) -> None:
    """The engine behind the proxy dies in turn 34 of 60; from then on: 200, an empty stream, for ever."""

    async def proxy(x: loopback.Exchange) -> None:
        if x.number < 34:
            await loopback.good(x)
        else:
            await loopback.zero_bytes(x)

    result, run = soak(proxy, spec(tmp_path, turns=60))
    assert (result.verdict, result.exit_code) == ("fail", 1)
    assert result.engine.alive is False
    assert result.engine.died_after_turn == 33
    assert result.outcomes == {"ok": 33, "empty_200": 1}
    assert result.first_bad is not None
    assert (result.first_bad.turn, result.first_bad.outcome) == (34, "empty_200")
    events = list(RunReader(run.folder).events())
    died = next(n for n, e in enumerate(events) if isinstance(e, EngineChecked) and not e.alive)
    assert not any(isinstance(e, TurnDone) and e.outcome == "ok" for e in events[died:])


def test_with_many_conversations_everything_after_the_death_is_post_mortem(tmp_path: Path) -> None:
    async def proxy(x: loopback.Exchange) -> None:
        if x.number < 40:
            await loopback.good(x)
        elif b'"tools"' in x.body and x.number % 3:
            await x.head()
            await asyncio.Event().wait()
        else:
            await loopback.zero_bytes(x)

    options = LoadOptions(conversations=4, tools=2, max_tokens=64)
    result, run = soak(proxy, spec(tmp_path, turns=60, options=options, stall=20.0))
    assert result.verdict == "fail"
    assert result.engine.alive is False
    events = list(RunReader(run.folder).events())
    died = next(n for n, e in enumerate(events) if isinstance(e, EngineChecked) and not e.alive)
    after = [e.outcome for e in events[died:] if isinstance(e, TurnDone)]
    assert after
    assert set(after) == {"post_mortem"}
    assert sum(result.outcomes.values()) == sum(isinstance(e, TurnSent) for e in events)


def test_one_bad_turn_of_a_living_engine_fails_and_the_run_goes_on(tmp_path: Path) -> None:
    async def once(x: loopback.Exchange) -> None:
        await (loopback.cut_cleanly(x) if x.number == 2 else loopback.good(x))

    result, _ = soak(once, spec(tmp_path, turns=5))
    assert result.verdict == "fail"
    assert result.outcomes == {"ok": 4, "truncated": 1}
    assert result.engine.alive is True
    assert result.faults == []
    assert result.hazard.faults == 1


def test_too_many_bad_turns_end_the_run(tmp_path: Path) -> None:
    async def markup(x: loopback.Exchange) -> None:
        await (loopback.tool_markup_key(x) if b'"tools"' in x.body else loopback.good(x))

    result, _ = soak(markup, spec(tmp_path, turns=50, max_bad=4))
    assert result.outcomes == {"tool_malformed": 4}
    assert result.ended == "too_many_bad"


XID = (
    "NVRM: Xid (PCI:0000:01:00): 31, pid=4242, name=VLLM::EngineCor, Ch 00000008, intr 00000000. MMU Fault: ENGINE "
    "GRAPHICS GPC0 GPCCLIENT_T1_8 faulted @ 0x73ac_1c000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE\n"
)


def test_an_xid_in_the_kernel_log_is_tied_to_its_turn_and_ends_the_run(tmp_path: Path) -> None:
    log = tmp_path / "kernel-source.log"

    async def faulting(x: loopback.Exchange) -> None:
        if x.number != 4:
            await loopback.good(x)
            return
        await x.head()
        await x.chunk(loopback.ROLE)
        with log.open("a") as stream:
            stream.write("[ 1234.567890] " + XID)
        await asyncio.sleep(0.4)  # the fault comes while the turn is in flight
        for part in [*loopback.words(), loopback.delta(finish="stop"), loopback.usage(), loopback.DONE]:
            await x.chunk(part)
        await x.end()

    result, run = soak(faulting, spec(tmp_path, turns=10, stall=5.0))
    assert result.verdict == "fail"
    assert result.ended == "fault"
    assert result.outcomes == {"ok": 4}
    (fault,) = result.faults
    assert (fault.xid, fault.turn, fault.conversation, fault.pci) == (31, 4, 0, "0000:01:00")
    assert fault.context_tokens
    assert (fault.pid, fault.process) == (4242, "VLLM::EngineCor")
    assert "FAULT_PDE" in fault.signature
    case = next((run.folder / "evidence").iterdir())
    names = {path.name for path in case.iterdir()}
    assert {"cause.json", "c0000-t00004-request.json", "c0000-t00004-response.sse"} <= names
    assert b"assistant" in (case / "c0000-t00004-response.sse").read_bytes(), "the bytes so far"
    assert XID.strip() in (run.folder / "kernel.log").read_text()


def test_a_run_may_go_on_after_a_fault(tmp_path: Path) -> None:
    log = tmp_path / "kernel-source.log"

    async def faulting(x: loopback.Exchange) -> None:
        if x.number == 2:
            with log.open("a") as stream:
                stream.write(XID)
            await asyncio.sleep(0.3)
        await loopback.good(x)

    result, _ = soak(faulting, spec(tmp_path, turns=5, on_fault="continue", stall=5.0))
    assert result.outcomes == {"ok": 5}
    assert result.verdict == "fail"
    assert result.faults[0].turn == 2


def test_no_kernel_log_is_inconclusive_with_the_remedy(tmp_path: Path) -> None:
    result, _ = soak(loopback.good, spec(tmp_path, kernel_log="none"))
    assert (result.verdict, result.exit_code) == ("inconclusive", 2)
    assert result.sources["kernel_log"].state == "absent"


def test_ctrl_c_ends_after_the_turn_in_flight(tmp_path: Path) -> None:
    running: list[SoakRun] = []

    def stop(event, judge) -> None:
        if isinstance(event, TurnSent) and event.turn == 3:
            running[0].interrupt()

    result, _ = soak(loopback.good, spec(tmp_path, turns=10), observer=stop, started=running.append)
    assert (result.verdict, result.ended) == ("inconclusive", "interrupted")
    assert result.outcomes == {"ok": 3}
    assert any("Ctrl-C" in reason for reason in result.reasons)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    running: list[SoakRun] = []

    async def slow(x: loopback.Exchange) -> None:
        await x.head()
        running[0].interrupt()
        running[0].interrupt()
        await asyncio.Event().wait()

    result, _ = soak(slow, spec(tmp_path, turns=10, stall=60.0), started=running.append)
    assert result.verdict == "inconclusive"
    assert result.outcomes == {"aborted": 1}


@pytest.mark.parametrize("calls", [["SIGTERM"], ["SIGTERM", "Ctrl-C"]])
def test_an_interrupt_before_the_load_is_there_lets_no_turn_out(tmp_path: Path, calls: list[str]) -> None:
    """A campaign may be told to stop while the engine is still asked what it is."""

    def early(run: SoakRun) -> None:
        for how in calls:
            run.interrupt(how)

    result, _ = soak(loopback.good, spec(tmp_path, turns=10), started=early)
    assert (result.verdict, result.ended, result.exposure.turns) == ("inconclusive", "interrupted", 0)
    assert set(result.outcomes.values()) <= {0}
    assert any("SIGTERM before the first turn" in reason for reason in result.unknown), "who asked first"


def test_an_interrupt_while_the_engine_is_asked_counts_as_the_first(tmp_path: Path) -> None:
    running: list[SoakRun] = []

    async def asked(x: loopback.Exchange) -> bool:
        running[0].interrupt("SIGHUP")
        return await loopback.models(x)

    result, _ = soak(loopback.good, spec(tmp_path, turns=10), started=running.append, route=asked)
    assert (result.ended, result.exposure.turns) == ("interrupted", 0)
    assert any("SIGHUP before the first turn" in reason for reason in result.reasons)


def test_tolerated_turns_do_not_count_towards_the_end_and_are_told_all_the_same(tmp_path: Path) -> None:
    async def mixed(x: loopback.Exchange) -> None:
        if b'"tools"' not in x.body or x.number == 1:
            await loopback.good(x)
        else:
            await (loopback.reasoning_stop if x.number < 6 else loopback.error_frame_only)(x)

    result, run = soak(mixed, spec(tmp_path, turns=20, max_bad=1, tolerated=frozenset({"answerless"})))
    assert result.ended == "too_many_bad"
    assert result.outcomes.pop("error_frame") == 1
    assert result.outcomes["answerless"] >= 2
    assert (run.load.bad, run.load.counted) == (result.outcomes["answerless"] + 1, 1)
    assert "1 turns were not ok" in run.load.detail
    assert result.verdict == "fail"
    strict, _ = soak(mixed, spec(tmp_path, turns=20, max_bad=1))
    assert strict.outcomes["answerless"] == 1


def test_a_second_ctrl_c_ends_the_last_question_too(tmp_path: Path) -> None:
    running: list[SoakRun] = []

    async def frozen_at_the_end(x: loopback.Exchange) -> None:
        if is_canary(x):
            running[0].interrupt()
            running[0].interrupt()
            await asyncio.Event().wait()
        await loopback.good(x)

    result, _ = soak(frozen_at_the_end, spec(tmp_path, turns=2, stall=60.0), started=running.append)
    assert result.verdict == "inconclusive"
    assert result.engine.alive is None
    assert result.outcomes == {"ok": 2}


def test_a_crashing_watcher_is_named_and_makes_the_run_inconclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from soakrig.soak.watch.metrics import MetricsWatcher

    def crash(self):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(MetricsWatcher, "open", crash)
    result, _ = soak(loopback.good, spec(tmp_path))
    assert result.verdict == "inconclusive"
    assert any("metrics watcher crashed: ZeroDivisionError: planted" in reason for reason in result.reasons)


def test_a_view_that_breaks_does_not_end_the_run(tmp_path: Path) -> None:
    def broken(event, judge) -> None:
        raise ValueError("planted")

    result, run = soak(loopback.good, spec(tmp_path), observer=broken)
    assert result.verdict == "pass"
    assert isinstance(run.view_error, ValueError)


def test_a_run_folder_that_is_deleted_in_mid_run_is_no_pass(tmp_path: Path) -> None:
    running: list[SoakRun] = []

    async def deleting(x: loopback.Exchange) -> None:
        if x.number == 2:
            shutil.rmtree(running[0].folder)
        await loopback.good(x)

    result, _ = soak(deleting, spec(tmp_path, turns=4), started=running.append)
    assert (result.verdict, result.ended) == ("inconclusive", "store")
    assert any("deleted or moved" in reason for reason in result.reasons)


def test_a_result_that_cannot_be_written_is_no_pass(tmp_path: Path) -> None:
    running: list[SoakRun] = []

    async def blocking(x: loopback.Exchange) -> None:
        if x.number == 2:
            (running[0].folder / "result.json").mkdir()
        await loopback.good(x)

    result, _ = soak(blocking, spec(tmp_path, turns=4), started=running.append)
    assert (result.verdict, result.ended) == ("inconclusive", "store")


async def no_server(x: loopback.Exchange) -> bool:
    await x.json({"detail": "Not Found"}, "404 Not Found")
    return True


async def other_json(x: loopback.Exchange) -> bool:
    await x.json({"name": "some other service"})
    return True


@pytest.mark.parametrize("route", [no_server, other_json])
def test_a_target_that_is_no_openai_server_is_refused_with_what_it_said(tmp_path: Path, route) -> None:
    with pytest.raises(TargetError, match="does not answer as an OpenAI-compatible server"):
        soak(loopback.good, spec(tmp_path), route=route)
    assert not (tmp_path / "runs").exists(), "nothing was written"


def test_a_model_that_is_not_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="'other' is not served"):
        soak(loopback.good, spec(tmp_path), model="other")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    options = LoadOptions(tools=50, context_limit=4096)
    with pytest.raises(UsageError, match="do not fit"):
        soak(loopback.good, spec(tmp_path, options=options))


def test_many_conversations_in_parallel(tmp_path: Path) -> None:
    options = LoadOptions(conversations=8, tools=2, max_tokens=64)
    result, run = soak(loopback.good, spec(tmp_path, turns=6, options=options))
    assert result.verdict == "pass"
    assert result.outcomes == {"ok": 48}
    assert len(list((run.folder / "requests").iterdir())) == 8


def test_a_run_is_sent_again_byte_for_byte(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    async def keep(x: loopback.Exchange) -> None:
        if not is_canary(x):
            bodies.append(x.body)
        await (loopback.tool_call(x) if x.number % 3 else loopback.good(x))

    options = LoadOptions(tools=7, max_tokens=64, seed=11)
    result, run = soak(keep, spec(tmp_path, turns=7, options=options))
    first, stored = list(bodies), [request.body for request in read_requests(run.folder)]
    assert stored == first
    bodies.clear()
    lanes = read_transcript(run.folder)
    again = spec(
        tmp_path, turns=7, conversations=lambda probe: [TranscriptConversation(n, lane) for n, lane in enumerate(lanes)]
    )
    result, second = soak(keep, again)
    assert bodies == first
    assert [request.body for request in read_requests(second.folder)] == first, "and again from the copy"
    assert len(result.outcomes) == 1


def test_same_seed_same_bytes_given_the_same_replies(tmp_path: Path) -> None:
    def bodies_of(seed: int, name: str) -> list[bytes]:
        folder = tmp_path / name
        folder.mkdir()
        _, run = soak(loopback.good, spec(folder, turns=6, options=LoadOptions(tools=5, seed=seed)))
        return [request.body for request in read_requests(run.folder)]

    one = bodies_of(5, "a")
    assert one == bodies_of(5, "b")
    assert one != bodies_of(6, "c")


def test_the_manifest_says_what_was_meant_to_happen(tmp_path: Path) -> None:
    _, run = soak(loopback.good, spec(tmp_path, gates=["ttft_p99 < 20s"]))
    kept = RunReader(run.folder).manifest
    assert kept.plan.turns == 3
    assert kept.gates == ["ttft_p99 < 20s"]
    assert kept.host["boot_id"]
    assert set(type(kept).model_fields) == set(type(manifest()).model_fields)


def test_signals_are_in_the_events(tmp_path: Path) -> None:
    (tmp_path / "kernel-source.log").touch()

    async def quoting(x: loopback.Exchange) -> None:
        with (tmp_path / "kernel-source.log").open("a") as stream:
            stream.write("Nov 29 10:00:00 host app[1]: user wrote: NVRM: Xid (PCI:0000:01:00): 31, hello\n")
        await loopback.good(x)
        await asyncio.sleep(0.2)

    result, run = soak(quoting, spec(tmp_path))
    seen = [e.signal for e in RunReader(run.folder).events() if isinstance(e, SignalSeen)]
    assert all(signal.severity != "fault" for signal in seen), "quoted text is no fault"
    assert result.verdict == "pass"
