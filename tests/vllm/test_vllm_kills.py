"""vLLM's processes are killed and stopped under a soak: the right verdict and turn, nothing ok afterwards, no process
and no shared memory left."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.soaking import consistent, wait_for
from soakrig.engine.launcher import EngineProcess
from soakrig.record.events import TurnDone
from vllm_python import vllm_python
from vllm_serving import MULTIPROCESS, Parts, VllmSoak, figure, serving

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    vllm_python()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One server with a worker process, shared: what is stopped goes on again, and the last test kills it."""
    with serving(tmp_path_factory.mktemp("vllm"), MULTIPROCESS) as engine:
        parts = Parts(engine.pid)
        yield engine
    parts.nothing_left()
    assert any(path.name.startswith("psm_") for path in parts.shared), "a worker is spoken to by shared memory"


def attached(engine: EngineProcess, folder: Path, *options: str) -> VllmSoak:
    watched = ["--url", engine.base_url, "--pid", str(engine.pid), "--engine-log", str(engine.log_path)]
    return VllmSoak(folder, *watched, *options)


def judged(soak: VllmSoak, result: dict[str, Any], outcomes: set[str], after: int) -> None:
    """Failed, dead, and at the right place: every turn up to the death is ok, the next is the first bad one, none that
    follows is ok. ``after``: turns that were over just before the blow."""
    events = soak.events()
    turns = [event for event in events if isinstance(event, TurnDone)]
    shown = [(turn.turn, turn.outcome, turn.why) for turn in turns]
    died = result["engine"]["died_after_turn"]
    assert (result["verdict"], result["exit_code"]) == ("fail", 1), shown
    assert result["engine"]["alive"] is False, shown
    assert died in (after, after + 1, after + 2), "at most two turns end between the look and the blow"
    assert [turn.outcome for turn in turns[:died]] == ["ok"] * died, shown
    assert turns[died].outcome in outcomes, shown
    assert {turn.outcome for turn in turns[died + 1 :]} <= outcomes | {"post_mortem", "refused"}, shown
    assert (result["first_bad"]["turn"], result["first_bad"]["outcome"]) == (died + 1, turns[died].outcome)
    assert result["exposure"]["turns"] - died in (0, 1), "a turn that broke was work all the same"
    consistent(result, events)


def told_of(result: dict[str, Any]) -> None:
    """The headline is one of the ways in which the death of a part shows; which comes first is chance."""
    names = {"engine_process_died", "engine_core_fatal", "engine_dead", "output_handler", "process_exit"}
    assert {fault["signature"].rpartition(" ")[2] for fault in result["faults"]} <= names, result["faults"]
    assert len(result["faults"]) == 1, "one death, one incident"


def test_engine_core_killed_at_a_random_turn(tmp_path: Path) -> None:
    turn = random.SystemRandom().randint(2, 9)
    with VllmSoak(tmp_path, "--engine", "tiny-moe") as soak:
        soak.wait_turn(turn)
        after = soak.turns_done()
        os.kill(soak.parts.core, signal.SIGKILL)
        result = soak.finish(120)
        soak.parts.nothing_left()
    judged(soak, result, {"error_frame", "http_error", "refused", "post_mortem"}, after)
    told_of(result)


def test_a_frozen_engine_core_is_ended_with_its_server(tmp_path: Path) -> None:
    """The server waits for its core for ever; the keeper does not."""
    with VllmSoak(tmp_path, "--engine", "tiny-moe") as soak:
        soak.wait_turn(2)
        os.kill(soak.parts.core, signal.SIGSTOP)
        result = soak.finish(120)
        soak.parts.nothing_left()
    assert (result["verdict"], result["exit_code"]) == ("fail", 1)
    assert [(fault["signature"], fault["pid"]) for fault in result["faults"]] == [
        ("process: process_stopped", soak.parts.core)
    ]
    consistent(result, soak.events())


def test_api_server_killed_in_mid_stream(tmp_path: Path) -> None:
    with VllmSoak(tmp_path, "--engine", "tiny-moe", "--max-tokens", "400") as soak:
        soak.wait_turn(3)
        url = soak.url()

        def streaming() -> bool:
            before = figure(url, "vllm:generation_tokens_total")
            return bool(figure(url, "vllm:num_requests_running")) and tokens(url, before)

        wait_for("a stream with tokens", streaming)
        after = soak.turns_done()
        os.kill(soak.parts.server, signal.SIGKILL)
        result = soak.finish(120)
        soak.parts.nothing_left()
    judged(soak, result, {"truncated", "empty_200", "refused"}, after)
    assert result["engine"]["exit_status"] == -signal.SIGKILL
    assert "process: process_exit" in {fault["signature"] for fault in result["faults"]}


def tokens(url: str, before: float) -> bool:
    """Whether the engine's tokens move while the request that was seen still runs."""
    return figure(url, "vllm:generation_tokens_total") > before


def hushed(soak: VllmSoak, url: str) -> bool:
    """Stop the tool, so that nobody asks: whether the server has answered all that was sent, and its start's canary.
    Where not, the tool was stopped with a request half way out, and goes on."""
    os.kill(soak.process.pid, signal.SIGSTOP)
    sent = sum(event.kind == "sent" for event in soak.events())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if figure(url, "vllm:request_success_total") >= sent + 1:
            return True
    os.kill(soak.process.pid, signal.SIGCONT)
    return False


def test_api_server_killed_while_it_is_idle(tmp_path: Path) -> None:
    """The last reply was whole and the server had nothing to do; it dies before anybody asks it again."""
    with VllmSoak(tmp_path, "--engine", "tiny-moe") as soak:
        soak.wait_turn(3)
        url = soak.url()
        wait_for("an idle server", lambda: hushed(soak, url))
        after = soak.turns_done()
        os.kill(soak.parts.server, signal.SIGKILL)
        os.kill(soak.process.pid, signal.SIGCONT)
        result = soak.finish(120)
        soak.parts.nothing_left()
    judged(soak, result, {"post_mortem", "refused", "truncated"}, after)
    assert result["engine"]["exit_status"] == -signal.SIGKILL


@pytest.mark.parametrize("victim", ["worker", "core", "server"])
def test_a_stopped_part_is_a_dead_engine(tmp_path: Path, server: EngineProcess, victim: str) -> None:
    pid = getattr(Parts(server.pid), victim)
    with attached(server, tmp_path, "--on-fault", "continue") as soak:
        soak.wait_turn(2)
        after = soak.turns_done()
        os.kill(pid, signal.SIGSTOP)
        try:
            result = soak.finish(180)
        finally:
            os.kill(pid, signal.SIGCONT)
    judged(soak, result, {"hung", "post_mortem"}, after)
    assert [fault["signature"] for fault in result["faults"]] == ["process: process_stopped"]
    assert result["faults"][0]["pid"] == pid
    wait_for("an idle engine again", lambda: not figure(server.base_url, "vllm:num_requests_running"))


def test_worker_killed(tmp_path: Path, server: EngineProcess) -> None:
    parts = Parts(server.pid)
    assert parts.worker is not None
    with attached(server, tmp_path) as soak:
        soak.wait_turn(2)
        after = soak.turns_done()
        os.kill(parts.worker, signal.SIGKILL)
        result = soak.finish(120)
    judged(soak, result, {"error_frame", "http_error", "refused", "post_mortem"}, after)
    told_of(result)
