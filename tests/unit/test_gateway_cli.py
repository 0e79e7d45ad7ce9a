"""`soak engine gateway`: what it refuses before it listens."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from soakrig.cli.main import invoke

UP = ["engine", "gateway", "--upstream", "http://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "192.0.2.1"], "there is no API key"),
        (["--host", "192.0.2.1", "--api-key-env", "GATEWAY_KEY", "--port", "70000"], "no TCP port"),
        (["--host", "everywhere"], "no IP address"),
        (["--policy", "restore_reasonning"], "restore_reasoning was probably meant"),
        (["--policy", "min_output_tokens=-1"], "min_output_tokens"),
        (["--capture", "c"], "--policy capture"),
        (["--capture", "open", "--policy", "capture"], "chmod 700"),
        (["--api-key-env", "NOT_SET_HERE"], "is not set"),
        (["--upstream-api-key-env", "NOT_SET_HERE"], "is not set"),
        (["--model", "x"], "expected NAME=URL"),
        (["--model", "x=http://127.0.0.1:9", "--model", "x=http://127.0.0.1:8"], "given twice"),
        (["--model", "x=ftp://127.0.0.1"], "no URL of a server"),
        (["--stall-timeout", "0"], "above 0"),
        (["--first-byte-timeout", "nan"], "above 0"),
        (["--port", "99999"], "no TCP port"),
    ],
)
def test_what_is_refused(
    options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_KEY", "s3cret")
    (tmp_path / "open").mkdir(mode=0o755)
    assert invoke([*UP, *options]) == 64
    out, err = capsys.readouterr()
    assert says in err
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["open"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["embeded"], "'embedded' was meant"),
        (["embedded", "--upstream", "http://127.0.0.1:9"], "Give the one or the other"),
        (["embedded", "--model", "x=http://127.0.0.1:9"], "Give the one or the other"),
        (["--policy", "restore_reasoning"], "[models.NAME.policies]"),
        (["--capture", "c"], "`capture = true` of a model in the registry"),
        (["--registry", "not-there.toml"], "cannot be read"),
    ],
)
def test_what_is_refused_of_the_registry(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("SOAKRIG_MODELS", raising=False)
    assert invoke(["engine", "gateway", *words]) == 64
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_taken_port_is_refused_with_its_holder(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        assert invoke([*UP, "--port", str(held.getsockname()[1])]) == 3
    assert f"pid {os.getpid()}" in capsys.readouterr().err
