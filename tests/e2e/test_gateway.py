"""The gateway in front of a real engine that is killed and frozen: no client, and no soak, takes it for an answer."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.soaking import Soak, consistent, wait_for
from e2e.test_embedded_process import LONG, Engine, body, running
from gateway_process import GatewayProcess

SMALL = ("--layers", "2", "--experts", "8", "--hidden", "64", "--threads", "1")
STALL_S = 1.0
QUICK = ("--stall-timeout", str(STALL_S))
Stand = tuple[Engine, GatewayProcess]


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    with running(tmp_path, *SMALL) as engine, GatewayProcess(tmp_path, engine.base, *QUICK) as gateway:
        yield engine, gateway


class Asked(threading.Thread):
    """One streamed request in a thread: its status, its events, and how it ended."""

    def __init__(self, client: httpx.Client) -> None:
        super().__init__()
        self.client = client
        self.status = 0
        self.body: Any = None
        self.events: list[str] = []
        self.broke = ""
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body("Hi", stream=True, **LONG)) as response:
                self.status = response.status_code
                if self.status != 200:
                    self.body = json.loads(response.read())
                for line in response.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.broke = type(error).__name__
        self.seconds = time.monotonic() - began

    def ended(self) -> Asked:
        self.join(60)
        assert not self.is_alive()
        return self


def in_flight(gateway: GatewayProcess) -> bool:
    return gateway.metric("soakrig_gateway_in_flight") == 1


def broken_off(asked: Asked, kind: str, engine: Engine) -> None:
    """200, deltas, one error frame that names the engine, no terminator, a broken transfer."""
    assert asked.status == 200
    assert len(asked.events) > 3
    assert asked.broke == "RemoteProtocolError"
    assert "[DONE]" not in asked.events
    error = json.loads(asked.events[-1])["error"]
    assert error["type"] == kind
    assert engine.base in error["message"]
    assert sum('"error"' in event for event in asked.events) == 1


def test_kill_9_before_the_first_byte_is_a_502(stand: Stand) -> None:
    engine, gateway = stand
    engine.process.send_signal(signal.SIGSTOP)  # so that no byte of the answer can come before the kill
    asked = Asked(gateway.client)
    with httpx.Client(base_url=gateway.url) as other:
        wait_for("the request in flight", lambda: 'soakrig_gateway_in_flight{model="upstream"} 1.0' in
                 other.get("/metrics", timeout=10).text)  # fmt: skip
    engine.process.kill()
    asked.ended()
    assert asked.status == 502
    assert asked.body["error"]["type"] == "engine_died"
    assert engine.base in asked.body["error"]["message"]
    dead = gateway.client.post("/v1/chat/completions", json=body("Hi"))
    assert (dead.status_code, dead.json()["error"]["type"]) == (502, "engine_unreachable")
    for path in ("/health", "/v1/models"):
        assert gateway.client.get(path).status_code == 502


def test_kill_9_between_deltas_is_an_error_frame_and_a_break(stand: Stand) -> None:
    engine, gateway = stand
    asked = Asked(gateway.client)
    wait_for("deltas", lambda: len(asked.events) > 5)
    engine.process.kill()
    broken_off(asked.ended(), "engine_died", engine)


def test_kill_9_of_the_worker_between_deltas_has_no_terminator(stand: Stand) -> None:
    engine, gateway = stand
    asked = Asked(gateway.client)
    wait_for("deltas", lambda: len(asked.events) > 5)
    engine.worker.kill()
    asked.ended()
    assert asked.status == 200
    assert "[DONE]" not in asked.events
    assert "error" in json.loads(asked.events[-1])


@pytest.mark.parametrize("victim", ["server", "worker"])
def test_sigstop_between_deltas_is_a_stall_error_within_the_limit(stand: Stand, victim: str) -> None:
    engine, gateway = stand
    asked = Asked(gateway.client)
    wait_for("deltas", lambda: len(asked.events) > 5)
    began = time.monotonic()
    (engine.process if victim == "server" else engine.worker).send_signal(signal.SIGSTOP)
    broken_off(asked.ended(), "engine_stalled", engine)
    assert STALL_S * 0.9 < time.monotonic() - began < STALL_S + 4


def test_sigstop_before_the_first_byte_is_a_504_within_the_limit(stand: Stand) -> None:
    engine, gateway = stand
    engine.process.send_signal(signal.SIGSTOP)
    asked = Asked(gateway.client).ended()
    assert (asked.status, asked.body["error"]["type"]) == (504, "engine_stalled")
    assert STALL_S * 0.9 < asked.seconds < 2 * STALL_S + 4


def test_a_worker_that_never_begins_is_given_up_at_the_first_byte_limit(tmp_path: Path) -> None:
    options = (*QUICK, "--first-byte-timeout", "2.5")
    with running(tmp_path, *SMALL) as engine, GatewayProcess(tmp_path, engine.base, *options) as gateway:
        engine.worker.suspend()
        asked = Asked(gateway.client).ended()
        assert (asked.status, asked.body["error"]["type"]) == (504, "engine_stalled")
        assert 2.2 < asked.seconds < 6


def test_a_client_that_goes_away_frees_the_engine(tmp_path: Path) -> None:
    with running(tmp_path) as engine, GatewayProcess(tmp_path, engine.base, *QUICK) as gateway:
        with gateway.client.stream("POST", "/v1/chat/completions", json=body("Hi", stream=True, **LONG)) as response:
            next(response.iter_lines())
        wait_for("the end at the engine", lambda: engine.metric("vllm:num_requests_running") == 0, 20)
        assert 0 < engine.metric("vllm:generation_tokens_total") < LONG["max_tokens"] / 2
        assert gateway.metric('soakrig_gateway_requests_total{model="upstream",outcome="client_gone"') == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_a_soak_through_the_gateway_scores_nothing_of_it_ok(tmp_path: Path, victim: str, number: int) -> None:
    with running(tmp_path) as engine, GatewayProcess(tmp_path, engine.base, *QUICK) as gateway:
        options = ("--url", gateway.url, "--max-bad", "2")
        with Soak(tmp_path, *options, stall=4.0) as soak:
            wait_for("three turns", lambda: soak.run.exists() and soak.turns_done() >= 3)
            (engine.process if victim == "engine" else engine.worker).send_signal(number)
            hit = time.time()
            result = soak.finish()
        assert (result["verdict"], result["exit_code"]) == ("fail", 1)
        assert set(result["outcomes"]) > {"ok"}
        consistent(result, soak.events())
        late = [
            event for event in soak.events() if event.kind == "turn" and event.outcome == "ok" and event.time > hit + 1
        ]
        assert late == []
        assert result["first_bad"]["outcome"] in ("http_error", "error_frame", "truncated", "hung")


def test_a_soak_through_the_gateway_of_a_well_engine_passes(stand: Stand, tmp_path: Path) -> None:
    _, gateway = stand
    with Soak(tmp_path, "--url", gateway.url, turns=5) as soak:
        result = soak.finish()
    assert (result["verdict"], result["outcomes"]) == ("pass", {"ok": 5})
    assert result["sources"]["metrics"]["state"] == "live", "the engine's own counters pass through"
    assert (
        gateway.metric('soakrig_gateway_requests_total{model="upstream",outcome="ok",path="/v1/chat/completions"}') >= 5
    )


def test_it_ends_on_sigterm_and_says_what_it_does(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, "http://127.0.0.1:9/", "--policy", "mirror_content") as gateway:
        assert gateway.said["engines"] == {"upstream": "http://127.0.0.1:9"}
        assert gateway.said["policies"] == {"mirror_content": True}
        gateway.process.terminate()
        assert gateway.process.wait(10) == 0
        assert "mirror_content" in gateway.errors.read_text()
        assert "Traceback" not in gateway.errors.read_text()
