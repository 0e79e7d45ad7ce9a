"""Every row on a healthy engine: no false alarm, some ten turns each, and 2,000 turns over all of them (slow)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reproducing import SMALL, embedded, found, soak_engine
from soakrig.record.store import RunReader
from soakrig.reproducers.engine_control import EngineControl
from soakrig.reproducers.registry import REPRODUCERS

SHORT = {"max_tokens": 160}
"""Enough for a whole tool call of the embedded engine."""
ATTACHED: dict[str, tuple[int, dict[str, Any]]] = {
    "agent-loop": (10, {"tools": 3, **SHORT}),
    "long-prefill": (8, {"parameters": {"from_tokens": 128}}),
    "mixed-burst": (3, {"conversations": 4, "max_tokens": 40, "parameters": {"prompt_tokens": 400, "writers": 2}}),
    "short-decode": (10, {}),
    "long-decode": (3, {"max_tokens": 120}),
    "garbage": (6, {}),
    "thinking-budget": (6, {}),
    "amnesia": (5, {"tools": 3, **SHORT, "parameters": {"states": 2}}),
    "tool-tags": (10, {"tools": 6, **SHORT}),
    "host-ram": (10, {}),
}
"""Name -> turns and options, on an engine that all of them share."""
ENDING: dict[str, dict[str, Any]] = {
    "restart-prefix": {"prompts": 3, "prompt_tokens": 150},
    "dead-proxy": {"turns": 5},
    "wedge": {"turns": 3, "streams": 2},
}
"""Name -> parameters; each has an engine of its own."""
NEEDS_MORE = {
    "kv-offload-shm": "needs vLLM with a card: on a CPU it has no native KV offloading, nor has the embedded engine",
    "idle": "earns no exposure: there is no turn to be clean",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineControl]:
    with embedded(tmp_path_factory.mktemp("engine"), {"CPU_OFFLOAD_GB": "1"}) as control:
        yield control


def test_every_row_is_here() -> None:
    assert {*ATTACHED, *ENDING, *NEEDS_MORE} == set(REPRODUCERS)


@pytest.mark.parametrize("name", ATTACHED)
def test_a_row_is_clean_on_a_healthy_engine(tmp_path: Path, engine: EngineControl, name: str) -> None:
    turns, options = ATTACHED[name]
    result = soak_engine(tmp_path, name, engine, turns=turns, **options)
    assert (result.verdict, result.faults, set(result.outcomes)) == ("pass", [], {"ok"}), result.reasons
    assert result.exposure.turns == turns * options.get("conversations", REPRODUCERS[name].usual.conversations)
    assert not any(one.says in ("fault", "unknown") for one in result.findings)
    if name == "host-ram":
        assert found(result, "host-ratio").value == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", ENDING)
def test_a_row_that_ends_its_engine_is_clean(tmp_path: Path, name: str) -> None:
    flags = [*SMALL, "--max-model-len=1024", "--kv-tokens=2048"]
    with embedded(tmp_path, flags=flags) as control:
        result = soak_engine(tmp_path, name, control, parameters=ENDING[name])
    assert (result.verdict, result.faults, set(result.outcomes)) == ("pass", [], {"ok"}), result.reasons
    assert {one.says for one in result.findings} <= {"clean", "note"}
    switches = [event.action for event in RunReader(tmp_path / "runs/latest").events() if event.kind == "switch"]
    assert switches == {"dead-proxy": ["ended"], "wedge": ["ended", "started", "ended"]}.get(name, ["ended", "started"])
    assert result.engine.alive is True, "it lived until the load ended it"


@pytest.mark.parametrize("name", NEEDS_MORE)
def test_a_row_that_needs_more(name: str) -> None:
    pytest.skip(NEEDS_MORE[name])


MANY = {
    "agent-loop": 200, "long-prefill": 40, "mixed-burst": 200, "short-decode": 600, "long-decode": 30, "garbage": 160,
    "thinking-budget": 160, "amnesia": 160, "tool-tags": 160, "host-ram": 200, "restart-prefix": 60, "dead-proxy": 20,
    "wedge": 20,
}  # fmt: skip
"""Turns of a row where there is time for them."""


def test_many_turns_are_two_thousand() -> None:
    assert sum(MANY.values()) >= 2000
    assert {*MANY, *NEEDS_MORE} == set(REPRODUCERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_two_thousand_turns_without_a_false_alarm(tmp_path: Path, name: str) -> None:
    settings = {"CPU_OFFLOAD_GB": "1"}
    if name in ATTACHED:
        options = ATTACHED[name][1]
        turns = MANY[name] // options.get("conversations", REPRODUCERS[name].usual.conversations)
        with embedded(tmp_path, settings) as control:
            result = soak_engine(tmp_path, name, control, turns=turns, seed=7, **options)
    else:
        many = {"prompts": MANY[name] // 4} if name == "restart-prefix" else {"turns": MANY[name]}
        many = {"turns": MANY[name] // 2} if name == "wedge" else many
        with embedded(tmp_path, flags=[*SMALL, "--max-model-len=1024", "--kv-tokens=8192"]) as control:
            result = soak_engine(tmp_path, name, control, parameters={**ENDING[name], **many}, seed=7)
    assert (result.verdict, result.outcomes) == ("pass", {"ok": MANY[name]}), result.reasons
    assert {one.says for one in result.findings} <= {"clean", "note"}
