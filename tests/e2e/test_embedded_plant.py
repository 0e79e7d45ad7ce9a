"""Planted faults on a running engine: each action as a client sees it, and the Xid line before it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.test_embedded_process import Engine, Json, events, running, until


@contextlib.contextmanager
def planted(folder: Path, **fields: Any) -> Iterator[Engine]:
    """An engine whose second turn has the fault."""
    plant = {"hazard": 1, "after": {"turns": 1}, **fields}
    with running(folder, SOAKRIG_PLANT=json.dumps(plant)) as engine:
        # A canary is no turn; the first turn is clean.
        assert engine.chat("ping", max_tokens=1).status_code == 200
        assert engine.chat("hello").json()["choices"][0]["finish_reason"] == "stop"
        yield engine


def chunks_of(seen: list[str]) -> list[Json]:
    return [json.loads(one) for one in seen if one != "[DONE]"]


def broken_stream(engine: Engine, error: type[Exception]) -> list[str]:
    """What a stream sent before the client met ``error``."""
    seen: list[str] = []

    def read() -> None:
        with engine.stream("fault") as response:
            for event in events(response):
                seen.append(event)  # noqa: PERF402 - what came before the error is kept

    with pytest.raises(error):
        read()
    return seen


def text_of(chunks: list[Json]) -> str:
    found = [chunk["choices"][0]["delta"] for chunk in chunks if chunk.get("choices")]
    return "".join(delta.get("reasoning") or delta.get("content") or "" for delta in found)


def test_exit_ends_the_worker_mid_stream_after_the_xid_line(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    with planted(tmp_path, action="exit", xid=31, kernel_log=str(log)) as engine:
        assert not log.exists()
        with engine.stream("fault") as response:
            seen = list(events(response))
        *tokens, error = chunks_of(seen)
        assert "[DONE]" not in seen
        assert text_of(tokens)
        assert error["error"]["code"] == 500
        assert "ended with exit status 1" in error["error"]["message"]
        assert engine.client.get("/health").status_code == 503
        (line,) = log.read_text().splitlines()
        assert re.search(
            rf" kernel: \[ *\d+\.\d{{6}}\] NVRM: Xid \(PCI:0000:01:00\): 31, pid={engine.worker.pid}, ", line
        )
        report = engine.client.get("/soakrig/settings").json()
        assert report["simulated"] is True
        assert report["plant"]["action"] == "exit"
        assert report["settings"]["SOAKRIG_PLANT"]["source"] == "environment"
        assert "SIMULATED" in engine.log.read_text()


def test_sigkill_takes_worker_and_server(tmp_path: Path) -> None:
    with planted(tmp_path, action="sigkill") as engine:
        assert text_of(chunks_of(broken_stream(engine, httpx.RemoteProtocolError)))
        assert engine.process.wait(10) == -signal.SIGKILL
        until(lambda: not engine.worker.is_running() or engine.worker.status() == "zombie", "the worker's end", 5)
        with pytest.raises(httpx.ConnectError):
            engine.client.get("/health")


def test_hang_keeps_the_connection_open_and_silent(tmp_path: Path) -> None:
    with planted(tmp_path, action="hang") as engine:
        engine.client.timeout = httpx.Timeout(60.0, read=1.5)
        seen = broken_stream(engine, httpx.ReadTimeout)
        assert text_of(chunks_of(seen))
        assert engine.client.get("/health").status_code == 200
        until(lambda: engine.metric("vllm:num_requests_running") == 0, "the hung request to go")


def test_empty_200_is_headers_and_nothing(tmp_path: Path) -> None:
    with planted(tmp_path, action="empty_200") as engine:
        with engine.stream("fault") as response:
            assert response.status_code == 200
            assert response.read() == b""
        whole = engine.chat("fault")
        assert (whole.status_code, whole.content) == (200, b"")
        assert engine.client.get("/health").status_code == 200


def test_answerless_thinks_and_stops(tmp_path: Path) -> None:
    with planted(tmp_path, action="answerless") as engine:
        with engine.stream("fault", stream_options={"include_usage": True}) as response:
            seen = list(events(response))
        chunks = chunks_of(seen)
        assert seen[-1] == "[DONE]"
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] > 20
        assert not any((chunk["choices"] or [{"delta": {}}])[0]["delta"].get("content") for chunk in chunks)
        message = engine.chat("fault").json()["choices"][0]["message"]
        assert (message["content"], message["tool_calls"]) == (None, [])


def test_cut_ends_the_connection_without_an_end(tmp_path: Path) -> None:
    with planted(tmp_path, action="cut") as engine:
        seen = broken_stream(engine, httpx.RemoteProtocolError)
        assert text_of(chunks_of(seen))
        assert "[DONE]" not in seen
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks_of(seen))
        with pytest.raises(httpx.RemoteProtocolError):
            engine.chat("fault")
        assert engine.client.get("/health").status_code == 200
        until(lambda: engine.metric("vllm:num_requests_running") == 0, "the cut request to go")


def test_error_frame_comes_under_200_and_before_done(tmp_path: Path) -> None:
    with planted(tmp_path, action="error_frame") as engine:
        with engine.stream("fault") as response:
            assert response.status_code == 200
            seen = list(events(response))
        *tokens, error = chunks_of(seen)
        assert text_of(tokens)
        assert error["error"]["code"] == 500
        assert seen[-1] == "[DONE]"
        assert engine.client.get("/health").status_code == 200


def test_one_token_goes_on_to_the_limit(tmp_path: Path) -> None:
    with planted(tmp_path, action="one_token") as engine:
        choice = engine.chat("fault", max_tokens=200).json()["choices"][0]
        assert choice["message"]["content"] == "!" * 200
        assert choice["finish_reason"] == "length"


def test_a_condition_that_does_not_hold_plants_nothing_but_stays_marked(tmp_path: Path) -> None:
    plant = {"action": "exit", "when": {"VLLM_MOE_DMA_STAGING": "1"}}
    with running(tmp_path, SOAKRIG_PLANT=json.dumps(plant), VLLM_MOE_DMA_STAGING="0") as engine:
        for number in range(3):
            assert engine.chat(f"turn {number}").status_code == 200
        report = engine.client.get("/soakrig/settings").json()
        assert report["simulated"] is True
        assert report["settings"]["VLLM_MOE_DMA_STAGING"] == {"value": 0, "source": "environment", "obeyed": True}
