"""What real vLLM servers put on the wire while they died, stood still or were well (``make vllm-transcripts`` records
it): each reply gets the outcome that it deserves, and only the good one is ok."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from soakrig.clock import RealClock
from soakrig.soak.classify import classify
from soakrig.soak.client import ChatClient, Timeouts
from soakrig.soak.reply import Reply
from soakrig.soak.target import Target
from wire import loopback

FOLDER = Path(__file__).parents[1] / "golden" / "vllm"
INDEX: dict[str, Any] = json.loads((FOLDER / "transcripts.json").read_text())
ROWS: list[dict[str, Any]] = INDEX["transcripts"]
STREAMS = [row for row in ROWS if row["expected"]]
HEALTH = [row for row in ROWS if not row["expected"]]


def replay(row: dict[str, Any]) -> loopback.Handler:
    """Answers with the recorded bytes, head and framing and all, and ends the connection as it ended then."""
    data = (FOLDER / f"{row['name']}.http").read_bytes()

    async def handler(x: loopback.Exchange) -> None:
        x.writer.write(data)
        await x.writer.drain()
        if row["ending"] == "silence":
            await asyncio.Event().wait()
        elif row["ending"] == "reset":
            await x.reset()

    return handler


def ask(row: dict[str, Any]) -> Reply:
    async def main() -> Reply:
        async with loopback.serve(replay(row)) as url:
            client = ChatClient(Target(url, "m"), RealClock(), Timeouts(connect=2.0, stall=0.6))
            async with client:
                return await client.send(b'{"messages": []}')

    return asyncio.run(main())


@pytest.mark.parametrize("row", STREAMS, ids=[row["name"] for row in STREAMS])
def test_outcome(row: dict[str, Any]) -> None:
    reply = ask(row)
    found = classify(reply)
    assert found.name == row["expected"], found
    if "tokens came" in row["request"]:
        assert reply.deltas >= 5, "the stream was under way"
    if "no token" in row["request"]:
        assert reply.deltas == 0


def test_the_recording_holds_every_event() -> None:
    events = {(row["event"], row["request"].partition(",")[0]) for row in STREAMS}
    for victim in ("core", "worker", "server"):
        assert (f"SIGKILL of the {victim}", "stream") in events
        assert (f"SIGSTOP of the {victim}", "stream") in events
    assert [row["name"] for row in STREAMS if row["expected"] == "ok"] == ["healthy_stream"]
    assert INDEX["engine"].startswith("vllm")


def test_what_makes_a_dead_engine_look_well() -> None:
    """The traps, in vLLM's own bytes: a terminator and a clean end after an error, a green /health of the frozen."""
    for victim in ("core", "worker"):
        for when in ("in_stream", "before_token"):
            data = (FOLDER / f"{victim}_killed_{when}.http").read_bytes()
            assert data.startswith(b"HTTP/1.1 200 OK")
            assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert (FOLDER / f"{victim}_stopped_health.http").read_bytes().startswith(b"HTTP/1.1 200 OK")
    assert (FOLDER / "core_killed_idle_health.http").read_bytes().startswith(b"HTTP/1.1 503 ")
    assert {row["name"] for row in HEALTH} > {"healthy_health", "core_stopped_health"}
