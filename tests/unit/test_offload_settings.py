"""The offload core's variables: values, refusals by name, and combinations that cannot be."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest

from soakrig.engine.offload.settings import POLICIES, VARIABLES, OffloadSettings
from soakrig.errors import UsageError


def read(**environment: str) -> OffloadSettings:
    return OffloadSettings.from_environment(environment)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    (tmp_path / "hot.json").write_text("{}")
    return str(tmp_path / "hot.json")


@pytest.fixture
def slot_map(tmp_path: Path) -> str:
    (tmp_path / "slots.json").write_text("{}")
    return str(tmp_path / "slots.json")


def test_nothing_set_means_nothing_is_offloaded() -> None:
    settings = read()
    assert not settings.offloads
    assert not settings.slots_asked
    assert (settings.slots, settings.arena, settings.slot_map, settings.offload_gb) == (0, 0, None, None)
    assert (settings.staging, settings.groups, settings.policy, settings.trace) == (True, True, "lru", None)
    assert settings.report()["CPU_OFFLOAD_GB"] == {"value": None, "source": "default", "obeyed": True}
    assert list(settings.report()) == list(VARIABLES)


def test_slots_are_a_number_an_arena_or_a_map(slot_map: str) -> None:
    for text, value, found in (
        ("8", 8, (8, 0, None)),
        ("arena:08", "arena:8", (0, 8, None)),
        (slot_map, slot_map, (0, 0, slot_map)),
    ):
        settings = read(VLLM_MOE_HOT_SLOTS=text)
        assert (settings.slots, settings.arena, settings.slot_map) == found
        assert settings.slots_asked
        assert settings.offloads
        assert settings.report()["VLLM_MOE_HOT_SLOTS"] == {"value": value, "source": "environment", "obeyed": True}


def test_slots_alone_offload_everything_and_a_number_of_gib_decides(profile: str) -> None:
    assert read(VLLM_MOE_HOT_SLOTS="4").offloads
    assert read(CPU_OFFLOAD_GB="0.5").offloads
    assert not read(CPU_OFFLOAD_GB="0").offloads
    assert not read(VLLM_MOE_HOT_SLOTS="0").offloads
    assert read(CPU_OFFLOAD_GB="1.5", VLLM_MOE_HOT_SLOTS="4", VLLM_MOE_HOT_PROFILE=profile).offload_gb == 1.5


def test_auto_is_static_where_a_profile_is_given(profile: str) -> None:
    assert read(VLLM_MOE_HOT_SLOTS="4").policy == "lru"
    assert read(VLLM_MOE_HOT_SLOTS="4", VLLM_MOE_HOT_PROFILE=profile).policy == "static"
    assert read(VLLM_MOE_SLOT_POLICY="auto").policy == "lru"
    for policy in POLICIES:
        settings = read(VLLM_MOE_HOT_SLOTS="4", VLLM_MOE_HOT_PROFILE=profile, VLLM_MOE_SLOT_POLICY=policy)
        assert settings.policy == settings.report()["VLLM_MOE_SLOT_POLICY"]["value"] == policy


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("VLLM_MOE_HOT_SLOTS", "-1", "arena:N"),
        ("VLLM_MOE_HOT_SLOTS", "1.5", "arena:N"),
        ("VLLM_MOE_HOT_SLOTS", "\u0663", "arena:N"),
        ("VLLM_MOE_HOT_SLOTS", "9" * 5000, "File name too long"),
        ("VLLM_MOE_HOT_SLOTS", "arena:0", "N of 1 or more"),
        ("VLLM_MOE_HOT_SLOTS", "arena:", "N of 1 or more"),
        ("VLLM_MOE_HOT_SLOTS", "arena:-4", "N of 1 or more"),
        ("VLLM_MOE_HOT_SLOTS", "/no/such/map.json", "existing slot map"),
        ("VLLM_MOE_HOT_PROFILE", "/no/such/profile.json", "existing profile"),
        ("VLLM_MOE_HOT_PROFILE", "/tmp", "existing profile"),
        ("VLLM_MOE_SKEW_PERLAYER", "/no/such/folder/out.json", "existing folder"),
        ("VLLM_MOE_SKEW_PERLAYER", "", "existing folder"),
        ("VLLM_MOE_ROUTING_TRACE", "/tmp", "file to write"),
        ("VLLM_MOE_ROUTING_TRACE", "/dev/null", "file to write"),
        ("VLLM_MOE_ROUTING_TRACE", "a" * 5000, "File name too long"),
        ("VLLM_MOE_DMA_STAGING", "true", "0 or 1"),
        ("VLLM_MOE_PREFILL_GROUPS", "2", "0 or 1"),
        ("CPU_OFFLOAD_GB", "-0.5", "GiB, 0 or more"),
        ("CPU_OFFLOAD_GB", "1e400", "GiB, 0 or more"),
        ("VLLM_MOE_SLOT_POLICY", "LRU", "auto, static, lru, lfru, clock"),
        ("VLLM_MOE_SLOT_POLICY", "opt", "auto, static, lru, lfru, clock"),
    ],
)
def test_nonsense_is_refused_with_what_was_read_and_expected(name: str, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(**{name: text})
    assert f"{name}={text!r}" in str(caught.value)
    assert expected in str(caught.value)
    assert f"correct {name}" in caught.value.remedy


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"VLLM_MOE_HOT_SLOTS": "8", "CPU_OFFLOAD_GB": "0"}, "VLLM_MOE_HOT_SLOTS='8' .* CPU_OFFLOAD_GB='0'"),
        ({"VLLM_MOE_HOT_SLOTS": "arena:8", "CPU_OFFLOAD_GB": "0.0"}, "'arena:8' .* CPU_OFFLOAD_GB='0.0'"),
        ({"VLLM_MOE_HOT_SLOTS": "8", "VLLM_MOE_SLOT_POLICY": "static"}, r"'static' .* VLLM_MOE_HOT_PROFILE=\(unset\)"),
        ({"VLLM_MOE_SLOT_POLICY": "clock"}, r"VLLM_MOE_SLOT_POLICY='clock' .* CPU_OFFLOAD_GB=\(unset\): no layer"),
        ({"VLLM_MOE_SLOT_POLICY": "lru", "CPU_OFFLOAD_GB": "0"}, "'lru' .* CPU_OFFLOAD_GB='0': no layer"),
        ({"VLLM_MOE_SKEW_PERLAYER": "out.json"}, r"'out.json' .* CPU_OFFLOAD_GB=\(unset\): no layer"),
        ({"VLLM_MOE_HOT_PROFILE": "P"}, r"hot.json' .* CPU_OFFLOAD_GB=\(unset\): no layer"),
        ({"VLLM_MOE_HOT_PROFILE": "P", "CPU_OFFLOAD_GB": "0"}, "hot.json' .* CPU_OFFLOAD_GB='0': no layer"),
        (
            {"VLLM_MOE_HOT_PROFILE": "P", "CPU_OFFLOAD_GB": "1"},
            r"VLLM_MOE_HOT_SLOTS=0 \(its default\): there is no slot",
        ),
        ({"VLLM_MOE_HOT_PROFILE": "P", "CPU_OFFLOAD_GB": "1", "VLLM_MOE_HOT_SLOTS": "0"}, "VLLM_MOE_HOT_SLOTS='0'"),
    ],
)
def test_what_does_not_go_together_is_refused_by_both_names(
    environment: dict[str, str], named: str, profile: str
) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        read(**{name: profile if text == "P" else text for name, text in environment.items()})
    assert caught.value.remedy


def test_switches_without_offload_are_nobodys_business() -> None:
    settings = read(VLLM_MOE_DMA_STAGING="0", VLLM_MOE_PREFILL_GROUPS="0", VLLM_MOE_SLOT_POLICY="auto")
    assert (settings.staging, settings.groups) == (False, False)


def test_no_output_overwrites_another_file(tmp_path: Path, profile: str, slot_map: str) -> None:
    out = str(tmp_path / "out")
    settings = read(CPU_OFFLOAD_GB="1", VLLM_MOE_SKEW_PERLAYER=out, VLLM_MOE_ROUTING_TRACE=out + ".trace")
    assert (settings.skew, settings.trace) == (out, out + ".trace")
    with pytest.raises(UsageError, match=r"VLLM_MOE_ROUTING_TRACE=.* VLLM_MOE_SKEW_PERLAYER=.*overwrite"):
        read(CPU_OFFLOAD_GB="1", VLLM_MOE_SKEW_PERLAYER=out, VLLM_MOE_ROUTING_TRACE=f"{tmp_path}/./out")
    with pytest.raises(UsageError, match=r"VLLM_MOE_ROUTING_TRACE=.* VLLM_MOE_HOT_PROFILE=.*overwrite"):
        read(VLLM_MOE_HOT_SLOTS="4", VLLM_MOE_HOT_PROFILE=profile, VLLM_MOE_ROUTING_TRACE=profile)
    with pytest.raises(UsageError, match=r"VLLM_MOE_SKEW_PERLAYER=.* VLLM_MOE_HOT_SLOTS=.*overwrite"):
        read(VLLM_MOE_HOT_SLOTS=slot_map, VLLM_MOE_SKEW_PERLAYER=slot_map)
    # A profile that is taken anew in its own place is how one is refined.
    assert read(VLLM_MOE_HOT_SLOTS="4", VLLM_MOE_HOT_PROFILE=profile, VLLM_MOE_SKEW_PERLAYER=profile).skew == profile


@contextlib.contextmanager
def without_roots_rights() -> Generator[None]:
    """access(2) asks about the real user, who is nobody in here; the effective one stays."""
    real, effective, _ = os.getresuid()
    if effective == 0:
        os.setreuid(65534, -1)
    try:
        yield
    finally:
        if effective == 0:
            os.setreuid(real, -1)


def test_a_file_that_cannot_be_written_later_is_refused_now(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with without_roots_rights(), pytest.raises(UsageError, match="this user may write"):
        read(VLLM_MOE_ROUTING_TRACE=str(tmp_path / "out"))


@pytest.mark.parametrize("target", ["link", "nowhere/file"])
def test_a_link_to_nothing_is_no_file_to_write(tmp_path: Path, target: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(UsageError, match="a file to write, in an existing folder"):
        read(VLLM_MOE_ROUTING_TRACE=str(tmp_path / "link"))


def test_a_misspelt_variable_is_refused_and_a_stranger_is_not() -> None:
    with pytest.raises(UsageError, match="VLLM_MOE_SLOTS_POLICY is no setting") as caught:
        read(VLLM_MOE_SLOTS_POLICY="lru")
    assert "VLLM_MOE_SLOT_POLICY was probably meant" in str(caught.value)
    read(VLLM_MOE_ROUTING_SIMULATION_STRATEGY="uniform_random", VLLM_MOE_USE_DEEP_GEMM="1", HOME="/root")


def test_the_processes_own_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOE_HOT_SLOTS", "5")
    assert OffloadSettings.from_environment().slots == 5


def test_one_module_of_the_engines_reads_their_variables() -> None:
    engine = Path(__file__).parents[2] / "src/soakrig/engine"
    folders = (engine / "offload", engine / "embedded")
    readers = {
        str(path.relative_to(engine))
        for folder in folders
        for path in folder.glob("*.py")
        if re.search(r"os\.environ(?!, \"OMP)|getenv", path.read_text())
    }
    # embedded/link.py hands the environment on to the worker, unread.
    assert readers == {"offload/settings.py"}
