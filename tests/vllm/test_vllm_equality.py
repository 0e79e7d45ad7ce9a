"""The plug-in changes no number of vLLM: ids, logprobs and prompt logprobs, to the bit, wherever the experts are.

Each mode (eager, compiled) against its own stock, one request at a time: stock differs from itself between modes and
when requests share steps. One process serves all cases of a mode, the store built anew over the same banks.
"""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from soakrig.engine.offload.counters import COUNTERS
from soakrig.engine.offload.replay import replay
from soakrig.engine.offload.trace import read_trace
from soakrig.engine.vllm.tiny import make_tiny
from soakrig.engine.vllm.tiny_spec import TinySpec
from vllm_python import vllm_python

pytestmark = pytest.mark.vllm

LENGTHS = (4, 30, 150, 500, 1200, 2700)
TOKENS = 64
EXPERTS = 32
POLICIES = ("lru", "lfru", "clock")
SHARES = (8, 16, 32)
STALE = "stale"
LAYER_GB = 0.0001
"""Reached by one layer: three stay on the device."""
START_S = 600

CASES: dict[str, dict[str, str]] = {
    "profiled": {"VLLM_MOE_HOT_SLOTS": "8", "VLLM_MOE_SKEW_PERLAYER": "PROFILE"},
    "no slots": {"CPU_OFFLOAD_GB": "1"},
    "in place": {"CPU_OFFLOAD_GB": "1", "VLLM_MOE_DMA_STAGING": "0"},
    "large steps in place": {"VLLM_MOE_HOT_SLOTS": "8", "VLLM_MOE_PREFILL_GROUPS": "0"},
    "static 8": {"VLLM_MOE_HOT_SLOTS": "8", "VLLM_MOE_HOT_PROFILE": "PROFILE"},
    "static 16": {"VLLM_MOE_HOT_SLOTS": "16", "VLLM_MOE_HOT_PROFILE": "PROFILE"},
    "static 32": {"VLLM_MOE_HOT_SLOTS": "32", "VLLM_MOE_HOT_PROFILE": "PROFILE"},
    "arena": {"VLLM_MOE_HOT_SLOTS": "arena:48", "VLLM_MOE_SLOT_POLICY": "lru"},
    **{
        f"{policy} {slots}": {"VLLM_MOE_HOT_SLOTS": str(slots), "VLLM_MOE_SLOT_POLICY": policy}
        for policy in POLICIES
        for slots in SHARES
    },
    STALE: {"VLLM_MOE_HOT_SLOTS": "8", "VLLM_MOE_SLOT_POLICY": "lru"},
}
COMPILED_CASES: dict[str, dict[str, str]] = {
    "one layer": {"CPU_OFFLOAD_GB": str(LAYER_GB), "VLLM_MOE_HOT_SLOTS": "8"},
    STALE: {"CPU_OFFLOAD_GB": str(LAYER_GB), "VLLM_MOE_HOT_SLOTS": "8"},
}
COMPILED_ALL: dict[str, dict[str, str]] = {
    "lru 8": {"VLLM_MOE_HOT_SLOTS": "8"},
    "in place": {"CPU_OFFLOAD_GB": "1", "VLLM_MOE_DMA_STAGING": "0"},
}


@dataclass
class Served:
    """What one process said, by case, and where its traces are."""

    cases: dict[str, Any]
    folder: Path


def serve(folder: Path, name: str, model: Path, cases: dict[str, dict[str, str]], *, eager: bool) -> Served:
    """Run the driver; one trace a case."""
    profile = str(folder / "profile.json")
    traced = {
        case: {key: profile if value == "PROFILE" else value for key, value in environment.items()}
        | {"VLLM_MOE_ROUTING_TRACE": str(folder / f"{name}-{case}.trace")}
        for case, environment in cases.items()
    }
    prompts = [[random.Random(length).randrange(300, 900) for _ in range(length)] for length in LENGTHS]
    for length, ids in zip(LENGTHS, prompts, strict=True):
        rng = random.Random(length)
        ids[:] = [rng.randrange(300, 900) for _ in range(length)]
    job = {"model": str(model), "eager": eager, "prompts": prompts, "tokens": TOKENS, "cases": traced, "stale": STALE}
    job_path, out = folder / f"{name}.job.json", folder / f"{name}.out.json"
    job_path.write_text(json.dumps(job))
    driver = Path(__file__).with_name("equality_driver.py")
    with (folder / f"{name}.log").open("wb") as log:
        done = subprocess.run(
            [str(vllm_python()), str(driver), str(job_path), str(out)], stdout=log, stderr=log, cwd=folder,
            timeout=START_S + 90 * len(LENGTHS) * max(1, len(cases)), check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert done.returncode == 0, (folder / f"{name}.log").read_text(errors="replace")[-4000:]
    return Served(json.loads(out.read_text()), folder)


@pytest.fixture(scope="module", params=["qwen3-moe", "glm4-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    make_tiny(folder, TinySpec(family=request.param, experts=EXPERTS, top_k=4))
    return folder


@pytest.fixture(scope="module")
def stock(model: Path) -> Any:
    return serve(model.parent, "stock", model, {}, eager=True).cases["stock"]["answers"]


@pytest.fixture(scope="module")
def eager(model: Path) -> Served:
    glm = "glm" in str(model)  # the second family has a shared expert: every kind of case once
    short = ("profiled", "no slots", "in place", "static 16", "clock 8")
    return serve(model.parent, "eager", model, {n: CASES[n] for n in short} if glm else CASES, eager=True)


def test_every_case_gives_the_bits_of_stock(stock: Any, eager: Served) -> None:
    wrong = [case for case, said in eager.cases.items() if case != STALE and said["answers"] != stock]
    assert wrong == []
    assert [len(ids) for ids, _, _ in stock] == [TOKENS] * len(LENGTHS)


def test_one_stale_copy_of_500_is_seen(stock: Any, eager: Served) -> None:
    if STALE in eager.cases:
        assert eager.cases[STALE]["answers"] != stock


def test_the_replay_of_each_trace_gives_the_engines_counters(eager: Served) -> None:
    for case, said in eager.cases.items():
        trace = read_trace(str(eager.folder / f"eager-{case}.trace"))
        assert trace.header.plan is not None
        assert replay(trace, trace.header.plan) == said["report"]["counters"], case
        assert said["report"]["step"] == sum(1 for _ in trace.steps()) == TOKENS * len(LENGTHS)


def test_the_cases_are_what_they_say(eager: Served) -> None:
    """Equality alone could come from a plug-in that does nothing."""
    index = {name: number for number, name in enumerate(COUNTERS)}

    def summed(case: str, path: int, name: str) -> int:
        return sum(layer[path][index[name]] for layer in eager.cases[case]["report"]["counters"])

    assert summed("profiled", 0, "fills") > 0
    assert summed("profiled", 1, "staged") > 0
    assert summed("no slots", 0, "staged") == summed("no slots", 0, "unique") > 0
    assert summed("in place", 0, "in_place") == summed("in place", 0, "unique") > 0
    assert summed("in place", 1, "staged") == 0
    assert summed("static 16", 0, "fills") == 0
    assert summed("static 16", 0, "hits") > summed("static 16", 0, "accesses") // 2, "some experts are hot"
    memory = eager.cases["profiled"]["report"]["memory"]
    assert memory["bank_bytes_asked"] <= memory["bank_bytes_resident"] <= memory["bank_bytes_asked"] * 1.05 + 65536


@pytest.fixture(scope="module")
def compiled_stock(model: Path) -> Any:
    if "glm" in str(model):
        pytest.skip("compiled mode is shown with one family")
    return serve(model.parent, "compiled-stock", model, {}, eager=False).cases["stock"]["answers"]


@pytest.mark.parametrize("cases", [COMPILED_ALL, COMPILED_CASES], ids=["all layers", "one layer"])
def test_compiled_gives_the_bits_of_compiled_stock(
    cases: dict[str, dict[str, str]], compiled_stock: Any, model: Path, request: pytest.FixtureRequest
) -> None:
    served = serve(model.parent, f"compiled-{len(cases)}-{next(iter(cases))}", model, cases, eager=False)
    for case, said in served.cases.items():
        assert (said["answers"] != compiled_stock) == (case == STALE), case
        moved = [layer for layer in said["report"]["counters"] if layer[0][COUNTERS.index("unique")]]
        assert len(moved) == (1 if cases is COMPILED_CASES else 4)
