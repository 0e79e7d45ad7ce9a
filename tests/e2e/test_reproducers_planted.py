"""Rows on an embedded engine with the row's own defect: found, with the right signature, at the right turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.soaking import Soak
from reproducing import SMALL, embedded, found, its_own, kernel_log, planted, soak_engine
from soakrig.bisect.arm_launch import ArmLaunch, ArmLauncher
from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.launch_result import LaunchResult, signature_of
from soakrig.bisect.stop import Stop
from soakrig.engine.keeper import Stat
from soakrig.engine.launcher import EngineProcess
from soakrig.reproducers.engine_control import EngineControl


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineControl]:
    with embedded(tmp_path_factory.mktemp("healthy")) as control:
        yield control


def with_xid(folder: Path, **fields: object) -> dict[str, str]:
    """An engine that writes an Xid 31 and exits."""
    return planted(action="exit", xid=31, kernel_log=str(kernel_log(folder)), **fields)


@pytest.mark.parametrize(
    ("name", "turn", "after", "options"),
    [
        ("agent-loop", 5, {"turns": 4}, {"tools": 2, "max_tokens": 160}),
        ("short-decode", 1, {"turns": 0}, {}),
        ("long-decode", 2, {"turns": 1}, {"max_tokens": 120}),
        ("long-prefill", 3, {"context_tokens": 1200}, {"parameters": {"from_tokens": 256, "rungs": 4}}),
    ],
)
def test_an_xid_and_a_death_at_the_row_s_own_turn(
    tmp_path: Path, name: str, turn: int, after: dict[str, int], options: dict[str, object]
) -> None:
    with embedded(tmp_path, with_xid(tmp_path, after=after)) as control:
        result = soak_engine(tmp_path, name, control, turns=8, **options)
    assert its_own(result, name)
    (fault,) = result.faults
    assert (fault.xid, fault.turn, fault.attribution) == (31, turn, "exact")
    assert fault.signature.startswith("Xid 31 FAULT_PDE")
    assert (result.engine.died_after_turn, result.outcomes["ok"]) == (turn - 1, turn - 1) if turn > 1 else (0, 0)
    assert result.simulated
    if name == "long-prefill":
        longest = found(result, "longest-prefill").value
        assert longest is not None
        assert 400 < longest < 1200 < (fault.context_tokens or 0)


def test_a_burst_s_fault_is_tied_to_its_streams(tmp_path: Path) -> None:
    with embedded(tmp_path, with_xid(tmp_path, after={"turns": 5})) as control:
        result = soak_engine(
            tmp_path,
            "mixed-burst",
            control,
            conversations=4,
            max_tokens=48,
            parameters={"prompt_tokens": 500, "writers": 2},
        )
    assert its_own(result, "mixed-burst")
    assert result.faults[0].xid == 31
    assert (result.faults[0].turn or 0) >= 2
    assert result.engine.alive is False


def test_one_token_for_ever_is_degenerate(tmp_path: Path) -> None:
    with embedded(tmp_path, planted(action="one_token", after={"turns": 2})) as control:
        result = soak_engine(tmp_path, "garbage", control)
    assert its_own(result, "garbage")
    assert signature_of(result) == "turn degenerate"
    assert result.first_bad is not None
    assert (result.first_bad.turn, result.engine.alive) == (3, True)


def test_random_weights_are_garbage_where_they_are_held_to_the_bound(tmp_path: Path, healthy: EngineControl) -> None:
    result = soak_engine(tmp_path, "garbage", healthy, turns=2, parameters={"max_perplexity": 1000})
    assert its_own(result, "garbage")
    assert signature_of(result) == "finding canary-perplexity"
    perplexity = found(result, "canary-perplexity")
    assert (perplexity.says, perplexity.kind, perplexity.bound) == ("fault", "measured", "<= 1000")
    assert (perplexity.value or 0) > 4096


def test_thinking_eats_a_small_budget_for_real(tmp_path: Path, healthy: EngineControl) -> None:
    """No plant: the engine thinks for 6 to 28 tokens, and has 18."""
    result = soak_engine(tmp_path, "thinking-budget", healthy, turns=12, max_tokens=18)
    assert its_own(result, "thinking-budget")
    assert not result.simulated
    assert result.first_bad is not None
    assert "reasoning only, finish reason 'length'" in result.first_bad.why
    more = found(result, "more-budget")
    assert (more.turn, more.conversation) == (result.first_bad.turn, 0)
    assert "it is the budget that thinking ate" in more.text


def test_without_an_offload_there_is_nothing_to_compare(tmp_path: Path, healthy: EngineControl) -> None:
    result = soak_engine(tmp_path, "host-ram", healthy, turns=1)
    assert (result.verdict, found(result, "host-ratio").says) == ("inconclusive", "unknown")


def test_a_turn_that_is_empty_under_any_budget_is_not_laid_on_the_budget(tmp_path: Path) -> None:
    with embedded(tmp_path, planted(action="answerless", after={"turns": 1})) as control:
        result = soak_engine(tmp_path, "thinking-budget", control)
    assert its_own(result, "thinking-budget")
    assert result.first_bad is not None
    assert result.first_bad.turn == 2
    assert "not the budget alone" in found(result, "more-budget").text


def test_an_engine_that_comes_back_different_is_found_by_drift(tmp_path: Path) -> None:
    parameters = {"prompts": 2, "prompt_tokens": 200, "evict": False}
    with embedded(tmp_path, again=["--weights-seed=1"]) as control:
        result = soak_engine(tmp_path, "restart-prefix", control, parameters=parameters)
    assert its_own(result, "restart-prefix")
    assert signature_of(result) == "finding prefix-drift-restarted"
    assert result.outcomes == {"ok": 6}
    says = {one.name: one.says for one in result.findings}
    assert says == {
        "own-drift": "note", "prefix-drift-cold": "clean", "prefix-drift-warm": "clean",
        "prefix-drift-restarted": "fault", "prompt-drift-restarted": "fault",
    }  # fmt: skip
    assert (found(result, "prompt-drift-restarted").value or 0) > 1.0


def test_an_engine_that_does_not_come_back_is_found(tmp_path: Path) -> None:
    parameters = {"prompts": 1, "prompt_tokens": 100, "evict": False}
    with embedded(tmp_path, again=["--top-k=1000"]) as control:
        result = soak_engine(tmp_path, "restart-prefix", control, parameters=parameters)
    assert its_own(result, "restart-prefix")
    assert signature_of(result) == "finding restart"
    assert result.engine.alive is True, "it was ended on purpose, and lived until then"


def test_a_death_among_the_warm_turns_is_a_death(tmp_path: Path) -> None:
    parameters = {"prompts": 2, "prompt_tokens": 100, "evict": False, "restart": False}
    with embedded(tmp_path, with_xid(tmp_path, after={"turns": 3})) as control:
        result = soak_engine(tmp_path, "restart-prefix", control, parameters=parameters)
    assert its_own(result, "restart-prefix")
    (fault,) = result.faults
    assert (fault.xid, fault.conversation, fault.turn) == (31, 1, 2)


def test_the_command_runs_a_procedure_and_says_whose_fault_it_was(tmp_path: Path) -> None:
    setting = "SOAKRIG_PLANT=" + planted(action="answerless", after={"turns": 1})["SOAKRIG_PLANT"]
    small = [f"--arg={flag}" for flag in SMALL]
    options = ["thinking-budget", *small, "--set", setting, "--param", "control_tokens=0", "--max-bad", "1"]
    with Soak(tmp_path, *options, turns=3, small=False) as soak:
        result = soak.finish()
    assert (result["verdict"], result["first_bad"]["turn"]) == ("fail", 2)
    assert [one["name"] for one in result["findings"]] == ["empty-turns"]
    assert result["settings"]["parameters"] == {"control_tokens": 0}
    assert "the fault that thinking-budget is known to provoke" in soak.errors.read_text()


class Told:
    """A teller of a launch that keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *words: self.heard.append((name, words[0] if words else None))


def launched(
    folder: Path, settings: dict[str, str], arm: str = "control", **campaign: Any
) -> tuple[LaunchResult, Told]:
    """One launch of a campaign's arm."""
    said = {
        "kernel_log": str(kernel_log(folder)), "flags": list(SMALL), "settings": settings,
        "variables": {"VLLM_MOE_DMA_STAGING": ["1", "0"]}, **campaign,
    }  # fmt: skip
    told = Told()
    launch = ArmLaunch(Campaign.from_json(said).check(), arm, 1, folder, "mark-of-a-test")
    ArmLauncher(read_cards=lambda visible: None).run(launch, told, Stop())
    (result,) = [what for name, what in told.heard if name == "ended"]
    return result, told


@pytest.mark.parametrize(
    ("name", "campaign", "fault", "signature", "turn"),
    [
        ("short-decode", {"turns": 3}, {"action": "exit"}, "engine death, no answer", 1),
        ("long-prefill", {"load": {"parameters": {"from_tokens": 256, "rungs": 4}}, "turns": 4},
         {"action": "exit", "after": {"context_tokens": 1200}}, "engine death, no answer", 3),
        ("garbage", {"turns": 3}, {"action": "one_token", "after": {"turns": 1}}, "turn degenerate", 2),
    ],
)  # fmt: skip
def test_a_bisect_tells_the_arms_apart_by_a_row_s_own_fault(
    tmp_path: Path, name: str, campaign: dict[str, Any], fault: dict[str, Any], signature: str, turn: int
) -> None:
    settings = {**planted(when={"VLLM_MOE_DMA_STAGING": "1"}, **fault), "CPU_OFFLOAD_GB": "1"}
    for arm in ("control", "VLLM_MOE_DMA_STAGING=0"):
        (tmp_path / arm).mkdir()
        result, told = launched(tmp_path / arm, settings, arm, reproducer=name, **campaign)
        assert told.heard[-1] == ("gone", [])
        seen = [what.outcome for word, what in told.heard if word == "turn"]
        if arm == "control":
            assert (result.result, result.signature, result.exposure) == ("faulted", signature, float(turn)), result
            assert (seen[:-1], len(seen)) == (["ok"] * (turn - 1), turn)
        else:
            assert (result.result, result.exposure, set(seen)) == ("clean", float(campaign["turns"]), {"ok"}), result


def test_a_bisect_can_use_a_row_that_restarts_the_engine(tmp_path: Path) -> None:
    parameters = {"prompts": 1, "prompt_tokens": 100, "evict": False}
    result, told = launched(tmp_path, {}, reproducer="restart-prefix", load={"parameters": parameters})
    assert (result.result, result.exposure, result.reason) == ("clean", 3.0, "")
    assert sum(name == "started" for name, _ in told.heard) == 1
    assert told.heard[-1] == ("gone", [])
    (run,) = (tmp_path / "runs").glob("0001-control")
    assert (run / "engine.log").exists()
    assert (run / "engine-2/engine.log").exists()


def test_a_bisect_hears_of_what_a_row_could_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a thread in D state, which there is no way to make here."""
    whole = EngineProcess.stop

    def stop(engine: EngineProcess, grace: float) -> list[Stat]:
        return [*whole(engine, grace), Stat(77, "worker", "D", 1, 1, 1)]

    monkeypatch.setattr(EngineProcess, "stop", stop)
    parameters = {"prompts": 1, "prompt_tokens": 100, "evict": False}
    result, told = launched(tmp_path, {}, reproducer="restart-prefix", load={"parameters": parameters})
    assert (result.result, result.signature) == ("faulted", "finding left-behind")
    assert told.heard[-1] == ("gone", ["process 77 (worker) in state D"]), "the host is wedged, and no launch follows"
