"""What ends a load, and which reason stays; what was in flight at a moment. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from builders import manifest
from soakrig.clock import FakeClock
from soakrig.record.events import EndReason
from soakrig.record.manifest import Plan
from soakrig.record.request_log import RequestLog
from soakrig.record.store import RunStore
from soakrig.soak.client import ChatClient
from soakrig.soak.conversation import Turn
from soakrig.soak.evidence import Evidence
from soakrig.soak.liveness import Liveness
from soakrig.soak.load import RECENT, Load
from soakrig.soak.reply import Reply
from soakrig.soak.target import Target

REASONS: tuple[EndReason, ...] = get_args(EndReason)
OUTRANKED, OUTRANKING = ("interrupted", "stopped"), ("engine_dead", "fault")


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    clock = FakeClock()
    store = RunStore.create(tmp_path, manifest())
    client = ChatClient(Target("http://127.0.0.1:1", "m"), clock)
    plan = Plan(conversations=1, turns=3)
    yield Load(
        client, Liveness(client, "m"), store, RequestLog(store), Evidence(store), clock, plan, lambda event: None
    )
    store.close()


@pytest.mark.parametrize("first", REASONS)
@pytest.mark.parametrize("second", REASONS)
def test_the_first_reason_stays_but_a_dead_engine_outranks_being_asked_to_stop(
    load: Load, first: EndReason, second: EndReason
) -> None:
    load.end(first, "one")
    load.end(second, "two")
    outranked = first in OUTRANKED and second in OUTRANKING
    assert (load.ended, load.detail) == ((second, "two") if outranked else (first, "one"))


def turn(number: int, sent_at: float, ended_at: float) -> tuple[Turn, Reply]:
    reply = Reply(sent_at=sent_at, ended_at=ended_at)
    return Turn(0, number, 0, b"{}", 100, None, b"{", [], {}), reply


def names(found: list[tuple[Turn, Reply]]) -> list[int]:
    return [turn.turn for turn, _ in found]


def test_the_evidence_of_a_moment_is_what_was_in_flight_then(load: Load) -> None:
    load.recent.extend([turn(1, 10.0, 11.0), turn(2, 12.0, 13.0)])
    load.current[0] = turn(3, 14.0, 0.0)
    assert names(load.in_flight(10.5)) == [1]
    assert names(load.in_flight(12.0)) == [2], "both ends belong to it"
    assert names(load.in_flight(13.0)) == [2]
    assert names(load.in_flight(20.0)) == [3]
    assert names(load.in_flight(13.5)) == [3], "none was: what is in flight now"


def test_between_turns_the_last_one_is_kept(load: Load) -> None:
    assert load.in_flight(1.0) == []
    load.recent.extend([turn(1, 10.0, 11.0), turn(2, 12.0, 13.0)])
    assert names(load.in_flight(99.0)) == [2]


def test_the_bytes_of_old_turns_are_let_go(load: Load) -> None:
    load.recent.extend(turn(n, float(n), n + 0.5) for n in range(RECENT + 5))
    assert len(load.recent) == RECENT
