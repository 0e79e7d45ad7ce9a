"""Rows on a real vLLM: loads and probes on one server, which then is restarted, killed under load, and planted.

The tests share the server and run in their order. Rows that are not here: agent-loop has its own soak (test_vllm_soak),
dead-proxy's answers of a dead vLLM are golden (test_vllm_kills), kv-offload-shm needs a card.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reproducing import found, its_own, planted, soak_engine
from soakrig.engine.bundled import TINY, Order, launch_bundled
from soakrig.reproducers.engine_control import EngineControl
from soakrig.reproducers.registry import REPRODUCERS
from vllm_python import vllm_python
from vllm_serving import START_S

pytestmark = pytest.mark.vllm

LOADS: dict[str, tuple[int, dict[str, Any]]] = {
    "short-decode": (5, {}),
    "long-prefill": (8, {"parameters": {"from_tokens": 128}}),
    "mixed-burst": (2, {"conversations": 4, "max_tokens": 32, "parameters": {"prompt_tokens": 400, "writers": 2}}),
    "long-decode": (2, {"max_tokens": 200}),
    "garbage": (6, {"max_tokens": 32}),
    "amnesia": (4, {"tools": 2, "max_tokens": 48, "parameters": {"states": 2}}),
    "host-ram": (2, {}),
}


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineControl]:
    vllm_python()
    folder = tmp_path_factory.mktemp("vllm")

    def launch(number: int) -> Any:
        place = folder / f"engine-{number}"
        place.mkdir()
        settings = {"CPU_OFFLOAD_GB": "1"} if number < 3 else planted(action="exit", after={"turns": 0})
        flags = ["--max-model-len=2048", "--enable-prompt-tokens-details", "--num-gpu-blocks-override=40"]
        order = Order(TINY, settings, flags, start_s=START_S, caller=dict(os.environ), canary=number < 3)
        return launch_bundled(order, place)

    with EngineControl(launch) as one:
        one.start()
        yield one


@pytest.mark.parametrize("name", LOADS)
def test_a_load_is_clean(tmp_path: Path, control: EngineControl, name: str) -> None:
    turns, options = LOADS[name]
    result = soak_engine(tmp_path, name, control, turns=turns, **options)
    assert (result.verdict, set(result.outcomes)) == ("pass", {"ok"}), result.reasons
    assert result.exposure.turns == turns * options.get("conversations", REPRODUCERS[name].usual.conversations)
    if name == "long-prefill":
        assert (found(result, "longest-prefill").value or 0) > 0.9 * 2048, "the ladder ends near the limit"
    if name == "garbage":
        assert found(result, "canary-perplexity").value is not None
    if name == "amnesia":
        assert found(result, "amnesia-mass").value is not None


def test_nothing_is_sent_and_nothing_proved(tmp_path: Path, control: EngineControl) -> None:
    result = soak_engine(tmp_path, "idle", control, parameters={"seconds": 2.0})
    assert (result.verdict, result.exposure.turns, result.engine.alive) == ("inconclusive", 0, True)


def test_a_prefix_is_the_same_warm_evicted_and_restarted(tmp_path: Path, control: EngineControl) -> None:
    parameters = {"prompts": 2, "prompt_tokens": 500}
    result = soak_engine(tmp_path, "restart-prefix", control, parameters=parameters)
    assert (result.verdict, result.outcomes) == ("pass", {"ok": 8}), result.reasons
    told = {one.name: one.text for one in result.findings if one.says == "clean"}
    cached = {name: "(0 tokens from the cache)" not in text for name, text in told.items() if "next token" in text}
    assert cached == {
        "prefix-drift-cold": False, "prefix-drift-warm": True, "prefix-drift-evicted": False,
        "prefix-drift-restarted": False,
    }  # fmt: skip


def test_a_server_that_is_killed_under_load_leaves_its_core(tmp_path: Path, control: EngineControl) -> None:
    """No plant: vLLM's engine core goes on when its API server is killed, and the row's own fault is that."""
    parameters = {"ways": "kill", "turns": 2, "streams": 2, "patience": 5.0}
    result = soak_engine(tmp_path, "wedge", control, parameters=parameters)
    assert its_own(result, "wedge")
    left = found(result, "survivors-kill")
    assert left.says == "fault"
    assert "VLLM::EngineCor" in left.text
    assert not any(one.name.startswith("unkillable") for one in result.findings), "it was ended then"
    assert found(result, "shm-kill").says == "clean"


def test_the_first_short_request_kills_it(tmp_path: Path, control: EngineControl) -> None:
    control.start()
    result = soak_engine(tmp_path, "short-decode", control)
    assert its_own(result, "short-decode")
    assert result.first_bad is not None
    assert (result.first_bad.turn, result.engine.died_after_turn, result.simulated) == (1, 0, True)
