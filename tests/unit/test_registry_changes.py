"""A model of the registry under a soak and a bisect: what --set and --arg make of it, and its launch in a campaign."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soakrig.bisect.campaign_file import Campaign, merge_campaign
from soakrig.bisect.variables import parse_variable
from soakrig.cli.main import invoke
from soakrig.engine.registry import load_registry, order_for
from soakrig.engine.registry_changes import changed, registered
from soakrig.errors import UsageError

TINY = """
[models.small]
backend = "embedded"
context = 4096
validated_context = 4096
flags = ["--layers=2", "--experts=8", "--kv-tokens=8192"]
settings = { OMP_NUM_THREADS = 1, VLLM_MOE_HOT_SLOTS = 4, CPU_OFFLOAD_GB = 1 }
"""


@pytest.fixture(autouse=True)
def _own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models.toml").write_text(TINY)
    monkeypatch.setenv("SOAKRIG_MODELS", str(tmp_path / "models.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def test_settings_and_flags_replace_their_own_and_the_kv_cap_follows_the_context() -> None:
    glm = load_registry().find("glm53")
    found = changed(
        glm, {"VLLM_MOE_HOT_SLOTS": "48", "NEW": "x"}, ["--max-model-len=8192", "--max-num-seqs=2", "--enforce-eager"]
    )
    assert (found.settings["VLLM_MOE_HOT_SLOTS"], found.settings["NEW"], found.settings["CPU_OFFLOAD_GB"]) == (
        "48", "x", "125",
    )  # fmt: skip
    flags = order_for(found).flags
    assert "--max-model-len=8192" in flags
    assert f"--kv-cache-memory-bytes={8192 * 17200}" in flags
    assert [flag for flag in flags if flag.startswith("--max-num-seqs")] == ["--max-num-seqs=2"]
    assert flags[-1] == "--enforce-eager"
    assert changed(glm, {}, ["--gpu-memory-utilization=0.9"]).gpu_memory_utilization == 0.9
    assert changed(glm, {}, ["--shutdown_timeout=7"]).shutdown_timeout == 7
    assert changed(glm, {}, []) == glm


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--max-model-len=long", "--max-model-len=long: a number was expected"),
        ("--gpu-memory-utilization=2", "less than or equal to 1"),
        ("--served-model-name=x", "what the key served_name says"),
        ("--port=1", "what the key port says"),
        ("nonsense", "String should match"),
    ],
)
def test_what_the_registry_would_refuse(flag: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        changed(load_registry().find("glm53"), {}, [flag])


def test_a_bundled_engine_needs_no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOAKRIG_MODELS", "not-there.toml")
    assert registered("embedded", {}, []) is None
    with pytest.raises(UsageError, match="cannot be read"):
        registered("small", {}, [])


def test_names_that_are_neither() -> None:
    with pytest.raises(UsageError, match="'glm53' was meant") as caught:
        registered("glm5", {}, [])
    assert "In the registry: embedded, tiny-moe, glm53, small" in str(caught.value.remedy)
    with pytest.raises(UsageError, match="has its checkpoint"):
        registered("small", {}, [], model="/m")


def test_a_campaign_has_the_launch_written_out() -> None:
    variables = [
        parse_variable("VLLM_MOE_HOT_SLOTS=54,0"),
        parse_variable("--arg:--max-num-seqs=1,8"),
    ]
    found = merge_campaign(Campaign(), {"engine": "glm53"}, variables=variables, flags=["--enforce-eager"])
    home = Path.home()
    assert (found.registry, found.engine, found.own_offload, found.port) == ("glm53", "vllm", True, 8002)
    assert found.model == f"{home}/models/GLM-5.3-Flash-NVFP4"
    assert found.limits.start == 1800
    control, *_, last = found.arms
    order = found.order(control)
    assert order.python == f"{home}/vllm-glm53/.venv/bin/python"
    assert order.settings["VLLM_MOE_HOT_SLOTS"] == "54"
    assert [flag for flag in order.flags if flag.startswith("--max-num-seqs")] == ["--max-num-seqs=1"]
    assert "--enforce-eager" in order.flags
    assert found.order(last).settings["CPU_OFFLOAD_GB"] == "125"
    assert Campaign.from_json(found.to_json()) == found
    other = Campaign(engine="vllm", model="/m", python="/p", own_offload=True)
    other = merge_campaign(other, {"engine": "embedded"}, variables=[parse_variable("OMP_NUM_THREADS=1,2")])
    assert (other.python, other.own_offload, other.registry) == ("", False, "")


def test_a_soak_is_refused_by_the_preflights_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["run", "--engine", "glm53", "--json"]) == 3
    out = json.loads(capsys.readouterr().out)
    assert "host-ram: 155 GiB needed (125 offloaded + 30 while it loads)" in out["error"]
    assert "`soak engine serve glm53` starts it all the same" in out["remedy"]
    assert "--force host-ram" in out["remedy"]
    assert not (tmp_path / "runs").exists()
    assert invoke(["run", "--engine", "smal"]) == 64
    assert "'small' was meant" in capsys.readouterr().err
    assert invoke(["bisect", "--engine", "glm53", "VLLM_MOE_HOT_SLOTS=54,48", "--json"]) == 3
    assert "host-ram: 155 GiB needed" in json.loads(capsys.readouterr().out)["error"]
    assert not (tmp_path / "runs").exists()


def test_a_fatal_combination_may_be_hunted_and_not_soaked(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "--engine", "glm53", "--arg=--max-num-batched-tokens=4096"]) == 3
    assert "small batches" in capsys.readouterr().err
    assert invoke(["bisect", "--engine", "glm53", "--arg:--max-num-batched-tokens=4096,8192", "--json"]) == 3
    assert "small batches" not in capsys.readouterr().out


def test_a_soak_of_the_registry_s_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "run --engine small --turns 2 --tools 1 --max-tokens 64 --set VLLM_MOE_HOT_SLOTS=8".split()
    (tmp_path / "kernel.log").touch()
    code = invoke([*words, "--kernel-log", str(tmp_path / "kernel.log"), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (code, result["outcomes"]["ok"]) == (0, 2), result
    (folder,) = (tmp_path / "runs").glob("2*")
    kept = json.loads((folder / "manifest.json").read_text())["settings"]
    assert kept["registry"] == "small"
    assert kept["set"] == {"OMP_NUM_THREADS": "1", "VLLM_MOE_HOT_SLOTS": "8", "CPU_OFFLOAD_GB": "1"}
    assert kept["args"][:2] == ["--served-model-name=small", "--max-model-len=4096"]
