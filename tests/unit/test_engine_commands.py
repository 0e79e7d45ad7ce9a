"""`soak engine` as a command, where nothing has to be started: what is shown, exit codes, a broken registry."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from soakrig.cli.main import invoke


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, so that neither models nor state of this user are seen."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "SOAKRIG_MODELS"):
        monkeypatch.delenv(name, raising=False)


def said(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> Any:
    assert invoke(["engine", *argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_seeds_launch_is_refused_here_with_both_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(["preflight", "glm53", "--context", "327681"], 3, capsys)
    assert (found["verdict"], found["exit_code"]) == ("refused", 3)
    by_name = {one["name"]: one for one in found["findings"]}
    assert (by_name["context"]["needs"], by_name["context"]["has"]) == (327681, 327680)
    assert by_name["host-ram"]["needs"] == 155
    assert by_name["kv-cap"]["needs"] == 5_636_096_000 + 17_200
    forced = said(["preflight", "glm53", "--context", "327681", "--force", "context"], 3, capsys)
    assert [one["name"] for one in forced["findings"] if one["forced"]] == ["context"]


def test_the_embedded_engine_passes_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "models.toml"
    models.write_text('[models.embedded]\nslot = "of-this-test"\nserved_name = "e"\n')  # a developer may serve one
    found = said(["preflight", "embedded", "--registry", str(models)], 0, capsys)
    assert (found["verdict"], {one["state"] for one in found["findings"]}) == ("ok", {"ok"})
    assert invoke(["engine", "preflight", "embedded", "--registry", str(models)]) == 0
    assert "nothing stands in the way of embedded" in capsys.readouterr().out


def test_models_and_their_state(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(["list"], 0, capsys)
    assert [row["model"] for row in found["models"]][:3] == ["embedded", "tiny-moe", "glm53"]
    glm = found["models"][2]
    assert (glm["state"], glm["context"], glm["slot"], glm["backend"]) == ("stopped", 327680, "main", "vllm")
    assert set(found["slots"]) == {"main"}
    assert invoke(["engine", "list"]) == 0
    assert "slot main: " in capsys.readouterr().out


def test_one_model_beside_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "glm").mkdir()
    (tmp_path / "glm/config.json").write_text(json.dumps({"max_position_embeddings": 1048576, "num_experts": 288}))
    models = tmp_path / "models.toml"
    models.write_text(
        '[models.glm53]\ncheckpoint = "~/glm"\npython = "/nowhere"\nsettings = { HF_TOKEN = "hf_secret" }\n'
    )
    found = said(["list", "glm53", "--registry", str(models)], 0, capsys)
    assert (found["registry"]["context"], found["checkpoint"]["max_positions"]) == (327680, 1048576)
    assert "hf_secret" not in json.dumps(found)
    assert invoke(["engine", "list", "glm53", "--registry", str(models)]) == 0
    shown = capsys.readouterr().out
    for text in ("327,680", "1,048,576", "288", "5,636,096,000 bytes", "155 GiB", "--max-num-batched-tokens=8192"):
        assert text in shown
    assert "hf_secret" not in shown


def test_a_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(["serve", "embedded", "--port", "8011", "--context", "4096", "--dry-run"], 0, capsys)
    assert "--max-model-len=4096" in found["command"]["argv"]
    assert found["command"]["argv"][4:6] == ["8011", "--port-file"]
    assert found["command"]["env"]["HOME"] == os.environ["HOME"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "embeded"], "'embedded' was meant"),
        (["serve", "embedded", "--force", "hostram"], "'host-ram' was meant"),
        (["serve", "embedded", "--port", "70000"], "--port 70000 is no port"),
        (["serve", "embedded", "--context", "0"], "--context 0"),
        (["stop", "embedded", "--shutdown-timeout", "-1"], "--shutdown-timeout -1"),
        (["status", "--timeout", "0"], "--timeout 0"),
        (["stop", ".."], "there is no model '..'"),
        (["logs", "embedded"], "was never started here"),
    ],
)
def test_wrong_calls(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["engine", *argv]) == 64
    assert says in capsys.readouterr().err


def test_a_model_can_be_stopped_with_a_broken_registry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "models.toml"
    models.write_text("[models.m]\nbackend = 1\n")
    assert invoke(["engine", "list", "--registry", str(models)]) == 64
    (tmp_path / ".local/state/soakrig/engines/m").mkdir(parents=True)
    capsys.readouterr()
    assert invoke(["engine", "stop", "m", "--registry", str(models)]) == 0
    out, err = capsys.readouterr()
    assert "was not running" in out
    assert "going on without the registry" in err
