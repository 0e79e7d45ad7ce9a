"""The environment's settings and the planted fault: what is refused, what is reported, when a fault strikes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from soakrig.engine.embedded.plant import Plant, PlantClock
from soakrig.engine.embedded.settings import VARIABLES, Settings
from soakrig.engine.embedded.xid_line import write_kernel_line, xid_line
from soakrig.engine.offload.settings import VARIABLES as OFFLOAD_VARIABLES
from soakrig.engine.offload.settings import OffloadSettings
from soakrig.errors import UsageError


def read(**environment: str) -> Settings:
    return Settings.from_environment(environment)


def plant(**fields: Any) -> Settings:
    return read(SOAKRIG_PLANT=json.dumps(fields))


def strikes(settings: Settings, turns: int, context: int = 1000, max_tokens: int | None = None) -> list[int]:
    assert settings.plant is not None
    clock = PlantClock(settings.plant, holds=settings.hold(settings.plant.when))
    return [turn for turn in range(1, turns + 1) if clock.turn(context, max_tokens) is not None]


def test_a_plant_may_ask_for_so_many_tools() -> None:
    clock = PlantClock(Plant.parse('{"action": "exit", "min_tools": 8}'), holds=True)
    assert [clock.turn(100, None, tools) for tools in (0, 7, 8, 50)] == [None, None, "exit", "exit"]
    assert PlantClock(Plant.parse('{"action": "exit"}'), holds=True).turn(100, None) == "exit"
    with pytest.raises(ValueError, match="min_tools"):
        Plant.parse('{"action": "exit", "min_tools": -1}')


def test_without_a_seed_each_start_draws_its_own_and_says_which() -> None:
    """Launches of one arm must differ, or thirty of them are one."""
    unseeded, seeded = plant(action="exit", hazard=0.5).plant, plant(action="exit", hazard=0.5, seed=0).plant
    assert unseeded is not None
    assert seeded is not None
    clocks = [PlantClock(unseeded, holds=True) for _ in range(8)]
    seeds = {clock.plant.report()["seed"] for clock in clocks}
    assert len(seeds) == 8
    assert all(isinstance(seed, int) for seed in seeds)
    assert len({tuple(clock.turn(1000, None) for _ in range(40)) for clock in clocks}) == 8
    assert unseeded.seed is None, "what was asked for stays as it was"
    assert {PlantClock(seeded, holds=True).plant.seed for _ in range(8)} == {0}, "and 0 is a seed"
    assert strikes_of(clocks[0].plant) == strikes_of(clocks[0].plant), "the seed that is told gives them again"


def strikes_of(planted: Plant) -> list[bool]:
    clock = PlantClock(planted, holds=True)
    return [clock.turn(1000, None) is not None for _ in range(40)]


def test_defaults_are_reported_as_defaults() -> None:
    report = read().report()
    assert report["VLLM_MOE_DMA_STAGING"] == {"value": 1, "source": "default", "obeyed": True}
    assert report["VLLM_MOE_PREFILL_GROUPS"]["value"] == 1
    assert report["SOAKRIG_PLANT"] == {"value": None, "source": "default", "obeyed": True}
    assert list(report) == [*OFFLOAD_VARIABLES, "SOAKRIG_PLANT"] == list(VARIABLES)


def test_the_environment_wins_and_is_named(tmp_path: Path) -> None:
    profile = tmp_path / "hot.json"
    profile.write_text("{}")
    report = read(
        VLLM_MOE_DMA_STAGING="0", CPU_OFFLOAD_GB="90.5", VLLM_MOE_HOT_PROFILE=str(profile), VLLM_MOE_HOT_SLOTS="8"
    ).report()
    assert report["VLLM_MOE_DMA_STAGING"] == {"value": 0, "source": "environment", "obeyed": True}
    assert report["CPU_OFFLOAD_GB"]["value"] == 90.5
    assert report["VLLM_MOE_HOT_PROFILE"]["value"] == str(profile)


def test_offload_settings_are_checked_here_too() -> None:
    with pytest.raises(UsageError, match=r"VLLM_MOE_HOT_SLOTS='8' does not go with CPU_OFFLOAD_GB='0'"):
        read(VLLM_MOE_HOT_SLOTS="8", CPU_OFFLOAD_GB="0")
    assert isinstance(read(VLLM_MOE_HOT_SLOTS="8"), OffloadSettings)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VLLM_MOE_HOT_SLOTS", "-1"),
        ("VLLM_MOE_HOT_SLOTS", "many"),
        ("VLLM_MOE_HOT_SLOTS", ""),
        ("VLLM_MOE_DMA_STAGING", "on"),
        ("VLLM_MOE_DMA_STAGING", "2"),
        ("VLLM_MOE_PREFILL_GROUPS", "2"),
        ("CPU_OFFLOAD_GB", "nan"),
        ("CPU_OFFLOAD_GB", "inf"),
        ("CPU_OFFLOAD_GB", "-3"),
        ("CPU_OFFLOAD_GB", "90 GB"),
        ("VLLM_MOE_HOT_PROFILE", "/no/such/profile.json"),
        ("VLLM_MOE_SKEW_PERLAYER", "/no/such/folder/out.json"),
        ("SOAKRIG_PLANT", "{"),
        ("SOAKRIG_PLANT", "[]"),
    ],
)
def test_nonsense_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"{name}={re.escape(repr(text))} makes no sense: .*expected") as caught:
        read(**{name: text})
    assert caught.value.exit_code == 64


def test_a_misspelt_variable_is_refused_and_a_stranger_is_not() -> None:
    with pytest.raises(UsageError, match="VLLM_MOE_DMA_STAGGING is no setting") as caught:
        read(VLLM_MOE_DMA_STAGGING="0")
    assert "VLLM_MOE_DMA_STAGING was probably meant" in str(caught.value)
    with pytest.raises(UsageError, match="SOAKRIG_PLANTS is no setting"):
        read(SOAKRIG_PLANTS="{}")
    assert read(VLLM_MOE_USE_DEEP_GEMM="1", HOME="/root").report()["VLLM_MOE_DMA_STAGING"]["source"] == "default"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"action": "explode"}, "action"),
        ({}, "action"),
        ({"action": "exit", "hazzard": 1}, "hazzard"),
        ({"action": "exit", "hazard": 1.5}, "hazard"),
        ({"action": "exit", "hazard": {"per_2k": 1}}, "hazard"),
        ({"action": "exit", "after": {"turns": 1, "context_tokens": 2}}, "exactly one of"),
        ({"action": "exit", "after": -1}, "after"),
        ({"action": "exit", "when": {"VLLM_MOE_DMA": "1"}}, "VLLM_MOE_DMA"),
        ({"action": "exit", "when": {"VLLM_MOE_DMA_STAGING": "yes"}}, "'yes' makes no sense"),
        ({"action": "exit", "xid": 31}, "xid and kernel_log go together"),
        ({"action": "exit", "xid": 31, "kernel_log": "/no/such/folder/kern.log"}, "cannot be written"),
        ({"action": "exit", "xid": 0, "kernel_log": "/tmp/x"}, "xid"),
    ],
)
def test_a_plant_that_cannot_be_carried_out_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        plant(**fields)


def test_a_plant_is_reported_as_plain_json() -> None:
    report = plant(action="exit", hazard=0.5, after=3).report()["SOAKRIG_PLANT"]
    assert json.loads(json.dumps(report)) == report
    assert report["source"] == "environment"
    assert {name: report["value"][name] for name in ("action", "hazard")} == {"action": "exit", "hazard": 0.5}
    assert report["value"]["after"]["turns"] == 3


def test_after_32_turns_a_certain_fault_strikes_at_turn_33() -> None:
    assert strikes(plant(action="exit", hazard=1, after={"turns": 32}), 34) == [33, 34]
    assert strikes(plant(action="exit", hazard=1, after=32), 34) == [33, 34]
    assert strikes(plant(action="exit"), 2) == [1, 2]


def test_canaries_are_no_turns() -> None:
    settings = plant(action="exit", after=1)
    assert settings.plant is not None
    clock = PlantClock(settings.plant, holds=True)
    assert [clock.turn(10, limit) for limit in (None, 16, 1, 17)] == [None, None, None, "exit"]
    assert clock.turns == 2


def test_after_counts_context_tokens_where_asked() -> None:
    settings = plant(action="cut", after={"context_tokens": 500})
    assert strikes(settings, 3, context=499) == []
    assert strikes(settings, 3, context=500) == [1, 2, 3]


def test_a_seed_fixes_the_turns_and_the_rate_is_the_hazard() -> None:
    one = strikes(plant(action="cut", hazard=0.1, seed=4), 3000)
    assert one == strikes(plant(action="cut", hazard=0.1, seed=4), 3000)
    assert one != strikes(plant(action="cut", hazard=0.1, seed=5), 3000)
    assert 240 < len(one) < 360
    # The same draws whatever lies before: a later start only leaves strikes out.
    assert strikes(plant(action="cut", hazard=0.1, seed=4, after=1000), 3000) == [turn for turn in one if turn > 1000]


def test_a_rising_hazard_rises_with_the_context() -> None:
    settings = plant(action="cut", hazard={"per_1k_context": 0.01})
    assert 60 < len(strikes(settings, 1000, context=10_000)) < 140
    assert len(strikes(settings, 1000, context=100)) < 10


def test_a_condition_has_to_hold() -> None:
    fields = {"action": "exit", "when": {"VLLM_MOE_DMA_STAGING": "1"}}
    text = json.dumps(fields)
    assert strikes(read(SOAKRIG_PLANT=text), 1) == [1]
    assert strikes(read(SOAKRIG_PLANT=text, VLLM_MOE_DMA_STAGING="0"), 1) == []
    text = json.dumps({"action": "exit", "when": {"CPU_OFFLOAD_GB": "90"}})
    assert strikes(read(SOAKRIG_PLANT=text, CPU_OFFLOAD_GB="90.0"), 1) == [1]


@pytest.mark.parametrize(
    ("when", "environment", "holds"),
    [
        ({"CPU_OFFLOAD_GB": "0"}, {}, True),
        ({"CPU_OFFLOAD_GB": ""}, {}, True),
        ({"CPU_OFFLOAD_GB": "0"}, {"VLLM_MOE_HOT_SLOTS": "8"}, False),
        ({"VLLM_MOE_SLOT_POLICY": "lru"}, {"VLLM_MOE_HOT_SLOTS": "8"}, True),
        ({"VLLM_MOE_SLOT_POLICY": "auto"}, {"VLLM_MOE_HOT_SLOTS": "8"}, True),
        ({"VLLM_MOE_SLOT_POLICY": "auto"}, {"VLLM_MOE_HOT_SLOTS": "8", "VLLM_MOE_SLOT_POLICY": "lru"}, False),
        ({"VLLM_MOE_SLOT_POLICY": "clock"}, {"VLLM_MOE_HOT_SLOTS": "8"}, False),
        ({"VLLM_MOE_HOT_SLOTS": "arena:8"}, {"VLLM_MOE_HOT_SLOTS": "arena:08"}, True),
        ({"VLLM_MOE_HOT_SLOTS": "8"}, {"VLLM_MOE_HOT_SLOTS": "arena:8"}, False),
    ],
)
def test_a_setting_holds_by_its_name_and_by_what_it_comes_to(
    when: dict[str, str], environment: dict[str, str], holds: bool
) -> None:
    settings = read(SOAKRIG_PLANT=json.dumps({"action": "exit", "when": when}), **environment)
    assert strikes(settings, 1) == ([1] if holds else [])


def test_the_xid_line_has_the_drivers_form_and_the_files_prefix(tmp_path: Path) -> None:
    place = tmp_path / "kern.log"
    place.write_text("before\n")
    write_kernel_line(str(place), xid_line(31, 4711))
    before, line = place.read_text().splitlines()
    assert before == "before"
    prefix, _, rest = line.partition(" NVRM: ")
    assert re.fullmatch(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ kernel: \[ *\d+\.\d{6}\]", prefix)
    assert rest == (
        "Xid (PCI:0000:01:00): 31, pid=4711, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 "
        "GPCCLIENT_T1_8 faulted @ 0x73ac_1c000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE"
    )
    assert xid_line("NVRM: anything", 1) == "NVRM: anything"
    assert xid_line(79, 5).endswith("79, pid=5, name=python3, GPU has fallen off the bus.")
