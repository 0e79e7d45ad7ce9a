"""`soak plan replay` of a trace that a real engine captured: the engine's own counters, per layer, every policy."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from e2e.test_embedded_offload import completion, folder, offload
from e2e.test_embedded_process import Engine, running, until
from soakrig.cli import main
from soakrig.engine.offload.counters import COUNTERS
from soakrig.engine.offload.trace import read_trace

PROMPTS = ("def f(x):", "- one\n- two\n" * 40, "the quick brown fox")


def serve(engine: Engine) -> dict[str, Any]:
    """Three requests at once, so that steps have several tokens and prefill falls in between; the counters after."""
    asked = [threading.Thread(target=completion, args=(engine, prompt, 120)) for prompt in PROMPTS]
    for one in asked:
        one.start()
    for one in asked:
        one.join()
    completion(engine, "and once more", 40)
    until(lambda: offload(engine)["last_step"] == engine.metric("soakrig:moe_engine_steps_total"), "the last counters")
    return offload(engine)


def replayed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main.invoke(["plan", "replay", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("profile")
    with running(place, VLLM_MOE_SKEW_PERLAYER=str(place / "skew.json"), CPU_OFFLOAD_GB="1") as engine:
        serve(engine)
        engine.process.terminate()
        assert engine.process.wait(10) == 0
    return place / "skew.json"


@pytest.mark.parametrize(
    ("policy", "slots", "warm"),
    [
        ("lru", "8", False), ("lfru", "8", False), ("clock", "8", False), ("static", "8", True), ("lfru", "5", True),
        ("lru", "arena:30", False),
    ],
)  # fmt: skip
def test_a_replay_has_the_engines_own_counters(
    policy: str, slots: str, warm: bool, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "routing.trace"
    environment = {"VLLM_MOE_SLOT_POLICY": policy, "VLLM_MOE_HOT_SLOTS": slots, "VLLM_MOE_ROUTING_TRACE": str(path)}
    if warm:
        environment["VLLM_MOE_HOT_PROFILE"] = str(profile)
    with running(folder(tmp_path, "engine"), **environment) as engine:
        counted = serve(engine)
        engine.process.terminate()
        assert engine.process.wait(10) == 0
    assert len(list(read_trace(str(path)).steps())) == counted["last_step"]
    small = counted["total"]["small"]
    assert small["accesses"] > small["steps"] * 4, "steps of several tokens"
    assert counted["total"]["large"]["steps"] > 0, "prefill"
    shape = ["--layers", "4", "--top-k", "4", "--experts", "32"]
    ways = [["--as-captured"], [*shape, "--slots", slots, "--policy", policy]]
    for way in ways:
        found = replayed(capsys, str(path), *way)
        assert found["misses"] == small["misses"]
        assert found["misses_per_step_per_layer"] == small["misses_per_step_per_layer"]
        assert found["policy"] == policy
        assert found["hit_rate"] == {name: small["hit_rate"][name] for name in ("per_access", "per_unique")}
        for one in found["per_layer"]:
            own = counted["layers"][str(one["layer"])]
            assert {name: one[name] for name in COUNTERS} == {name: own["small"][name] for name in COUNTERS}
            assert {name: one["large"][name] for name in COUNTERS} == {name: own["large"][name] for name in COUNTERS}
            assert one["hit_rate"] == own["small"]["hit_rate"]
    if ":" not in slots:  # what other slots would have counted is something else, so that agreeing says something
        other = replayed(capsys, str(path), *shape, "--slots", str(int(slots) + 3), "--policy", policy)
        assert other["misses"] < small["misses"]
