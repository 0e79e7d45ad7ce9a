"""The embedded engine's processes: start, port, flags, death of either process, freeze, disconnects, the end.

``Engine`` starts a real one; the other end-to-end tests of the engine use it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

DEADLINE = 60.0
Json = dict[str, Any]


def until(holds: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
    """Poll a real process until ``holds`` is true; returns its value."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if value := holds():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {deadline:g} s: {what}")


class Engine:
    """A running engine, its client, and its two processes."""

    def __init__(self, folder: Path, *flags: str, **environment: str) -> None:
        self.port_file = folder / "port"
        self.log = folder / "engine.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "soakrig.engine.embedded", "--port-file", str(self.port_file), *flags],
                stderr=log,
                env={**os.environ, **environment},
            )
        until(self._started, "the engine's port file")
        self.base = f"http://127.0.0.1:{self.port_file.read_text().strip()}"
        self.client = httpx.Client(base_url=self.base, timeout=60.0)
        self.worker = psutil.Process(self.client.get("/soakrig/settings").json()["worker_pid"])

    def _started(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.port_file.exists()

    def chat(self, content: str = "Say something", **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=body(content, **fields))

    def stream(
        self, content: str = "Say something", **fields: Any
    ) -> contextlib.AbstractContextManager[httpx.Response]:
        return self.client.stream("POST", "/v1/chat/completions", json=body(content, stream=True, **fields))

    def metric(self, name: str) -> float:
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith((name + "{", name + " ")) or line.rpartition(" ")[0] == name:
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"{name} is not in /metrics")

    def close(self) -> None:
        self.client.close()
        with contextlib.suppress(psutil.Error):
            self.worker.resume()
            self.worker.kill()
        self.process.kill()
        self.process.wait()


def body(content: str, **fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": content}], **fields}


def events(response: httpx.Response) -> Iterator[str]:
    """The data of each event as it comes."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: ")
            yield line.removeprefix("data: ")


@contextlib.contextmanager
def running(folder: Path, *flags: str, **environment: str) -> Iterator[Engine]:
    engine = Engine(folder, *flags, **environment)
    try:
        yield engine
    finally:
        engine.close()


def refused(*flags: str, **environment: str) -> tuple[int, str]:
    """Exit status and words of an engine that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "soakrig.engine.embedded", *flags],
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        timeout=DEADLINE,
        text=True,
    )
    return done.returncode, done.stderr


LONG: Json = {"max_tokens": 4000, "ignore_eos": True}


def test_start_health_and_a_graceful_end(tmp_path: Path) -> None:
    with running(tmp_path, "--served-model-name", "m1", "--max-model-len", "2000") as engine:
        health = engine.client.get("/health")
        assert health.status_code == 200
        assert health.json()["status"] == "ok"
        assert 0.0 <= health.json()["heartbeat_age_s"] < 5.0
        model = engine.client.get("/v1/models").json()["data"][0]
        assert (model["id"], model["max_model_len"]) == ("m1", 2000)
        assert engine.worker.ppid() == engine.process.pid
        listening = [c for c in psutil.Process(engine.process.pid).net_connections("inet") if c.status == "LISTEN"]
        assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
        with engine.stream(max_tokens=1900, ignore_eos=True) as response:
            next(events(response))
            began = time.monotonic()
            engine.process.send_signal(signal.SIGTERM)
            assert engine.process.wait(10) == 0
            assert time.monotonic() - began < 3.0
        assert not engine.worker.is_running()


def test_the_server_process_has_no_torch(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        libraries = {Path(part.path).name for part in psutil.Process(engine.process.pid).memory_maps()}
        assert not any("torch" in name for name in libraries)
        assert any("torch" in Path(part.path).name for part in engine.worker.memory_maps())


@pytest.mark.parametrize(
    ("flags", "environment", "status", "said"),
    [
        (["--layer", "4"], {}, 64, "--layer is no flag of the embedded engine\n  --layers was probably meant"),
        (["--top-k", "99"], {}, 64, "--top-k 99"),
        (["--hidden", "wide"], {}, 64, "--hidden"),
        (["--port", "70000"], {}, 64, "--port 70000"),
        (["--port-file", "/no/such/folder/port"], {}, 64, "/no/such/folder/port"),
        ([], {"VLLM_MOE_DMA_STAGING": "maybe"}, 64, "VLLM_MOE_DMA_STAGING='maybe' makes no sense: 0 or 1 was expected"),
        ([], {"SOAKRIG_PLANT": '{"action": "exit", "hazzard": 1}'}, 64, "hazzard"),
    ],
)
def test_what_makes_no_sense_is_refused_at_start(flags: list[str], environment: Json, status: int, said: str) -> None:
    code, words = refused(*flags, **environment)
    assert (code, said in words) == (status, True), words


def test_a_taken_port_names_its_holder() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, words = refused("--port", str(port))
    assert code == 3
    assert f"port {port} is taken by" in words
    assert f"(pid {os.getpid()})" in words


def test_a_dead_worker_is_seen_by_everybody_and_the_server_stays(tmp_path: Path) -> None:
    with running(tmp_path) as engine, engine.stream(**LONG) as response:
        seen = events(response)
        for _ in range(5):
            next(seen)
        engine.worker.kill()
        rest = list(seen)
        error = json.loads(rest[-1])["error"]
        assert error["code"] == 500
        assert f"the worker (pid {engine.worker.pid}) was ended by SIGKILL" in error["message"]
        assert "[DONE]" not in rest
        health = engine.client.get("/health")
        assert health.status_code == 503
        assert "SIGKILL" in health.json()["error"]["message"]
        for later in (engine.chat(), engine.client.post("/v1/completions", json={"prompt": "x"})):
            assert later.status_code == 503
            assert later.json()["error"]["code"] == 503
        assert engine.client.get("/metrics").status_code == 200
        assert engine.process.poll() is None
        assert "EngineDeadError" in engine.log.read_text()


def test_a_worker_that_dies_under_a_whole_answer_gives_500(tmp_path: Path) -> None:
    with running(tmp_path) as engine:

        def kill_once_it_runs() -> None:
            until(lambda: engine.metric("vllm:num_requests_running") > 0, "the request to run")
            engine.worker.kill()

        killer = threading.Thread(target=kill_once_it_runs)
        killer.start()
        answer = httpx.post(engine.base + "/v1/chat/completions", json=body("x", **LONG), timeout=60.0)
        killer.join()
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == 500


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])
def test_the_worker_does_not_outlive_a_killed_server(tmp_path: Path, frozen: bool) -> None:
    with running(tmp_path) as engine:
        if frozen:
            engine.worker.suspend()
        engine.process.kill()
        engine.process.wait()
        until(
            lambda: not engine.worker.is_running() or engine.worker.status() == psutil.STATUS_ZOMBIE,
            "the worker's end",
            5,
        )
        assert engine.process.returncode == -9


def test_a_frozen_worker_keeps_health_at_200_and_its_counters_still(tmp_path: Path) -> None:
    with running(tmp_path) as engine, engine.stream(**LONG) as response:
        seen = events(response)
        next(seen)
        engine.worker.suspend()
        # What was already sent is still counted; then nothing moves.
        until(lambda: engine.client.get("/health").json()["heartbeat_age_s"] > 1.2, "the heartbeat to grow old")
        before = engine.metric("vllm:generation_tokens_total"), engine.metric("vllm:iteration_tokens_total_count")
        assert engine.client.get("/health").status_code == 200
        later = engine.client.get("/health").json()["heartbeat_age_s"]
        until(lambda: engine.client.get("/health").json()["heartbeat_age_s"] > later + 0.3, "time to pass")
        assert before == (
            engine.metric("vllm:generation_tokens_total"),
            engine.metric("vllm:iteration_tokens_total_count"),
        )
        assert engine.metric("vllm:num_requests_running") == 1
        engine.worker.resume()
        assert len([next(seen) for _ in range(20)]) == 20
        engine.worker.suspend()
        began = time.monotonic()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(10) == 0
        assert time.monotonic() - began < 3.5
        assert not engine.worker.is_running()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_request(tmp_path: Path, streamed: bool) -> None:
    with running(tmp_path) as engine:
        raw = json.dumps(body("x", stream=streamed, **LONG)).encode()
        host, _, port = engine.base.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
            connection.sendall(head.encode() + raw)
            until(lambda: engine.metric("vllm:num_requests_running") == 1, "the request to run")
        until(lambda: engine.metric("vllm:num_requests_running") == 0, "the request to go")
        assert engine.metric('vllm:request_success_total{finished_reason="abort",model_name="embedded"}') == 1
        assert engine.metric("vllm:kv_cache_usage_perc") == 0
        assert engine.chat(max_tokens=4).status_code == 200


def test_a_model_that_cannot_be_loaded_is_an_error_at_start() -> None:
    # Far more memory than there is: the worker's allocation fails.
    code, words = refused("--kv-tokens", "900000000000")
    assert code == 1
    assert "the model could not be loaded: the worker (pid" in words
