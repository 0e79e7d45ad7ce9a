"""Is the engine alive? Asked by real requests, of servers that die, stall, refuse, lie and are merely busy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from soakrig.reproducers.reproducer import LoadOptions
from soakrig.soak.client import ChatClient
from wire import loopback
from wire.soaking import is_canary, soak, spec


def test_a_health_endpoint_that_turns_503_and_a_canary_without_token_are_death(tmp_path: Path) -> None:
    answered = 0

    async def good(x: loopback.Exchange) -> None:
        nonlocal answered
        if is_canary(x):
            await loopback.status_500(x)
            return
        answered += 1
        await loopback.good(x)

    async def route(x: loopback.Exchange) -> bool:
        if x.path == "/health":
            dead = answered >= 3
            await x.json({"status": "dead" if dead else "ok"}, "503 Service Unavailable" if dead else "200 OK")
            return True
        return await loopback.models(x)

    result, _ = soak(good, spec(tmp_path, turns=10), route=route)
    assert result.engine.alive is False
    assert result.outcomes == {"ok": 2, "post_mortem": 1}, "a whole answer of an engine that is dead is not ok"
    assert result.engine.died_after_turn == 2


def test_one_503_of_health_is_no_death_where_a_canary_is_answered(tmp_path: Path) -> None:
    asked = 0

    async def route(x: loopback.Exchange) -> bool:
        nonlocal asked
        if x.path == "/health":
            asked += 1
            await x.json({}, "503 Service Unavailable" if asked == 3 else "200 OK")
            return True
        return await loopback.models(x)

    result, _ = soak(loopback.good, spec(tmp_path, turns=5), route=route)
    assert asked > 4
    assert (result.verdict, result.outcomes) == ("pass", {"ok": 5})


def test_a_server_that_goes_silent_on_health_does_not_hang_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def route(x: loopback.Exchange) -> bool:
        if x.path == "/health" and x.number > 1:
            await asyncio.Event().wait()
        if x.path == "/health":
            await x.json({})
            return True
        return await loopback.models(x)

    original = ChatClient.get
    monkeypatch.setattr(ChatClient, "get", lambda self, path, timeout=5.0: original(self, path, min(timeout, 0.2)))
    result, _ = soak(loopback.good, spec(tmp_path, turns=3), route=route)
    assert result.outcomes == {"ok": 3}


@pytest.mark.parametrize("status", ["404 Not Found", "429 Too Many Requests"])
def test_a_canary_that_is_refused_is_neither_life_nor_death(tmp_path: Path, status: str) -> None:
    async def proxy(x: loopback.Exchange) -> None:
        if is_canary(x):
            await x.json({"error": {"message": "no healthy upstream"}}, status)
        else:
            await loopback.good(x)

    result, _ = soak(proxy, spec(tmp_path, turns=3))
    assert (result.verdict, result.outcomes) == ("inconclusive", {"ok": 3})
    assert any("no healthy upstream" in reason for reason in result.reasons)


@pytest.mark.parametrize("last", [loopback.cut_cleanly, loopback.bad_json, loopback.zero_bytes, loopback.role_and_stop])
def test_a_canary_has_to_bring_a_whole_answer(tmp_path: Path, last: loopback.Handler) -> None:
    async def dying(x: loopback.Exchange) -> None:
        await (last(x) if is_canary(x) else loopback.good(x))

    result, _ = soak(dying, spec(tmp_path, turns=3))
    assert (result.verdict, result.engine.alive) == ("fail", False)
    assert result.engine.died_after_turn == 3


def test_a_model_that_ends_the_first_canary_at_once_is_asked_another(tmp_path: Path) -> None:
    async def terse(x: loopback.Exchange) -> None:
        await (loopback.role_and_stop(x) if b"one word" in x.body else loopback.good(x))

    assert soak(terse, spec(tmp_path, turns=3))[0].verdict == "pass"


def test_a_busy_engine_is_not_dead(tmp_path: Path) -> None:
    """It answers one request at a time; the canary waits behind a long turn of another conversation."""
    turn = asyncio.Lock()

    async def serial(x: loopback.Exchange) -> None:
        async with turn:
            if not is_canary(x) and x.number == 3:
                await loopback.tool_cut_json(x)
                return
            await x.head()
            for part in [loopback.ROLE, *loopback.words(12)]:
                await x.chunk(part)
                await asyncio.sleep(0.1)
            for part in [loopback.delta(finish="stop"), loopback.usage(), loopback.DONE]:
                await x.chunk(part)
            await x.end()

    options = LoadOptions(conversations=3, tools=2, max_tokens=64)
    result, _ = soak(serial, spec(tmp_path, turns=2, options=options, stall=1.0, first_byte=30.0))
    assert result.engine.alive is True
    assert set(result.outcomes) <= {"ok", "tool_malformed", "hung"}


def test_a_death_is_tied_to_the_turn_that_found_it_not_to_the_first_bad_one(tmp_path: Path) -> None:
    async def slips_then_dies(x: loopback.Exchange) -> None:
        if is_canary(x):
            await (loopback.good(x) if x.number < 8 else loopback.zero_bytes(x))
        elif x.number == 2:
            await loopback.tool_cut_json(x)
        else:
            await (loopback.good(x) if x.number < 8 else loopback.zero_bytes(x))

    result, _ = soak(slips_then_dies, spec(tmp_path, turns=20))
    assert result.first_bad is not None
    assert result.first_bad.turn == 2
    (fault,) = result.faults
    assert fault.turn is not None
    assert fault.turn > 5
    assert (result.engine.died_after_turn, fault.attribution) == (fault.turn - 1, "exact")


def test_counters_that_stand_still_while_turns_end_ok_are_a_contradiction(tmp_path: Path) -> None:
    async def route(x: loopback.Exchange) -> bool:
        if x.path == "/metrics":
            await x.head(kind="text/plain")
            await x.chunk(b"# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total 100.0\n")
            await x.end()
            return True
        return await loopback.models(x)

    async def paced(x: loopback.Exchange) -> None:
        await asyncio.sleep(0.3)
        await loopback.good(x)

    result, _ = soak(paced, spec(tmp_path, turns=14, stall=5.0), route=route)
    assert result.sources["metrics"].state != "absent"
    assert result.verdict == "inconclusive"
    assert any("token counter stood still at 100" in reason for reason in result.reasons)


def test_a_dead_engine_is_asked_once_and_not_by_every_conversation(tmp_path: Path) -> None:
    canaries = 0

    async def dead(x: loopback.Exchange) -> None:
        nonlocal canaries
        canaries += is_canary(x)
        await loopback.zero_bytes(x)

    options = LoadOptions(conversations=8, tools=2, max_tokens=64)
    result, _ = soak(dead, spec(tmp_path, turns=5, options=options))
    assert result.engine.alive is False
    assert canaries == 2, "the question and its repetition"


def test_health_404_is_not_death(tmp_path: Path) -> None:
    result, _ = soak(loopback.good, spec(tmp_path, turns=3))
    assert result.verdict == "pass"


def test_a_round_trip_that_fails_is_asked_in_place_of_health_and_a_canary_decides(tmp_path: Path) -> None:
    answered = 0
    asked: list[str] = []

    async def frozen_later(x: loopback.Exchange) -> None:
        nonlocal answered
        if is_canary(x):
            await loopback.headers_then_silence(x)
            return
        answered += 1
        await loopback.good(x)

    async def route(x: loopback.Exchange) -> bool:
        asked.append(x.path)
        if x.path == "/soakrig/ping":
            alive = answered < 3
            await x.json({"alive": alive, "seconds": 0.01}, "200 OK" if alive else "503 Service Unavailable")
            return True
        if x.path == "/health":
            await x.json({})  # a flag: green for ever
            return True
        return await loopback.models(x)

    result, _ = soak(frozen_later, spec(tmp_path, turns=10, stall=0.6), route=route)
    assert result.engine.alive is False
    assert result.outcomes == {"ok": 2, "post_mortem": 1}, "no round trip, no life after a turn"
    assert asked.count("/soakrig/ping") == 4, "once before the load, once a turn"
    assert asked.count("/health") <= 2, "before the load, and for the record at the end"


@pytest.mark.parametrize("status", ["503 Service Unavailable", "404 Not Found"])
def test_a_round_trip_that_failed_before_the_load_is_not_asked_again(tmp_path: Path, status: str) -> None:
    asked = 0

    async def route(x: loopback.Exchange) -> bool:
        nonlocal asked
        if x.path == "/soakrig/ping":
            asked += 1
            await x.json({"alive": False}, status)
            return True
        return await loopback.models(x)

    result, _ = soak(loopback.good, spec(tmp_path, turns=3), route=route)
    assert (result.verdict, asked) == ("pass", 1)
