"""Proof of treatment, on real processes: their environment and command line, and what an engine says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from soakrig.bisect.arms import PlannedArm, plan_arms
from soakrig.bisect.treatment import Treatment, prove_treatment
from soakrig.bisect.variables import Value, Variable, known_settings
from soakrig.engine.launcher import MARK

KNOWN = known_settings("embedded")
STAGING, GROUPS, PLANT = "VLLM_MOE_DMA_STAGING", "VLLM_MOE_PREFILL_GROUPS", "SOAKRIG_PLANT"
Start = Callable[..., int]

# Starts a worker with the program argv[1] and the rest as its whole environment, says that both are there, and waits
# for its input to end.
WITH_WORKER = """
import subprocess, sys
code = sys.argv.pop(1)
env = dict(word.split("=", 1) for word in sys.argv[1:])
worker = subprocess.Popen([sys.executable, "-S", "-c", code], env=env,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
sys.stdin.read()
worker.communicate()
"""
PLAIN = "import sys; print(1, flush=True); sys.stdin.read()"
# Writes a title over its own environment, as setproctitle does (proc(5), stat: fields 50 and 51).
TITLED = """
import ctypes, sys
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
began, end = int(fields[47]), int(fields[48])
title = b"VLLM::Worker_TP0".ljust(end - began, bytes(1))
ctypes.memmove(began, title, end - began)
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process with an environment and words on its command line; its pid, once it runs our program."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(env: Mapping[str, str], *words: str, code: str = PLAIN) -> int:
        argv = [sys.executable, "-S", "-c", code, *words]
        process = subprocess.Popen(argv, env={"LANG": "C", **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process.pid

    yield begin
    for process in running:
        process.communicate()


def control(*variables: tuple[str, Value, Value], flags: tuple[str, ...] = (), **settings: str) -> PlannedArm:
    """The control of a campaign over ``variables``: name, its value in the control, the other."""
    found = [Variable(name, (value, other)) for name, value, other in variables]
    return plan_arms(found, settings=settings, flags=flags)[0]


def body(**values: Any) -> dict[str, Any]:
    """A body of /soakrig/settings, shaped as the embedded engine's."""
    told = {name: {"value": value, "source": "environment", "obeyed": True} for name, value in values.items()}
    return {"engine": "embedded", "settings": told}


UNKNOWN = ("Unknown vLLM environment variable", "unknown vLLM environment variables")

SET = control((STAGING, "1", "0"))
UNSET = control((STAGING, None, "0"))
OTHER = control(("OMP_NUM_THREADS", "4", "1"))
FLAG = control(("--max-num-seqs", "8", "1"))
BARE = control(("--enforce-eager", "", None))
LEFT_OUT = control(("--enforce-eager", None, ""))


def test_a_value_that_the_engine_reports_as_its_own_is_the_strongest_proof(start: Start) -> None:
    pid = start({STAGING: "1"})
    assert prove_treatment(SET, pid, KNOWN, body(**{STAGING: 1})) == Treatment({STAGING: "settings"})


def test_a_variable_that_the_engine_does_not_know_is_shown_by_the_environment_alone(start: Start) -> None:
    assert prove_treatment(OTHER, start({"OMP_NUM_THREADS": "4"}), KNOWN, None).proofs == {
        "OMP_NUM_THREADS": "environment"
    }
    pid = start({STAGING: "1", "OMP_NUM_THREADS": "4"}, "--max-num-seqs=8")
    both = control((STAGING, "1", "0"), ("OMP_NUM_THREADS", "4", "1"), ("--max-num-seqs", "8", "1"))
    assert prove_treatment(both, pid, KNOWN, body(**{STAGING: 1})) == Treatment(
        {STAGING: "settings", "OMP_NUM_THREADS": "environment", "--max-num-seqs": "argv"}
    )


def test_unset_is_the_default_in_the_report_and_no_entry_in_the_environment(start: Start) -> None:
    assert prove_treatment(UNSET, start({}), KNOWN, body(**{STAGING: 1})) == Treatment({STAGING: "settings"})
    for there in ("1", ""):
        found = prove_treatment(UNSET, start({STAGING: there}), KNOWN, body(**{STAGING: 1}))
        assert found.failure.startswith(f"{STAGING} was to be unset and the engine's environment has")
        assert not found.proofs
    assert "reports 0 as in effect" in prove_treatment(UNSET, start({}), KNOWN, body(**{STAGING: 0})).failure


def test_unset_is_the_setting_s_own_default(start: Start) -> None:
    arm = control(("VLLM_MOE_HOT_SLOTS", None, "8"))
    pid = start({})
    assert prove_treatment(arm, pid, KNOWN, body(VLLM_MOE_HOT_SLOTS=0)).proofs == {"VLLM_MOE_HOT_SLOTS": "settings"}
    assert "reports 1 as in effect" in prove_treatment(arm, pid, KNOWN, body(VLLM_MOE_HOT_SLOTS=1)).failure


@pytest.mark.parametrize(("env", "says"), [({}, "has it not"), ({STAGING: "0"}, "has 0"), ({STAGING: ""}, 'has ""')])
def test_another_value_in_the_environment(start: Start, env: dict[str, str], says: str) -> None:
    found = prove_treatment(SET, start(env), KNOWN, body(**{STAGING: 1}))
    assert found == Treatment({}, f"{STAGING}=1 was asked for and the engine's environment {says}")


def test_a_fixed_setting_has_to_be_there_too(start: Start) -> None:
    arm = control((STAGING, "1", "0"), CPU_OFFLOAD_GB="1")
    found = prove_treatment(arm, start({STAGING: "1"}), KNOWN, body(**{STAGING: 1}))
    assert found.failure.startswith("CPU_OFFLOAD_GB=1 was asked for")
    found = prove_treatment(arm, start({STAGING: "1", "CPU_OFFLOAD_GB": "1"}), KNOWN, body(**{STAGING: 1}))
    assert found == Treatment({STAGING: "settings"}), "and it is not among what is proved"


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (None, "does not say on /soakrig/settings whether"),
        ({"engine": "x"}, "does not say on /soakrig/settings whether"),
        ({"settings": [STAGING]}, "does not say on /soakrig/settings whether"),
        (body(), "is not among the settings that the engine reports"),
        (body(**{GROUPS: 1}), "is not among the settings that the engine reports"),
        ({"settings": {STAGING: 1}}, "is not among the settings that the engine reports"),
        ({"settings": {STAGING: {"source": "environment"}}}, "is not among the settings that the engine reports"),
        (body(**{STAGING: 0}), "was to be 1 and the engine reports 0 as in effect"),
        (body(**{STAGING: "1"}), "was to be 1 and the engine reports '1' as in effect"),
        (body(**{STAGING: None}), "was to be 1 and the engine reports None as in effect"),
        ({"settings": {STAGING: {"value": 1, "obeyed": False}}}, f"reports that it does not obey {STAGING}"),
    ],
)
def test_what_the_engine_says_may_contradict_its_environment(start: Start, report: Any, says: str) -> None:
    found = prove_treatment(SET, start({STAGING: "1"}), KNOWN, report)
    assert says in found.failure
    assert STAGING in found.failure
    assert not found.proofs


def test_an_older_report_without_obeyed_is_believed(start: Start) -> None:
    report = {"settings": {STAGING: {"value": 1}}}
    assert prove_treatment(SET, start({STAGING: "1"}), KNOWN, report).proofs == {STAGING: "settings"}


def test_a_value_that_makes_no_sense_on_this_host(start: Start, tmp_path: Path) -> None:
    """A file that was there when the campaign was checked."""
    gone = str(tmp_path / "gone.json")
    arm = control(("VLLM_MOE_HOT_PROFILE", gone, None))
    found = prove_treatment(arm, start({"VLLM_MOE_HOT_PROFILE": gone}), KNOWN, body(VLLM_MOE_HOT_PROFILE=gone))
    assert "makes no sense here" in found.failure


def test_a_planted_fault_is_not_compared_as_the_engine_fills_it_in(start: Start) -> None:
    text = '{"action": "exit"}'
    arm = control((PLANT, text, None))
    report = body(**{PLANT: {"action": "exit", "hazard": 1.0, "seed": 77}})
    assert prove_treatment(arm, start({PLANT: text}), KNOWN, report) == Treatment({PLANT: "environment"})


def test_flags_as_they_were_asked_for(start: Start) -> None:
    assert prove_treatment(FLAG, start({}, "--max-num-seqs=8"), KNOWN, None) == Treatment({"--max-num-seqs": "argv"})
    assert prove_treatment(BARE, start({}, "--enforce-eager"), KNOWN, None) == Treatment({"--enforce-eager": "argv"})
    assert prove_treatment(LEFT_OUT, start({}, "--x=1"), KNOWN, None) == Treatment({"--enforce-eager": "argv"})
    fixed = control(("--max-num-seqs", "8", "1"), flags=("--threads=1",))
    assert prove_treatment(fixed, start({}, "--threads=1", "--max-num-seqs=8"), KNOWN, None).failure == ""


@pytest.mark.parametrize(
    ("arm", "words", "says"),
    [
        (FLAG, (), "--max-num-seqs=8 was asked for and is not on the engine's command line"),
        (FLAG, ("--max-num-seqs=1",), "--max-num-seqs=8 was asked for and is not"),
        (FLAG, ("--max-num-seqs", "8"), "--max-num-seqs=8 was asked for and is not"),
        # twice: which of them an engine takes is its own affair
        (FLAG, ("--max-num-seqs=8", "--max-num-seqs=1"), "has --max-num-seqs=8, --max-num-seqs=1"),
        (FLAG, ("--max_num_seqs=4", "--max-num-seqs=8"), "has --max_num_seqs=4, --max-num-seqs=8"),
        (BARE, (), "--enforce-eager was asked for and is not"),
        (BARE, ("--enforce-eager", "--no-enforce-eager"), "has --enforce-eager, --no-enforce-eager"),
        (BARE, ("--enforce-eager", "--enforce-eager=0"), "has --enforce-eager, --enforce-eager=0"),
        # the launcher's own, in an arm that is to be without it
        (LEFT_OUT, ("--enforce-eager",), "no --enforce-eager was asked for and the engine's command line has --enf"),
        (LEFT_OUT, ("--no-enforce-eager",), "no --enforce-eager was asked for"),
        (control(("--a", "1", "2"), flags=("--fixed=3",)), ("--a=1",), "--fixed=3 was asked for and is not"),
    ],
)
def test_a_command_line_that_says_something_else(
    start: Start, arm: PlannedArm, words: tuple[str, ...], says: str
) -> None:
    found = prove_treatment(arm, start({}, *words), KNOWN, None)
    assert says in found.failure
    assert not found.proofs


@pytest.mark.parametrize(
    ("worker", "says"),
    [
        ({MARK: "m", STAGING: "1"}, ""),
        ({MARK: "m", STAGING: "0"}, "has 0"),
        ({MARK: "m"}, "has it not"),
        ({STAGING: "0"}, ""),  # without the mark its environment was made from nothing: it says nothing
    ],
)
def test_a_worker_with_another_value(start: Start, worker: dict[str, str], says: str) -> None:
    words = [f"{name}={value}" for name, value in worker.items()]
    pid = start({STAGING: "1", MARK: "m"}, PLAIN, *words, code=WITH_WORKER)
    found = prove_treatment(SET, pid, KNOWN, body(**{STAGING: 1}))
    assert bool(found.failure) == bool(says)
    if says:
        assert found.failure.startswith(f"{STAGING}=1 is in the engine's environment, and its process")
        assert found.failure.endswith(says)


def test_a_worker_may_set_what_is_fixed_as_it_likes(start: Start) -> None:
    arm = control((STAGING, "1", "0"), OMP_NUM_THREADS="4")
    words = (f"{MARK}=m", f"{STAGING}=1", "OMP_NUM_THREADS=1")
    pid = start({STAGING: "1", "OMP_NUM_THREADS": "4"}, PLAIN, *words, code=WITH_WORKER)
    assert prove_treatment(arm, pid, KNOWN, body(**{STAGING: 1})).failure == ""


def test_what_contradicts_an_arm_is_told_without_secrets(start: Start) -> None:
    arm = control(("MY_API_KEY", "s3cret-1", "s3cret-2"), HF_TOKEN="s3cret-3")
    other = control(("MY_API_KEY", None, "s3cret-1"))
    flag = control(("--my-key", "s3cret-1", "s3cret-2"))
    good = {"MY_API_KEY": "s3cret-1", "HF_TOKEN": "s3cret-3"}
    for one, pid in (
        (arm, start({**good, "MY_API_KEY": "s3cret-4"})),
        (arm, start({**good, "HF_TOKEN": "s3cret-4"})),
        (arm, start(good, PLAIN, f"{MARK}=m", "MY_API_KEY=s3cret-4", code=WITH_WORKER)),
        (other, start(good)),
        (flag, start({}, "--my-key=s3cret-2")),
        (flag, start({}, "--my-key=s3cret-1", "--my_key=s3cret-2")),
    ):
        found = prove_treatment(one, pid, {}, None)
        assert "[redacted]" in found.failure
        assert "s3cret" not in found.failure


def test_a_process_that_has_ended_proves_nothing() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""], stdin=subprocess.DEVNULL) as process:
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        zombie = prove_treatment(SET, process.pid, KNOWN, body(**{STAGING: 1}))
    gone = prove_treatment(SET, process.pid, KNOWN, body(**{STAGING: 1}))
    for found in (zombie, gone):
        assert found.failure.endswith("has it ended?")
        assert str(process.pid) in found.failure
        assert not found.proofs


def test_a_title_written_over_an_environment_is_no_evidence(start: Start) -> None:
    titled = TITLED + PLAIN
    assert "has it ended?" in prove_treatment(SET, start({STAGING: "1"}, code=titled), KNOWN, body()).failure
    pid = start({STAGING: "1"}, titled, f"{MARK}=m", f"{STAGING}=1", code=WITH_WORKER)
    assert prove_treatment(SET, pid, KNOWN, body(**{STAGING: 1})) == Treatment({STAGING: "settings"})


@pytest.mark.parametrize(
    "line", ["Unknown vLLM environment variable detected: {}", "unknown vLLM environment variables detected: {}"]
)
def test_vllm_says_in_its_log_what_it_does_not_know(start: Start, tmp_path: Path, line: str) -> None:
    arm = control(("VLLM_MADE_UP", "1", None), (STAGING, "1", "0"))
    pid, log = start({"VLLM_MADE_UP": "1", STAGING: "1"}), tmp_path / "engine.log"
    told = body(**{STAGING: 1})
    assert prove_treatment(arm, pid, KNOWN, told, log).failure == "", "no log, no word"
    log.write_bytes(b"\xff WARNING " + line.format("VLLM_OTHER").encode() + b"\n")
    assert prove_treatment(arm, pid, KNOWN, told, log).failure == "", "it is none of ours"
    with log.open("a") as file:
        file.write(f"WARNING {line.format(STAGING)}\n")
    assert prove_treatment(arm, pid, KNOWN, told, log).failure == "", "our plug-in reads it, and says so"
    with log.open("a") as file:
        file.write(f"(EngineCore pid=7) WARNING envs.py:1 {line.format('VLLM_MADE_UP')}\n")
    assert prove_treatment(arm, pid, KNOWN, told, log).failure == (
        "the engine's log says that it does not know VLLM_MADE_UP"
    )
