"""`soak run --engine tiny-moe`: real vLLM, a model made on the spot, sixty turns with fifty tools; and starts that fail
or are broken off."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from e2e.soaking import consistent, gone, wait_for
from soakrig.record.events import SampleTaken, TurnDone
from vllm_python import vllm_python
from vllm_serving import START_S, VllmSoak, get

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    vllm_python()


def test_sixty_turns_with_fifty_tools_pass_and_hit_the_prefix_cache(tmp_path: Path) -> None:
    with VllmSoak(tmp_path, "--engine", "tiny-moe", "--tools", "50", "--max-tokens", "64", turns=60, stall=30) as soak:
        soak.wait_turn(1)
        parts = soak.parts
        assert b'"alive":true' in get(soak.url(), "/soakrig/ping"), "the cheap check of every turn is a round trip"
        result = soak.finish(600)
        parts.nothing_left()
    events = soak.events()
    odd = [(e.turn, e.outcome, e.why) for e in events if isinstance(e, TurnDone) and e.outcome != "ok"]
    assert result["outcomes"] == {"ok": 60}, odd
    assert (result["verdict"], result["exit_code"]) == ("pass", 0), result["reasons"]
    assert result["engine"]["alive"] is True
    assert {name: result["sources"][name]["state"] for name in ("process", "engine_log", "metrics", "kernel_log")} == {
        "process": "live", "engine_log": "live", "metrics": "live", "kernel_log": "live",
    }  # fmt: skip
    assert result["faults"] == []
    consistent(result, events)

    turns = [e for e in events if isinstance(e, TurnDone)]
    assert all(turn.counted == "usage" for turn in turns)
    assert max(turn.context_tokens for turn in turns) > 10_000, "fifty tools and sixty turns are a long prompt"
    metrics = [e.values for e in events if isinstance(e, SampleTaken) and e.source == "metrics"][-1]
    assert metrics["prefix_cache_hits"] > 0.9 * metrics["prefix_cache_queries"]
    assert metrics["generation_tokens"] >= result["exposure"]["output_tokens"]
    assert result["settings"]["bundled"] == "tiny-moe"
    assert result["fingerprint"]["engine"].startswith("0.")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_start_that_is_broken_off_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with VllmSoak(tmp_path, "--engine", "tiny-moe", "--set", "TMPDIR=" + str(tmp_path)) as soak:

        def family() -> list[psutil.Process]:
            keeper = soak.keeper_of()
            assert soak.process.poll() is None, soak.errors.read_text()
            found = keeper.children(recursive=True) if keeper is not None else []
            return found if any("EngineCore" in one.name() for one in found) else []

        pids = [one.pid for one in wait_for("an engine core", family, START_S)]
        soak.pids = pids
        soak.process.send_signal(number)
        soak.process.wait(60)
        for pid in pids:
            wait_for(f"the end of process {pid}", lambda p=pid: gone(p), 30)
    assert soak.process.returncode == (130 if number == signal.SIGINT else -9)


@pytest.mark.parametrize(
    ("flag", "code", "why"),
    [
        ("--max-modl-len=1", 64, "vLLM refuses its arguments: unrecognized arguments: --max-modl-len=1"),
        ("--max-model-len=999999", 1, "max_model_len (999999) is greater than the derived"),
    ],
)
def test_a_start_that_fails_is_told_in_vllms_words(tmp_path: Path, flag: str, code: int, why: str) -> None:
    with VllmSoak(tmp_path, "--engine", "tiny-moe", f"--arg={flag}") as soak:
        soak.process.communicate(timeout=START_S)
        told = soak.errors.read_text()
    assert why in told
    assert soak.process.returncode == code
    assert "engine.log" in told, "it says where the whole log is"
