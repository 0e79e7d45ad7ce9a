"""The load over real sockets: when a turn leaves, when it ends, and what is on disk by then."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from builders import manifest
from soakrig.clock import Clock, FakeClock, RealClock
from soakrig.record.events import EngineChecked, Event, SignalSeen, ToolLagged, TurnDone, TurnSent
from soakrig.record.manifest import Plan
from soakrig.record.request_log import RequestLog
from soakrig.record.store import RunReader, RunStore
from soakrig.reproducers.reproducer import LoadOptions
from soakrig.soak import load as load_module
from soakrig.soak.classify import Outcome
from soakrig.soak.client import ChatClient, Timeouts
from soakrig.soak.conversation import Turn
from soakrig.soak.evidence import Evidence
from soakrig.soak.liveness import Liveness
from soakrig.soak.load import Load
from soakrig.soak.reply import Reply
from soakrig.soak.run import SoakRun
from soakrig.soak.target import Target
from wire import loopback
from wire.soaking import is_canary, soak, spec

PATIENCE_S = 10.0
TIMEOUTS = Timeouts(connect=2.0, stall=6.0, first_byte=6.0)


class Repeating:
    """A conversation that sends the same body again, ``length`` times at most."""

    def __init__(self, number: int = 0, length: int = 1000) -> None:
        self.number, self.length, self.turns = number, length, 0
        self.outcomes: list[str] = []

    def next_turn(self) -> Turn | None:
        if self.turns == self.length:
            return None
        self.turns += 1
        body = b'{"model":"m","tools":[],"conversation":%d,"messages":[]}' % self.number
        return Turn(self.number, self.turns, 0, body, 100, None, body[:-15], [], {})

    def answered(self, reply: Reply, outcome: Outcome) -> None:
        self.outcomes.append(outcome.name)


def is_of(x: loopback.Exchange, conversation: int) -> bool:
    return b'"conversation":%d,' % conversation in x.body


async def loaded(
    folder: Path,
    handler: loopback.Handler,
    plan: Plan,
    *conversations: Repeating,
    clock: Clock | None = None,
    tell: Callable[[Event], None] = lambda event: None,
    max_bad: int = 10,
) -> tuple[Load, list[Event]]:
    """Drive a load of our own to its end; the load and what it told."""
    clock = clock or RealClock()
    told: list[Event] = []

    def telling(event: Event) -> None:
        told.append(event)
        tell(event)

    store = RunStore.create(folder, manifest())
    try:
        async with (
            loopback.serve(handler) as url,
            ChatClient(Target(url, "m"), clock, TIMEOUTS) as client,
            asyncio.timeout(PATIENCE_S),
        ):
            life = Liveness(client, "m", retry_s=0.0)
            load = Load(
                client, life, store, RequestLog(store), Evidence(store), clock, plan, telling, max_bad=max_bad
            )  # fmt: skip
            await load.run(conversations or [Repeating(n) for n in range(plan.conversations)])
    finally:
        store.close()
    return load, told


def ends(events: list[Event]) -> list[TurnDone]:
    return [event for event in events if isinstance(event, TurnDone)]


def outcomes(events: list[Event]) -> list[str]:
    return [event.outcome for event in ends(events)]


def test_a_turn_is_on_disk_before_the_next_one_of_its_conversation_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is slow when the first turn's end is written: it waits for a second request, which must not come."""
    second_came, came_early = threading.Event(), list[bool]()
    write = os.write

    def slow(fd: int, data: bytes | memoryview) -> int:
        if b'"kind":"turn"' in bytes(data) and not came_early:
            came_early.append(second_came.wait(0.4))
        return write(fd, data)

    monkeypatch.setattr(os, "write", slow)

    async def handler(x: loopback.Exchange) -> None:
        if x.number == 2:
            second_came.set()
        await loopback.good(x)

    _, told = asyncio.run(loaded(tmp_path, handler, Plan(conversations=1, turns=3)))
    assert came_early == [False]
    assert outcomes(told) == ["ok"] * 3
    assert second_came.is_set()


@pytest.mark.parametrize(("seconds", "turns"), [(3.0, 3), (3.1, 4), (3.9, 4), (4.1, 5), (0.5, 1)])
def test_a_load_in_seconds_sends_while_time_is_left_and_lets_the_last_turn_end(
    tmp_path: Path, seconds: float, turns: int
) -> None:
    clock = FakeClock()

    async def one_second(x: loopback.Exchange) -> None:
        await clock.advance(1.0)
        await loopback.good(x)

    load, told = asyncio.run(loaded(tmp_path, one_second, Plan(conversations=1, seconds=seconds), clock=clock))
    assert outcomes(told) == ["ok"] * turns
    assert load.ended == "completed"
    sent = [event.mono for event in told if isinstance(event, TurnSent)]
    assert [at - sent[0] for at in sent] == [1.0 * n for n in range(turns)]


def test_a_conversation_that_has_nothing_more_to_send_ends(tmp_path: Path) -> None:
    talk = Repeating(length=2)
    load, told = asyncio.run(loaded(tmp_path, loopback.good, Plan(conversations=1, turns=5), talk))
    assert (outcomes(told), talk.outcomes, load.ended) == (["ok"] * 2, ["ok"] * 2, "completed")


@pytest.mark.parametrize(("max_bad", "sent", "ended"), [(2, 2, "too_many_bad"), (0, 5, "completed")])
def test_so_many_bad_turns_end_a_load_and_zero_means_never(tmp_path: Path, max_bad: int, sent: int, ended: str) -> None:
    async def handler(x: loopback.Exchange) -> None:
        await (loopback.good(x) if is_canary(x) else loopback.tool_cut_json(x))

    load, told = asyncio.run(loaded(tmp_path, handler, Plan(conversations=1, turns=5), max_bad=max_bad))
    assert (outcomes(told), load.ended) == (["tool_malformed"] * sent, ended)


@pytest.mark.parametrize(
    ("figures", "counted", "tokens", "prompt"),
    [
        (loopback.usage(prompt=321, completion=40), "usage", 40, 321),
        (loopback.usage(prompt=321, completion=-1), "deltas", 8, 321),
        (b"", "deltas", 8, None),
    ],
    ids=["usage", "absurd usage", "no usage"],
)
def test_where_a_turn_s_token_count_comes_from(
    tmp_path: Path, figures: bytes, counted: str, tokens: int, prompt: int | None
) -> None:
    async def handler(x: loopback.Exchange) -> None:
        parts = [loopback.ROLE, *loopback.words(8), loopback.delta(finish="stop"), figures, loopback.DONE]
        await x.whole(*filter(None, parts))

    _, told = asyncio.run(loaded(tmp_path, handler, Plan(conversations=1, turns=1)))
    (end,) = ends(told)
    assert (end.counted, end.output_tokens, end.prompt_tokens) == (counted, tokens, prompt)
    assert end.context_tokens == (prompt or 100), "the engine's measure, else the estimate"


class Dying:
    """Conversation 1 is in mid-answer when conversation 0 meets an empty 200 and finds the engine dead."""

    def __init__(self, finish: bool) -> None:
        self.finish, self.begun, self.died = finish, asyncio.Event(), asyncio.Event()

    async def __call__(self, x: loopback.Exchange) -> None:
        if not is_of(x, 1):
            await self.begun.wait()
            await loopback.zero_bytes(x)
            return
        await x.head()
        await x.chunk(loopback.ROLE)
        await x.chunk(loopback.delta(content="so far"))
        self.begun.set()
        if not self.finish:
            await asyncio.Event().wait()
        await self.died.wait()
        for part in [*loopback.words(), loopback.delta(finish="stop"), loopback.usage(), loopback.DONE]:
            await x.chunk(part)
        await x.end()

    def tell(self, event: Event) -> None:
        if isinstance(event, EngineChecked):
            self.died.set()

    def run(self, folder: Path) -> tuple[Load, list[Event]]:
        async def main() -> tuple[Load, list[Event]]:
            return await loaded(folder, self, Plan(conversations=2, turns=5), tell=self.tell)

        return asyncio.run(main())


def test_a_turn_in_flight_at_the_death_is_cut_after_the_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_module.DRAIN_S == 2.0
    monkeypatch.setattr(load_module, "DRAIN_S", 0.3)
    load, told = Dying(finish=False).run(tmp_path)
    (death,) = [event for event in told if isinstance(event, EngineChecked)]
    empty, drained = ends(told)
    assert (empty.outcome, drained.outcome, load.ended) == ("empty_200", "post_mortem", "engine_dead")
    assert (death.alive, death.conversation, death.turn) == (False, 0, 1)
    assert 0.25 <= drained.mono - death.mono < 2.0, "not at once, and long before the stall limit"


def test_a_turn_in_flight_at_the_death_may_end_within_the_drain(tmp_path: Path) -> None:
    load, told = Dying(finish=True).run(tmp_path)
    empty, drained = ends(told)
    assert empty.outcome == "empty_200"
    assert (drained.outcome, drained.finish_reason, drained.deltas) == ("post_mortem", "stop", 9)
    assert load.ended == "engine_dead"


def test_a_second_ctrl_c_is_in_the_record_as_a_turn_that_this_tool_ended(tmp_path: Path) -> None:
    running: list[SoakRun] = []
    options = LoadOptions(conversations=2, tools=2, max_tokens=64)

    async def handler(x: loopback.Exchange) -> None:
        if x.number <= 2:
            await loopback.good(x)
            return
        await x.head()
        await x.chunk(loopback.ROLE)
        if x.number == 4:
            running[0].interrupt()
            running[0].interrupt()
        await asyncio.Event().wait()

    result, run = soak(handler, spec(tmp_path, turns=9, options=options, stall=6.0), started=running.append)
    assert result.outcomes == {"ok": 2, "aborted": 2}
    assert (result.ended, result.verdict, result.exit_code) == ("interrupted", "inconclusive", 2)
    assert run.folder is not None
    cut = [event for event in ends(list(RunReader(run.folder).events())) if event.outcome == "aborted"]
    assert sorted((event.conversation, event.turn) for event in cut) == [(0, 2), (1, 2)]
    assert {event.why for event in cut} == {"this tool was told to stop at once"}


def test_a_standstill_of_the_tool_is_recorded(tmp_path: Path) -> None:
    async def blocking(x: loopback.Exchange) -> None:
        if x.number == 2:
            time.sleep(1.2)  # the loop of server and tool: nobody runs meanwhile
        await loopback.good(x)

    result, run = soak(blocking, spec(tmp_path, turns=3, stall=6.0))
    assert run.folder is not None
    lags = [event.seconds for event in RunReader(run.folder).events() if isinstance(event, ToolLagged)]
    assert 0.9 < max(lags, default=0.0) < 5.0
    assert result.tool.lag_max_s == max(lags)
    assert result.verdict == "pass", "a short one is said and does not decide"


def test_an_injected_line_neither_stops_a_run_nor_freezes_evidence(tmp_path: Path) -> None:
    """A kmsg record of facility 1 (user): not the kernel's own word."""
    seen: list[SignalSeen] = []
    arrived = asyncio.Event()

    def observe(event: Event, _: object) -> None:
        if isinstance(event, SignalSeen):
            seen.append(event)
            arrived.set()

    async def handler(x: loopback.Exchange) -> None:
        if x.number == 2:
            with (tmp_path / "kernel-source.log").open("a") as log:
                log.write(f"12,7,{time.monotonic_ns() // 1000},-;NVRM: Xid (PCI:0000:01:00): 31, pid=1, name=x, Ch 8\n")
            async with asyncio.timeout(PATIENCE_S):
                await arrived.wait()
        await loopback.good(x)

    result, run = soak(handler, spec(tmp_path, turns=4, stall=6.0), observer=observe)
    assert [(event.signal.xid, event.signal.severity, event.signal.injected) for event in seen] == [(31, "fault", True)]
    assert (result.ended, result.outcomes) == ("completed", {"ok": 4})
    assert (result.verdict, result.faults) == ("inconclusive", [])
    assert any("(injected)" in reason for reason in result.reasons)
    assert run.folder is not None
    assert not (run.folder / "evidence").exists()


@pytest.mark.parametrize("space_comes_back", [True, False])
def test_a_store_that_fails_in_mid_run_ends_it_as_inconclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space_comes_back: bool
) -> None:
    write = os.write
    broken: list[int] = []
    asked: list[int] = []

    def failing(fd: int, data: bytes | memoryview) -> int:
        third = b'"kind":"turn"' in bytes(data) and b'"turn":3,' in bytes(data)
        if third or (broken and not space_comes_back):
            broken.append(fd)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", failing)

    async def handler(x: loopback.Exchange) -> None:
        if not is_canary(x):
            asked.append(x.number)
        await loopback.good(x)

    result, run = soak(handler, spec(tmp_path, turns=9))
    assert (result.verdict, result.exit_code, result.ended) == ("inconclusive", 2, "store")
    assert any("ended early (store)" in reason and "No space left" in reason for reason in result.reasons)
    assert len(asked) == 3, "nothing leaves that could not be kept"
    assert run.folder is not None
    reader = RunReader(run.folder)
    assert outcomes(list(reader.events())) == ["ok"] * 2
    assert reader.stored_result() == (result if space_comes_back else None)


@pytest.mark.parametrize("last", ["engine", "end"])
def test_a_store_that_fails_on_the_run_s_last_words_is_found_out_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """No turn waits for these bytes any more; the run is inconclusive all the same."""
    write, kind = os.write, f'"kind":"{last}"'.encode()

    def failing(fd: int, data: bytes | memoryview) -> int:
        if kind in bytes(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", failing)
    result, run = soak(loopback.good, spec(tmp_path, turns=2))
    assert result.outcomes == {"ok": 2}
    assert (result.verdict, result.ended) == ("inconclusive", "store")
    assert run.folder is not None
    reader = RunReader(run.folder)
    assert not any(event.kind == last for event in reader.events())
    assert reader.stored_result() == result
    assert reader.judge().result().verdict == "inconclusive", "and judged again, the same"
