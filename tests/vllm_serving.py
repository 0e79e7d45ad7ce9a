"""A vLLM with the tiny model for tests: where it is found, its processes, and raw requests whose bytes are kept."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from e2e.soaking import Soak, gone, wait_for
from soakrig.engine.launcher import EngineProcess
from soakrig.engine.vllm.launch import launch_vllm
from soakrig.engine.vllm.tiny_cache import tiny_model
from soakrig.record.store import RunReader

MULTIPROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""A worker process beside the engine core, as any vLLM on more than one card has."""
START_S = 400.0


@contextmanager
def serving(folder: Path, settings: dict[str, str] | None = None, flags: Sequence[str] = ()) -> Iterator[EngineProcess]:
    """The tiny model served from ``folder``; stopped at the end, whatever became of it."""
    folder.mkdir(parents=True, exist_ok=True)
    engine = launch_vllm(tiny_model(), settings or {}, flags, folder, timeout=START_S)
    try:
        yield engine
    finally:
        assert engine.stop() == []


class Parts:
    """The processes of a vLLM by what they do; ``worker`` is None without a process of its own."""

    def __init__(self, server: int) -> None:
        self.server = server
        family = psutil.Process(server).children(recursive=True)
        named = {process.name(): process.pid for process in family}
        self.core = next(pid for name, pid in named.items() if "EngineCore" in name)
        self.worker = next((pid for name, pid in named.items() if "Worker" in name), None)
        self.pids = [server, *(process.pid for process in family)]
        self.shared = {path for pid in self.pids for path in _shared_memory(pid)}

    def nothing_left(self) -> None:
        """No process, and none of the shared memory that they had."""
        for pid in self.pids:
            wait_for(f"the end of process {pid}", lambda p=pid: gone(p), 30.0)
        wait_for("the end of the shared memory", lambda: not any(path.exists() for path in self.shared), 10.0)


class VllmSoak(Soak):
    """`soak run` with vLLM; ``parts`` are its processes, once a turn is over. ``options`` say which engine."""

    def __init__(self, folder: Path, *options: str, turns: int = 1000, stall: float = 5.0) -> None:
        usual = ["--tools", "8", "--max-tokens", "48"] if "--tools" not in options else []
        super().__init__(folder, *usual, *options, turns=turns, stall=stall, small=False)

    def keeper_of(self) -> psutil.Process | None:
        """The keeper of the engine, a child of soak; None as long as there is none."""
        children = psutil.Process(self.process.pid).children()
        return next((child for child in children if child.name() == "soakrig-keeper"), None)

    def wait_turn(self, turn: int) -> None:
        wait_for(f"turn {turn}", lambda: self.turns_done() >= turn or self.process.poll() is not None, START_S)
        assert self.process.poll() is None, self.errors.read_text()
        keeper = self.keeper_of()
        if keeper is not None:  # none where it is attached
            self.parts = Parts(keeper.children()[0].pid)
            self.pids = [keeper.pid, *self.parts.pids]

    def url(self) -> str:
        return RunReader(self.run).manifest.base_url


def _shared_memory(pid: int) -> set[Path]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {Path(line.split(None, 5)[5]) for line in lines if "/dev/shm/" in line}
    return {path for path in paths if path.name.startswith(("psm_", "sem.mp-")) and path.exists()}


def figure(engine_url: str, family: str) -> float:
    """The sum of a metric over its labels."""
    page = get(engine_url, "/metrics").partition(b"\r\n\r\n")[2].decode()
    rows = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith(family)]
    return sum(float(value) for name, value in rows if name.partition("{")[0] == family)


class Exchange:
    """One request on a socket of its own; ``received`` keeps every byte that came back, framing and all."""

    def __init__(self, url: str, head: str, body: bytes = b"") -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.received = b""
        self.ending = ""
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        self._socket.sendall(f"{head} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{length}\r\n".encode() + body)

    def read(self, until: Callable[[bytes], bool] = lambda received: False, silence_s: float = 120.0) -> bytes:
        """Read until ``until`` holds, the connection ends (``ending`` is then "eof" or "reset"), or nothing has come
        for ``silence_s`` ("silence")."""
        self._socket.settimeout(silence_s)
        while not until(self.received):
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                self.ending = "silence"
                break
            except ConnectionResetError:
                self.ending = "reset"
                break
            if not data:
                self.ending = "eof"
                break
            self.received += data
        return self.received

    def close(self) -> None:
        self._socket.close()


def get(url: str, path: str, silence_s: float = 30.0) -> bytes:
    """A GET: head and body as they came; empty where nothing did."""
    exchange = Exchange(url, f"GET {path}")
    try:
        return exchange.read(silence_s=silence_s)
    finally:
        exchange.close()


def chat(url: str, words: int = 20, max_tokens: int = 200, **more: Any) -> Exchange:
    """A streamed chat request that is under way; ``words`` makes its prompt longer."""
    text = " ".join(f"word{n}" for n in range(words))
    body = {
        "model": "tiny-moe",
        "messages": [{"role": "user", "content": f"Tell me about these: {text}"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "temperature": 0.7,
        **more,
    }
    return Exchange(url, "POST /v1/chat/completions", json.dumps(body).encode())


def tokens_in(received: bytes) -> int:
    """Events of a stream that carry text."""
    return received.count(b'"content":"') - received.count(b'"content":""')


def until_idle(url: str) -> None:
    """Wait until the engine runs no request."""
    deadline = time.monotonic() + 60
    while figure(url, "vllm:num_requests_running"):
        assert time.monotonic() < deadline, "requests are still running"
