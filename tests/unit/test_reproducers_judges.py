"""The judges of single rows, by figures whose answers are known."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from soakrig.engine.embedded.tokenizer import Tokenizer
from soakrig.record.manifest import Plan
from soakrig.reproducers import amnesia, host_ram, kv_offload_shm
from soakrig.reproducers.fresh import FIRST_GUESS, passage
from soakrig.reproducers.logprobs import drift, same_first
from soakrig.reproducers.reproducer import LoadOptions
from soakrig.soak.agent.loop import AgentOptions
from soakrig.soak.classify import Outcome
from soakrig.soak.probe import Probe
from soakrig.soak.reply import Reply, ToolCall

GIB = 1 << 30


# -- amnesia -----------------------------------------------------------------------------------------------------------


def arm(greeted: int, asked: int, *, reasoning: bool, number: int) -> amnesia.Remembering:
    one = amnesia.Remembering(AgentOptions("m", tool_count=1, send_reasoning=reasoning), number)
    one.greeted, one.asked = greeted, asked
    one.first_greeting = 3 if greeted else None
    return one


def test_five_greetings_in_112_against_none_in_3788_is_the_published_p() -> None:
    rate, test = amnesia.greetings(
        [arm(5, 112, reasoning=False, number=0), arm(0, 3788, reasoning=True, number=1)], 0.01
    )
    assert (rate.value, rate.says, rate.turn) == (pytest.approx(4.464, abs=1e-3), "note", 3)
    assert test.value == pytest.approx(1.8e-8, rel=0.01)
    assert (test.says, test.name, test.kind) == ("fault", "amnesia", "derived")


@pytest.mark.parametrize(
    ("greeted", "control", "says"),
    [(7, (0, 60), "fault"), (6, (0, 60), "unknown"), (7, (7, 60), "unknown"), (0, (0, 60), None)],
)
def test_fisher_s_test_needs_seven_of_sixty(greeted: int, control: tuple[int, int], says: str | None) -> None:
    found = amnesia.greetings(
        [arm(greeted, 60, reasoning=False, number=0), arm(*control, reasoning=True, number=1)], 0.01
    )
    assert [one.says for one in found] == (["clean"] if says is None else ["note", says])
    if says is None:
        assert "at 95 % at most 4.9 % do" in found[0].text


def test_without_a_control_a_greeting_is_a_fault_and_without_a_turn_nothing_is_known() -> None:
    assert [one.says for one in amnesia.greetings([arm(1, 60, reasoning=False, number=0)], 0.01)] == ["fault"]
    assert [one.says for one in amnesia.greetings([arm(0, 0, reasoning=False, number=0)], 0.01)] == ["unknown"]


@pytest.mark.parametrize(
    ("text", "greets"),
    [
        ("Hello! How can I help you today?", True),
        ("\n Hi there", True),
        ("What would you like me to do?", True),
        ("It looks like you haven't given me a task.", True),
        ("How can I assist?", True),
        ("His tests fail at line 3.", False),
        ("The file says hello.", False),
        ("History of the parser", False),
        ("", False),
    ],
)
def test_what_a_greeting_is(text: str, greets: bool) -> None:
    assert bool(amnesia.GREETING.match(text)) is greets


def test_only_answers_to_a_tool_s_result_count() -> None:
    one = amnesia.Remembering(AgentOptions("m", tool_count=2), 0)
    hello = Reply(content=["Hello, what is your task?"], reasoning=["no task"])
    call = Reply(calls={0: ToolCall("c", "read_file", ["{}"])}, reasoning=["I look"])
    one.next_turn()
    one.answered(hello, Outcome("ok"))  # of the user's task
    assert (one.asked, one.greeted) == (0, 0)
    while not one.prompt.messages[-1].startswith(b'{"role":"tool"'):
        one.next_turn()
        one.answered(call, Outcome("ok"))
    before = one.asked
    one.next_turn()
    one.answered(hello, Outcome("ok"))
    assert (one.asked, one.greeted, one.first_greeting) == (before + 1, 1, one.turn)
    one.next_turn()
    one.answered(Reply(), Outcome("truncated"))
    assert one.asked <= before + 1


def test_the_control_sends_its_reasoning_back_and_the_other_does_not() -> None:
    def history(*, reasoning: bool) -> bytes:
        one = amnesia.Remembering(AgentOptions("m", tool_count=2, send_reasoning=reasoning), 0)
        one.next_turn()
        one.answered(Reply(calls={0: ToolCall("c", "read_file", ["{}"])}, reasoning=["deep thought"]), Outcome("ok"))
        return one.next_turn().body

    assert b'"reasoning_content":"deep thought"' in history(reasoning=True)
    assert b"deep thought" not in history(reasoning=False)
    bare, full = (amnesia.state(3, LoadOptions(), reasoning=wanted) for wanted in (False, True))
    assert len(bare) == len(full) > 4
    assert bare[-1] == full[-1]
    assert bare[-1]["role"] == "tool"
    assert "reasoning_content" not in str(bare)
    assert "reasoning_content" in str(full)


def test_mass_is_the_sum_over_markers() -> None:
    row = {" hasn": math.log(0.03), "Hasn": math.log(0.01), " wants": math.log(0.9)}
    assert amnesia.mass(row, ("hasn", "didn")) == pytest.approx(0.04)


# -- drift -------------------------------------------------------------------------------------------------------------


def test_drift_is_the_mean_over_the_tokens_of_either() -> None:
    one = {"a": -0.1, "b": -3.0, "c": -4.0}
    assert drift(one, one) == 0.0
    assert drift(one, {**one, "b": -3.3}) == pytest.approx(0.1)
    assert drift(one, {"a": -0.1, "b": -3.0, "d": -4.0}) == pytest.approx(0.0)  # below what either lists
    assert drift(one, {"a": -0.1, "b": -3.0, "d": -0.5}) > 1.0
    assert drift(one, {}) == math.inf
    assert drift(one, {**one, "a": math.nan}) == math.inf
    assert same_first(one, {"a": -0.2, "z": -5.0})
    assert not same_first(one, {"b": -0.2, "a": -5.0})


# -- passages ----------------------------------------------------------------------------------------------------------


def test_a_token_has_the_same_characters_in_every_passage() -> None:
    """What one passage measured tells how long another is: within a percent, where the shorter has 1,000 tokens."""
    tokenizer = Tokenizer()
    measured: dict[int, list[float]] = {}
    for number in range(12):
        for chars in (2500, 5000, 20_000):
            text = passage(Random(number), chars)
            assert abs(len(text) - chars) <= 1
            measured.setdefault(chars, []).append(len(text) / len(tokenizer.encode(text)))
    least, most = min(map(min, measured.values())), max(map(max, measured.values()))
    assert least > FIRST_GUESS
    assert most / least < 1.02
    assert len({passage(Random(number), 900)[:24] for number in range(50)}) == 50, "no two begin alike"


# -- host-ram ----------------------------------------------------------------------------------------------------------


def books(asked: float, resident: float) -> Probe:
    memory = {"bank_bytes_asked": asked * GIB, "bank_bytes_resident": resident * GIB}
    return Probe("m", settings={"offload": {"memory": memory}})


@pytest.mark.parametrize(
    ("resident", "peak", "says"),
    [(21.5, 30.0, ["note", "clean", "clean"]), (33.8, 40.0, ["note", "fault", "clean"]),
     (20.0, 58.0, ["note", "clean", "fault"])],
)  # fmt: skip
def test_the_published_figures_of_pinned_memory(resident: float, peak: float, says: list[str]) -> None:
    memory = host_ram.HostMemory(int(40 * GIB), int(peak * GIB), 3)
    found = host_ram.judged(memory, LoadOptions(), books(19.0, resident), None)
    assert [one.says for one in found] == says
    assert found[1].value == pytest.approx(resident / 19.0, abs=1e-3)
    assert (found[1].kind, found[1].bound) == ("derived", "<= 1.25 x")


def test_an_engine_without_books_is_measured_from_outside() -> None:
    memory = host_ram.HostMemory(141 * GIB, 168 * GIB, 2)
    ratio, peak = host_ram.judged(memory, LoadOptions(), Probe("m"), 125.0)[1:]
    assert (ratio.value, ratio.says) == (1.0, "clean")  # 125 of offload and 16 beside it
    assert (peak.value, peak.says) == (43.0, "fault")
    asked = LoadOptions(parameters={"asked_gib": 100.0})
    assert host_ram.judged(memory, asked, books(1, 1), 125.0)[1].value == 1.25
    (gone,) = host_ram.judged(host_ram.HostMemory(), LoadOptions(), books(1, 1), 125.0)
    assert gone.says == "unknown", "no process is not a small one"
    nothing = host_ram.judged(memory, LoadOptions(), Probe("m"), None)
    assert [one.says for one in nothing] == ["note", "unknown"]


def test_the_memory_of_a_tree_is_that_of_its_processes() -> None:
    code = (
        "import sys, os; x = bytearray(64 << 20); del x; y = bytearray(24 << 20); print(flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdout.readline()
        memory = host_ram.tree_memory(child.pid)
        assert memory.processes == 1
        assert 24 << 20 < memory.resident < 60 << 20
        assert memory.peak > 64 << 20
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()
    assert host_ram.tree_memory(child.pid) == host_ram.HostMemory()


def test_cpu_offload_gb_is_read_from_the_process() -> None:
    environment = {"CPU_OFFLOAD_GB": "12.5", "PATH": "/usr/bin:/bin"}
    child = subprocess.Popen(["sleep", "60"], env=environment)
    try:
        path = Path(f"/proc/{child.pid}/environ")
        while b"CPU_OFFLOAD_GB" not in path.read_bytes():
            pass  # between fork and exec it is still ours
        assert host_ram.asked_by(child.pid) == 12.5
    finally:
        child.kill()
        child.wait()
    assert host_ram.asked_by(child.pid) is None


# -- kv-offload-shm ----------------------------------------------------------------------------------------------------


def test_both_numbers_of_a_death_at_the_start() -> None:
    line = (
        "RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region in /dev/shm: 49151 MiB "
        "required, 32768 MiB free. Increase /dev/shm (e.g. --shm-size or --ipc=host)."
    )
    (found,) = kv_offload_shm.start_failed(f"it ended; its last words:\n{line}")
    assert (found.name, found.value, found.unit, found.says) == ("kv-tier", 49151.0, "MiB", "fault")
    assert "32768 MiB free by its own words" in found.text
    assert kv_offload_shm.start_failed("out of something else") == []


def test_plans_count_every_phase() -> None:
    from soakrig.reproducers.registry import find_reproducer

    def planned(name: str, **parameters: Any) -> Plan:
        row = find_reproducer(name)
        return row.planned(row.options({}, parameters), None, None)

    assert planned("restart-prefix").turns == 12
    assert planned("restart-prefix", restart=False, evict=False, prompts=5).turns == 10
    assert planned("wedge").turns == 6
    assert planned("wedge", ways="kill").turns == 3
    assert planned("idle").seconds == 600.0
    assert planned("mixed-burst").total_turns == 64
