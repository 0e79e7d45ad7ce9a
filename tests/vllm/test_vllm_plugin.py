"""The plug-in in a real vLLM server of several processes: endpoints, metrics, a bad id, a frozen engine, refusals."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from soakrig.engine.launcher import EngineProcess
from soakrig.engine.vllm.launch import launch_vllm
from soakrig.engine.vllm.served_model import ServedModel
from soakrig.engine.vllm.tiny import make_tiny
from soakrig.engine.vllm.tiny_spec import TinySpec
from soakrig.errors import UsageError
from vllm_python import vllm_python

pytestmark = pytest.mark.vllm
START_S = 600
SLOTS = {"VLLM_MOE_HOT_SLOTS": "8"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    vllm_python()
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder, TinySpec())
    return ServedModel(str(folder), "tiny", tiny=True)


def start(model: ServedModel, folder: Path, **settings: str) -> EngineProcess:
    folder.mkdir(parents=True, exist_ok=True)
    return launch_vllm(model, {**SLOTS, **settings}, ["--max-model-len=4096"], folder, timeout=START_S)


@pytest.fixture(scope="module")
def server(model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """API server, EngineCore and worker apart, as on a card."""
    with start(model, tmp_path_factory.mktemp("server"), VLLM_ENABLE_V1_MULTIPROCESSING="1") as engine:
        yield engine


def get(engine: EngineProcess, path: str, **params: Any) -> httpx.Response:
    return httpx.get(engine.base_url + path, params=params, timeout=60, trust_env=False)


def ask(engine: EngineProcess, tokens: int = 40, seed: int = 1) -> httpx.Response:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": f"Tell me of {seed}."}], "max_tokens": tokens,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    return httpx.post(f"{engine.base_url}/v1/chat/completions", json=body, timeout=300, trust_env=False)


def test_settings_say_what_they_came_to(server: EngineProcess) -> None:
    said = get(server, "/soakrig/settings").json()
    assert said["engine"] == "vllm"
    assert said["installed"] is True
    assert said["settings"]["VLLM_MOE_HOT_SLOTS"] == {"value": 8, "source": "environment", "obeyed": True}
    assert said["offload"]["offloaded_layers"] == 4
    assert said["offload"]["slots"] == 32
    memory = said["offload"]["memory"]
    assert memory["bank_bytes_asked"] <= memory["bank_bytes_resident"]
    assert said["simulated"] is False


def test_counters_move_with_work_and_stand_on_metrics(server: EngineProcess) -> None:
    before = get(server, "/soakrig/offload").json()
    assert ask(server, tokens=220).status_code == 200
    after = get(server, "/soakrig/offload").json()
    assert after["last_step"] >= before["last_step"] + 219
    assert after["kind"] == "uncontrolled"
    small = after["total"]["small"]
    assert small["accesses"] > before["total"]["small"]["accesses"]
    assert small["fills"] + small["staged"] == small["unique"] - small["unique_hits"]
    window = get(server, "/soakrig/offload", first_step=100, last_step=200).json()
    assert (window["kind"], window["engine_steps"]) == ("measured", 100)
    assert window["total"]["small"]["steps"] + window["total"]["large"]["steps"] == 400
    assert get(server, "/soakrig/offload", first_step=101, last_step=200).status_code == 400
    until = time.monotonic() + 60
    while True:
        page = get(server, "/metrics").text
        lines = [line for line in page.splitlines() if line.startswith("soakrig:moe_accesses_total{")]
        if sum(float(line.rpartition(" ")[2]) for line in lines if 'path="small"' in line) == small["accesses"]:
            break
        assert time.monotonic() < until, "the counters on /metrics never caught up"
        get(server, "/soakrig/ping")  # a round trip: time for the refresh


def test_a_frozen_engine_is_silent_to_a_ping_while_health_is_green(server: EngineProcess) -> None:
    assert get(server, "/soakrig/ping").json()["alive"] is True
    (core,) = [one for one in psutil.Process(server.pid).children(recursive=True) if "EngineCore" in one.name()]
    core.send_signal(signal.SIGSTOP)
    try:
        said = get(server, "/soakrig/ping", deadline=1)
        assert (said.status_code, said.json()["alive"]) == (503, False)
        assert get(server, "/health").status_code == 200
        assert get(server, "/soakrig/offload").status_code == 503
    finally:
        core.send_signal(signal.SIGCONT)
    assert get(server, "/soakrig/ping", deadline=60).json()["alive"] is True
    assert ask(server).status_code == 200


def test_a_bad_id_ends_its_request_with_an_error_and_the_engine_lives(model: ServedModel, tmp_path: Path) -> None:
    plant = {"action": "bad_expert_id", "hazard": 1, "after": {"turns": 2}}
    with start(model, tmp_path, SOAKRIG_PLANT=json.dumps(plant)) as engine:
        words = [ask(engine, seed=seed).json()["choices"][0]["message"] for seed in (1, 2)]
        assert all(one["content"] or one.get("reasoning") or one.get("reasoning_content") for one in words)
        struck = ask(engine, seed=3)
        assert struck.status_code == 500, struck.text
        assert "error" in struck.json()
        # The engine lives: a request too small to be a turn is answered, and the blocks of the broken one are not used.
        assert ask(engine, tokens=8, seed=1).status_code == 200
        counted = get(engine, "/soakrig/offload").json()
        assert counted["bad_ids"] == 1
        assert get(engine, "/soakrig/settings").json()["simulated"] is True
        assert get(engine, "/health").status_code == 200


def test_a_streamed_request_with_a_bad_id_ends_in_an_error_frame(model: ServedModel, tmp_path: Path) -> None:
    plant = {"action": "bad_expert_id", "hazard": 1}
    with start(model, tmp_path, SOAKRIG_PLANT=json.dumps(plant)) as engine:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 40}
        url = f"{engine.base_url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=300, trust_env=False) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert any('"error"' in line for line in lines), lines
        assert not any('"finish_reason":"stop"' in line.replace(" ", "") for line in lines)
        assert ask(engine, tokens=8).status_code == 200


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"VLLM_MOE_HOT_SLOTS": "33"}, "asks for 33 slots in layer 0, which has 32 experts"),
        ({"VLLM_MOE_HOT_SLOTS": "many"}, "VLLM_MOE_HOT_SLOTS='many' makes no sense"),
    ],
)
def test_what_does_not_fit_is_refused_at_start(
    settings: dict[str, str], said: str, model: ServedModel, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        launch_vllm(model, settings, ["--max-model-len=4096"], tmp_path, timeout=START_S)
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_line(p))], os.getpid()


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
