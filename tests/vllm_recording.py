"""Records what dead and dying vLLM servers put on the wire: the fixtures in ``tests/golden/vllm``.

    make vllm-transcripts

Each event has a server of its own where it ends one. The bytes are kept as they came, with HTTP head and chunk framing,
one file a reply; ``transcripts.json`` says what each is: the event, the request, and how the connection ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soakrig.engine.launcher import EngineProcess
from soakrig.engine.vllm.installation import find_installation
from vllm_serving import MULTIPROCESS, Exchange, Parts, chat, get, serving, tokens_in, until_idle, wait_for

GOLDEN = Path(__file__).resolve().parent / "golden" / "vllm"
SILENCE_S = 8.0
LONG = 3000
"""Words of a prompt whose prefill takes long enough to be hit."""


class Recorder:
    """Writes fixtures. ``expected`` of each is ours: the outcome that a client has to see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: list[dict[str, Any]] = []

    def keep(self, name: str, exchange: Exchange, event: str, request: str, expected: str) -> None:
        (self.folder / f"{name}.http").write_bytes(exchange.received)
        row = {"name": name, "event": event, "request": request, "ending": exchange.ending, "expected": expected}
        self.index.append(row)
        print(name, len(exchange.received), "bytes,", exchange.ending, flush=True)
        exchange.close()


def under_way(url: str, tokens: int = 5, **more: Any) -> Exchange:
    exchange = chat(url, max_tokens=8000, ignore_eos=True, **more)
    exchange.read(lambda received: tokens_in(received) >= tokens)
    return exchange


def killed(recorder: Recorder, engine: EngineProcess, victim: str) -> None:
    """SIGKILL of a part with one stream in its tokens and one whose prompt is still being read."""
    url = engine.base_url
    pid = getattr(Parts(engine.pid), victim)
    streaming, early = under_way(url), chat(url, words=LONG)
    os.kill(pid, signal.SIGKILL)
    expected = {"server": "truncated"}.get(victim, "error_frame")
    for exchange in (streaming, early):
        exchange.read()
    recorder.keep(f"{victim}_killed_in_stream", streaming, f"SIGKILL of the {victim}", "stream, tokens came", expected)
    nothing = "error_frame" if victim != "server" else ("refused" if not early.received else "empty_200")
    recorder.keep(f"{victim}_killed_before_token", early, f"SIGKILL of the {victim}", "stream, no token yet", nothing)


def killed_idle(recorder: Recorder, engine: EngineProcess) -> None:
    """SIGKILL of the engine core while nobody asks; the first request after it."""
    url = engine.base_url
    until_idle(url)
    os.kill(Parts(engine.pid).core, signal.SIGKILL)
    wait_for("503 on /health", lambda: b" 503 " in get(url, "/health").split(b"\r\n")[0])
    health = Exchange(url, "GET /health")
    health.read()
    recorder.keep("core_killed_idle_health", health, "SIGKILL of the core, idle", "GET /health", "")
    later = chat(url)
    later.read()
    recorder.keep("core_killed_idle_next", later, "SIGKILL of the core, idle", "stream, the next one", "http_error")


def stopped(recorder: Recorder, engine: EngineProcess, victim: str) -> None:
    """SIGSTOP of a part with a stream in its tokens; a request while it stands; SIGCONT at the end."""
    url = engine.base_url
    pid = getattr(Parts(engine.pid), victim)
    event = f"SIGSTOP of the {victim}"
    streaming = under_way(url)
    os.kill(pid, signal.SIGSTOP)
    try:
        streaming.read(silence_s=SILENCE_S)
        recorder.keep(
            f"{victim}_stopped_in_stream", streaming, f"SIGSTOP of the {victim}", "stream, tokens came", "hung"
        )
        later = chat(url)
        later.read(silence_s=SILENCE_S)
        recorder.keep(f"{victim}_stopped_next", later, event, "stream, the next one", "hung")
        health = Exchange(url, "GET /health")
        health.read(silence_s=SILENCE_S)
        recorder.keep(f"{victim}_stopped_health", health, event, "GET /health", "")
    finally:
        os.kill(pid, signal.SIGCONT)
    until_idle(url)


def healthy(recorder: Recorder, engine: EngineProcess) -> None:
    whole = chat(engine.base_url, max_tokens=24)
    whole.read()
    recorder.keep("healthy_stream", whole, "none", "stream", "ok")
    health = Exchange(engine.base_url, "GET /health")
    health.read()
    recorder.keep("healthy_health", health, "none", "GET /health", "")


def main() -> int:
    """Record everything anew; some ten minutes on two cores."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(GOLDEN)
    sessions: list[tuple[dict[str, str], list[Callable[[EngineProcess], None]]]] = [
        (
            MULTIPROCESS,
            [
                lambda engine: healthy(recorder, engine),
                lambda engine: stopped(recorder, engine, "worker"),
                lambda engine: stopped(recorder, engine, "core"),
                lambda engine: stopped(recorder, engine, "server"),
                lambda engine: killed(recorder, engine, "worker"),
            ],
        ),
        ({}, [lambda engine: killed(recorder, engine, "core")]),
        ({}, [lambda engine: killed_idle(recorder, engine)]),
        ({}, [lambda engine: killed(recorder, engine, "server")]),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for number, (settings, steps) in enumerate(sessions):
            with serving(Path(folder) / str(number), settings) as engine:
                for step in steps:
                    step(engine)
    made_by = find_installation().text
    text = json.dumps({"engine": made_by, "model": "tiny-moe", "transcripts": recorder.index}, indent=1)
    (GOLDEN / "transcripts.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
