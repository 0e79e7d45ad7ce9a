"""The embedded engine with experts off the device, as a real process: what it reports, refuses, writes and survives."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from e2e.soaking import Soak, consistent
from e2e.test_embedded_process import Engine, Json, events, refused, running, until
from soakrig.engine.embedded.config import EngineConfig
from soakrig.engine.embedded.link import WorkerLink
from soakrig.engine.embedded.settings import Settings
from soakrig.engine.offload.plan import OffloadPlan
from soakrig.engine.offload.profile import read_profile
from soakrig.engine.offload.trace import read_trace
from soakrig.errors import EngineStartError, SoakrigError, UsageError

MODEL = "embedded-l4-e32-k4-h128-w0"
BAD_PLANT = json.dumps({"action": "bad_expert_id", "after": {"turns": 1}})


def folder(parent: Path, name: str) -> Path:
    """A folder for one more engine: each has its own port file."""
    made = parent / name
    made.mkdir()
    return made


def completion(engine: Engine, prompt: str = "def f(x):", tokens: int = 60) -> str:
    answer = engine.client.post(
        "/v1/completions", json={"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    ).json()
    return answer["choices"][0]["text"]


def offload(engine: Engine, **query: Any) -> Json:
    answer = engine.client.get("/soakrig/offload", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(tmp_path_factory.mktemp("cached"), VLLM_MOE_HOT_SLOTS="8", VLLM_MOE_SLOT_POLICY="lfru") as engine:
        yield engine


def test_settings_say_what_they_came_to(cached: Engine) -> None:
    report = cached.client.get("/soakrig/settings").json()
    assert report["settings"]["VLLM_MOE_HOT_SLOTS"] == {"value": 8, "source": "environment", "obeyed": True}
    assert report["settings"]["VLLM_MOE_DMA_STAGING"] == {"value": 1, "source": "default", "obeyed": True}
    found = report["offload"]
    assert (found["model"], found["offloaded_layers"], found["slots"], found["frozen"]) == (MODEL, 4, 32, False)
    row = 3 * 128 * 128 * 4
    assert found["layers"][3] == {
        "layer": 3, "experts": 32, "row_bytes": row, "slots": 8, "policy": "lfru", "hot": 0,
    }  # fmt: skip
    memory = found["memory"]
    assert memory["bank_bytes_asked"] == found["bank_bytes"] == 4 * 32 * row
    assert memory["bank_bytes_resident"] < 1.05 * memory["bank_bytes_asked"]
    assert memory["slot_bytes"] == 32 * row


def test_the_server_that_plans_still_has_no_torch(cached: Engine) -> None:
    maps = Path(f"/proc/{cached.process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numba" not in maps


def test_counters_move_with_work_and_a_window_leaves_the_start_out(cached: Engine) -> None:
    before = cached.metric("soakrig:moe_engine_steps_total")
    completion(cached, tokens=260)
    assert cached.metric("soakrig:moe_engine_steps_total") == before + 260
    whole = offload(cached)
    assert (whole["kind"], whole["bad_ids"], list(whole["layers"])) == ("uncontrolled", 0, ["0", "1", "2", "3"])
    window = offload(cached, first_step=100, last_step=200)
    assert (window["kind"], window["engine_steps"]) == ("measured", 100)
    total = window["total"]["small"]
    assert total["steps"] == 400
    assert total["accesses"] == 400 * 4, "decodes of one token"
    assert total["misses"] == total["unique"] - total["unique_hits"] == total["fills"] + total["staged"] > 0
    assert total["hit_rate"]["per_unique"] == total["unique_hits"] / total["unique"]
    assert set(total["hit_rate"]) == {"per_access", "per_unique", "per_step"}
    page = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in cached.client.get("/metrics").text.splitlines()
        if line.startswith("soakrig:moe_")
    }
    for layer, found in offload(cached)["layers"].items():
        for path in ("small", "large"):
            for name in ("hits", "fills", "bytes_moved"):
                series = f'soakrig:moe_{name}_total{{layer="{layer}",model_name="embedded",path="{path}"}}'
                assert page[series] == found[path][name]
    answer = cached.client.get("/soakrig/offload", params={"first_step": 50, "last_step": 200})
    assert answer.status_code == 400
    assert "the nearest kept are 0 and 100" in answer.json()["error"]["message"]


def test_where_experts_are_changes_no_word_and_no_logprob(cached: Engine, tmp_path: Path) -> None:
    prompt = "".join(f"- entry {number}: one line\n" for number in range(40))

    def answers(engine: Engine) -> tuple[str, Any]:
        rows = engine.client.post("/v1/completions", json={"prompt": prompt, "prompt_logprobs": 2, "max_tokens": 1})
        return completion(engine), rows.json()["choices"][0]["prompt_logprobs"]

    with running(tmp_path) as engine:
        resident = answers(engine)
        settings = engine.client.get("/soakrig/settings").json()["offload"]
        assert (settings["offloaded_layers"], settings["memory"]["bank_bytes_asked"]) == (0, 0)
        assert "soakrig:moe" not in engine.client.get("/metrics").text
    with running(folder(tmp_path, "in place"), CPU_OFFLOAD_GB="1", VLLM_MOE_DMA_STAGING="0") as engine:
        assert answers(engine) == resident
    assert answers(cached) == resident


@contextlib.contextmanager
def planted(folder: Path, **environment: str) -> Iterator[Engine]:
    with running(folder, SOAKRIG_PLANT=BAD_PLANT, **environment) as engine:
        assert engine.chat("hello").json()["choices"][0]["finish_reason"] == "stop"
        yield engine


@pytest.mark.parametrize("environment", [{}, {"VLLM_MOE_HOT_SLOTS": "8"}], ids=["resident", "slots"])
def test_a_bad_id_fails_its_request_and_the_engine_lives(tmp_path: Path, environment: dict[str, str]) -> None:
    with planted(tmp_path, **environment) as engine:
        written = completion(engine, tokens=400)
        beside: list[str] = []
        other = threading.Thread(target=lambda: beside.append(completion(engine, tokens=400)))
        other.start()
        until(lambda: engine.metric("vllm:num_requests_running") == 1, "the other request to run")
        whole = engine.chat("fault")
        assert whole.status_code == 500
        error = whole.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("BadExpertId", "bad_expert_id", None)
        assert "out of range (0 to 31 was expected)" in error["message"]
        with engine.stream("fault") as response:
            assert response.status_code == 200
            *_, frame, last = list(events(response))
        assert json.loads(frame)["error"]["code"] == "bad_expert_id"
        assert last == "[DONE]"
        other.join()
        assert beside == [written], "a request beside it was touched"
        assert engine.client.get("/health").status_code == 200
        assert completion(engine, tokens=400) == written
        assert engine.chat("ping", max_tokens=4).status_code == 200, "a canary is no turn"
        series = 'soakrig:moe_bad_ids_total{layer="0",model_name="embedded",path='
        assert sum(engine.metric(f'{series}"{path}"}}') for path in ("small", "large")) == 2
        assert offload(engine)["bad_ids"] == 2
        assert engine.metric('vllm:request_success_total{finished_reason="error",model_name="embedded"}') == 2
        assert engine.metric("vllm:kv_cache_usage_perc") == 0


def test_a_run_tells_of_bad_ids_and_of_the_cache(tmp_path: Path) -> None:
    settings = ["--set", f"SOAKRIG_PLANT={BAD_PLANT}", "--set", "VLLM_MOE_HOT_SLOTS=8"]
    with Soak(tmp_path, *settings, "--max-bad", "1", turns=6) as soak:
        result = soak.finish()
    assert (result["verdict"], result["engine"]["alive"]) == ("fail", True)
    assert result["outcomes"] == {"ok": 1, "error_frame": 1}
    found = result["offload"]
    assert found["bad_ids"] >= 1
    assert (
        f"{found['bad_ids']} expert id{'s' * (found['bad_ids'] > 1)} out of range in the engine's routing"
        in (result["reasons"])
    )
    assert (found["kind"], found["first_step"]) == ("uncontrolled", 0), "the engine was started for this run"
    assert found["last_step"] > 50
    assert all(0 < found["hit_rate"][name] < 1 for name in ("per_access", "per_unique", "per_step"))
    assert found["misses_per_step_per_layer"] > 0
    assert found["bytes_moved"] > 0
    assert found["counters"]["large"]["accesses"] > 0
    assert result["settings"]["engine"]["offload"]["offloaded_layers"] == 4
    consistent(result, soak.events())


def test_a_run_on_a_resident_engine_has_no_such_part(tmp_path: Path) -> None:
    with Soak(tmp_path, turns=2) as soak:
        result = soak.finish()
    assert (result["verdict"], result["offload"]) == ("pass", None)


def profile(counts: dict[str, list[int]], **fields: Any) -> str:
    whole: Json = {"schema": "soakrig.hot_profile/1", "model": MODEL, "offload_gb": None, "experts": 32, "steps": 9}
    return json.dumps({**whole, "counts": counts, **fields})


FOUR = {str(layer): [1] * 32 for layer in range(4)}
SLOT_MAP = json.dumps({"schema": "soakrig.slots/1", "experts": 32, "slots": {"0": 8, "1": 8}})


@pytest.mark.parametrize(
    ("environment", "file", "said"),
    [
        ({"VLLM_MOE_HOT_SLOTS": "33"}, "", ["33 slots in layer 0", "32 experts"]),
        ({"VLLM_MOE_HOT_SLOTS": "arena:129"}, "", ["129 shared slots", "128 experts"]),
        ({"CPU_OFFLOAD_GB": "-1"}, "", ["CPU_OFFLOAD_GB='-1'", "0 or more"]),
        ({"VLLM_MOE_HOT_SLOTS": "8", "CPU_OFFLOAD_GB": "0"}, "", ["VLLM_MOE_HOT_SLOTS='8'", "CPU_OFFLOAD_GB='0'"]),
        ({"VLLM_MOE_HOT_SLOTS": "FILE"}, SLOT_MAP, ["0-1 (2 layers)", "0-3 (4 layers)"]),
        ({"VLLM_MOE_HOT_SLOTS": "FILE"}, SLOT_MAP[:-9], ["is no slot map", "keys: schema, experts, slots"]),
        ({"VLLM_MOE_HOT_PROFILE": "FILE"}, profile(FOUR, model="embedded-l9"), ["foreign", "embedded-l9", MODEL]),
        ({"VLLM_MOE_HOT_PROFILE": "FILE"}, profile({"0": [1] * 64}, experts=64), ["foreign", "64 experts", "with 32"]),
        ({"VLLM_MOE_HOT_PROFILE": "FILE"}, profile({"0": [0] * 32}), ["empty", "1 layers, 9 steps"]),
        ({"VLLM_MOE_HOT_PROFILE": "FILE"}, profile({}), ["empty", "0 layers, 9 steps"]),
        ({"VLLM_MOE_HOT_PROFILE": "FILE"}, profile({"0": [1] * 31}), ["31 counts", "32 experts"]),
        ({"VLLM_MOE_HOT_PROFILE": "FILE"}, "\x00\x01", ["is no hot profile"]),
    ],
)
def test_what_does_not_fit_the_model_is_refused_at_start(
    tmp_path: Path, environment: dict[str, str], file: str, said: list[str]
) -> None:
    place = tmp_path / "given.json"
    place.write_text(file)
    whole = {"VLLM_MOE_HOT_SLOTS": "8", **environment}
    code, words = refused(**{name: str(place) if text == "FILE" else text for name, text in whole.items()})
    assert code == 64, words
    assert all(one in words for one in said), words


def test_a_profile_is_written_and_then_pins(tmp_path: Path) -> None:
    written = tmp_path / "skew.json"
    with running(tmp_path, CPU_OFFLOAD_GB="1", VLLM_MOE_SKEW_PERLAYER=str(written)) as engine:
        completion(engine, tokens=200)
        until(written.exists, "the profile while the engine idles")
        completion(engine, "class A:", tokens=100)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(10) == 0
    taken = read_profile(str(written))
    assert (taken.model, taken.steps, taken.layers) == (MODEL, 300, (0, 1, 2, 3))
    environment = {"CPU_OFFLOAD_GB": "1", "VLLM_MOE_HOT_SLOTS": "8", "VLLM_MOE_HOT_PROFILE": str(written)}
    with running(folder(tmp_path, "pinned"), **environment) as engine:
        found = engine.client.get("/soakrig/settings").json()["offload"]
        assert [(layer["policy"], layer["hot"]) for layer in found["layers"]] == [("static", 8)] * 4
        completion(engine)
        total = offload(engine)["total"]["small"]
        assert total["fills"] == total["evictions"] == 0, "pinned: what starts in a slot stays"
        assert total["hit_rate"]["per_access"] > 0.3
    # The same profile under another offload: told once, and used where it fits.
    with running(folder(tmp_path, "other"), **{**environment, "CPU_OFFLOAD_GB": "0.01"}) as engine:
        report = engine.client.get("/soakrig/settings").json()["offload"]
        assert [layer["policy"] for layer in report["layers"]] == ["static"] * 2
        (warning,) = report["warnings"]
        assert "CPU_OFFLOAD_GB=1" in warning
        assert "CPU_OFFLOAD_GB=0.01" in warning
        assert engine.log.read_text().count(warning) == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_trace_is_readable_however_the_engine_ends(tmp_path: Path, how: signal.Signals) -> None:
    place = tmp_path / "routing.trace"
    with running(tmp_path, VLLM_MOE_HOT_SLOTS="8", VLLM_MOE_ROUTING_TRACE=str(place)) as engine:
        completion(engine, tokens=100)
        header = place.stat().st_size if place.stat().st_size < 10_000 else 0
        until(lambda: place.stat().st_size > header, "the trace while the engine idles")
        with engine.stream("more", max_tokens=4000, ignore_eos=True) as response:
            seen = events(response)
            for _ in range(20):
                next(seen)
            engine.process.send_signal(how)
            assert engine.process.wait(10) == (0 if how == signal.SIGTERM else -signal.SIGKILL)
        until(lambda: not engine.worker.is_running() or engine.worker.status() == "zombie", "the worker's end", 5)
    trace = read_trace(str(place))
    steps = list(trace.steps())
    assert trace.header.model == MODEL
    assert trace.header.plan is not None
    assert [layer.slots for layer in trace.header.plan.layers] == [8] * 4
    assert trace.torn_bytes == 0
    assert len(steps) >= (120 if how == signal.SIGTERM else 100)
    marks, ids = steps[0]
    assert (marks == 1).all()
    assert ids.shape[1:] == (4, 4)
    decodes = np.concatenate([marks for marks, _ in steps[1:100]])
    assert (decodes == 0).all()
    assert len(decodes) == 99


def test_a_profile_that_cannot_be_written_any_more_costs_no_request(tmp_path: Path) -> None:
    place = folder(tmp_path, "gone")
    with running(tmp_path, CPU_OFFLOAD_GB="1", VLLM_MOE_SKEW_PERLAYER=str(place / "skew.json")) as engine:
        place.rmdir()
        completion(engine)
        until(lambda: "the hot profile cannot be written" in engine.log.read_text(), "the warning")
        assert completion(engine)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(15) == 0
        assert "Traceback" not in engine.log.read_text()


@pytest.mark.parametrize(
    ("hidden", "layer", "error"), [(128, 9, UsageError), (64, 0, EngineStartError)], ids=["no such layer", "other rows"]
)
def test_what_only_the_worker_finds_out_is_an_error_at_start_too(
    hidden: int, layer: int, error: type[SoakrigError], capfd: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig()
    shape = dataclasses.replace(config, hidden=hidden).model_shape
    plan = OffloadPlan.build(Settings.from_environment({"CPU_OFFLOAD_GB": "1"}), shape)
    plan = dataclasses.replace(plan, layers=(dataclasses.replace(plan.layers[0], layer=layer), *plan.layers[1:]))

    async def start() -> None:
        link = WorkerLink(config, plan, lambda _: None)
        try:
            await link.ready()
        finally:
            await link.stop()

    with pytest.raises(error, match=f"ended with exit status {error.exit_code}"):
        asyncio.run(start())
    words = capfd.readouterr().err
    assert words.startswith("error: ")
    assert "Traceback" not in words


def test_a_plan_longer_than_an_argument_may_be_reaches_the_worker() -> None:
    """Linux takes 128 KiB for one; a model of many layers with hot sets passes that."""
    config = EngineConfig(layers=1, experts=2, top_k=1, hidden=64)
    plan = OffloadPlan.build(Settings.from_environment({"VLLM_MOE_HOT_SLOTS": "1"}), config.model_shape)
    plan = dataclasses.replace(plan, warnings=("x" * 200_000,))

    async def start() -> int:
        link = WorkerLink(config, plan, lambda _: None)
        try:
            await link.ready()
            return link.memory["bank_bytes_asked"]
        finally:
            await link.stop()

    assert asyncio.run(start()) == 2 * 3 * 64 * 64 * 4


def test_a_terminated_worker_writes_profile_and_trace_before_it_goes(tmp_path: Path) -> None:
    """As a service manager ends a whole group of processes, in the middle of a request."""
    skew, trace = tmp_path / "skew.json", tmp_path / "a.trace"
    paths = {"VLLM_MOE_SKEW_PERLAYER": str(skew), "VLLM_MOE_ROUTING_TRACE": str(trace)}
    with running(tmp_path, VLLM_MOE_HOT_SLOTS="8", **paths) as engine:
        worker = engine.client.get("/soakrig/settings").json()["worker_pid"]
        asking = threading.Thread(target=lambda: completion_or_nothing(engine), daemon=True)
        asking.start()
        until(lambda: offload(engine)["last_step"] >= 20, "twenty steps")
        os.kill(worker, signal.SIGTERM)
        until(lambda: engine.client.get("/health").status_code == 503, "the worker's end")
        assert "SIGTERM" in engine.client.get("/health").text
        asking.join(10)
    assert read_profile(str(skew)).steps >= 20
    assert len(list(read_trace(str(trace)).steps())) == read_profile(str(skew)).steps


def completion_or_nothing(engine: Engine) -> None:
    with contextlib.suppress(KeyError):
        completion(engine, tokens=3000)
