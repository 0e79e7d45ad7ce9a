"""A vLLM is ready when it has answered a generation, over real HTTP; and what its log tells in the meantime."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from soakrig.engine.vllm import launch as launching
from soakrig.engine.vllm import ready as readiness
from soakrig.engine.vllm.ready import Readiness
from soakrig.errors import EngineStartError

MODELS = {"data": [{"id": "m"}]}
ANSWER = {"choices": [{"message": {"content": None}}], "usage": {"completion_tokens": 1}}
LOG = """\
(APIServer pid=1) INFO 11-29 18:45:20 [api_utils.py:347]    \u2580\u2580  \u2580\u2580
(EngineCore pid=7) WARNING 11-29 18:47:59 [core.py:1] a warning is no progress
"""
LISTENING = """
import socket, sys
held = socket.create_server(("127.0.0.1", 0))
print(held.getsockname()[1], flush=True)
sys.stdin.read()
"""


class Server(ThreadingHTTPServer):
    """Answers GET with ``models`` and POST with ``chat``, each (status, object); keeps what was posted."""

    daemon_threads = True

    def __init__(self) -> None:
        self.models: tuple[int, Any] = (200, MODELS)
        self.chat: tuple[int, Any] = (200, ANSWER)
        self.posted: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.say(*self.server.models)

    def do_POST(self) -> None:
        self.server.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.say(*self.server.chat)

    def say(self, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: standard error is for failures."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


@pytest.fixture
def engine(server: Server, tmp_path: Path) -> Any:
    (tmp_path / "engine.log").write_text(LOG)
    return SimpleNamespace(base_url=f"http://127.0.0.1:{server.server_port}", log_path=tmp_path / "engine.log", pid=1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Readiness, list[str]]]:
    monkeypatch.setattr(readiness, "RETRY_S", 0.0)
    monkeypatch.setattr(readiness, "LOOK_S", 0.0)
    told: list[str] = []
    ready = Readiness(told.append)
    yield ready, told
    ready.close()


def test_ready_is_an_answer(server: Server, engine: Any, asked: tuple[Readiness, list[str]]) -> None:
    assert asked[0](engine) is True
    assert (server.posted[0]["model"], server.posted[0]["max_tokens"]) == ("m", 1)


def test_without_a_canary_a_model_that_is_named_is_enough(server: Server, engine: Any) -> None:
    ready = Readiness(lambda text: None, canary=False)
    server.models = (503, {})
    assert ready(engine) is False
    server.models = (200, MODELS)
    ready._ask_at = 0.0
    assert ready(engine) is True
    assert server.posted == [], "the first generation is the load's"
    ready.close()


@pytest.mark.parametrize(
    ("models", "chat"),
    [
        ((503, {}), (200, ANSWER)),
        ((200, {"data": []}), (200, ANSWER)),
        ((200, "nothing"), (200, ANSWER)),
        ((200, MODELS), (500, {"error": "EngineCore"})),
        ((200, MODELS), (200, {"choices": [], "usage": {"completion_tokens": 1}})),
        ((200, MODELS), (200, {"choices": [{}], "usage": {"completion_tokens": 0}})),
        ((200, MODELS), (200, {"error": {"message": "dead"}})),
        ((200, MODELS), (200, None)),
    ],
)
def test_anything_else_is_not(
    server: Server, engine: Any, asked: tuple[Readiness, list[str]], models: tuple[int, Any], chat: tuple[int, Any]
) -> None:
    server.models, server.chat = models, chat
    assert asked[0](engine) is False
    server.models, server.chat = (200, MODELS), (200, ANSWER)
    assert asked[0](engine) is True, "it is asked again"


def test_a_server_that_is_not_there_yet_is_not_ready(engine: Any, asked: tuple[Readiness, list[str]]) -> None:
    engine.base_url = "http://127.0.0.1:9"
    assert asked[0](engine) is False


def test_a_model_that_cannot_chat_ends_the_wait(
    server: Server, engine: Any, asked: tuple[Readiness, list[str]]
) -> None:
    server.chat = (400, {"error": "no chat template"})
    with pytest.raises(EngineStartError, match=r"refuses a chat request with status 400.*no chat template"):
        asked[0](engine)


def test_the_log_tells_how_far_it_is(server: Server, engine: Any, asked: tuple[Readiness, list[str]]) -> None:
    server.models = (503, {})
    asked[0](engine)
    with engine.log_path.open("a") as log:
        log.write("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01]\r")
    asked[0](engine)
    with engine.log_path.open("a") as log:
        log.write("\n(EngineCore pid=7) INFO 11-29 18:47:59 [model.py:9] Graph capturing finished in 9 secs\n  more\n")
    asked[0](engine)
    asked[0](engine)
    assert asked[1] == [
        "Loading safetensors checkpoint shards:  50% Completed | 1/2",
        "Graph capturing finished in 9 secs",
    ]


FAILED = """\
(APIServer pid=1) INFO 11-29 18:57:39 [__init__.py:66] Loading plugin soakrig
(APIServer pid=1) ERROR 11-29 18:57:39 [__init__.py:72] Failed to load plugin soakrig
(APIServer pid=1) ERROR 11-29 18:57:39 [__init__.py:72] Traceback (most recent call last):
(APIServer pid=1) ERROR 11-29 18:57:39 [__init__.py:72]   File "x.py", line 69, in load
(APIServer pid=1) ERROR 11-29 18:57:39 [__init__.py:72] ModuleNotFoundError: No module named 'soakrig.x'
"""


def test_a_plug_in_that_was_not_loaded_is_no_start_where_it_is_needed(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "stranger", lambda pid, url: "")
    notes: list[str] = []
    launching.check_started(engine, True, notes.append)
    engine.log_path.write_text(FAILED)
    launching.check_started(engine, False, notes.append)
    assert notes == ["vLLM could not load soakrig's plug-in: ModuleNotFoundError: No module named 'soakrig.x'"]
    with pytest.raises(EngineStartError, match="could not load soakrig's plug-in: ModuleNotFoundError"):
        launching.check_started(engine, True, notes.append)


def test_another_server_on_our_port_is_not_our_engine(engine: Any) -> None:
    """Two siblings: what started an engine, this test or a pid 1 above it, would not be doubted."""
    with (
        subprocess.Popen([sys.executable, "-c", LISTENING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
    ):
        assert listener.stdout is not None
        engine.base_url, engine.pid = f"http://127.0.0.1:{int(listener.stdout.readline())}", process.pid
        with pytest.raises(EngineStartError, match=rf"another server took its port: pid {listener.pid}"):
            launching.check_started(engine, False, lambda text: None)
        listener.communicate()
        process.communicate(b"\n")
