"""`soak bundle` of a real run with a planted fault: nothing of the secrets is in it, and its script finds the fault."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from e2e.serving import free_port
from e2e.test_embedded_process import running
from run_folders import long_run, write_run
from seeded_secrets import PROMPTS, SECRETS, engine_lines, kernel_lines, members, survivors
from soakrig.cli.main import invoke

PAD = "The quick brown fox jumps over the lazy dog near the river bank. "


def soak(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "soakrig", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **(env or {})})


def unpacked(archive: Path, folder: Path) -> Path:
    folder.mkdir()
    for name, data in members(archive).items():
        (folder / name).write_bytes(data)
    return folder


def repro(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Isolated: neither this checkout nor the current folder is on its path."""
    command = [sys.executable, "-I", str(folder / "repro.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")


def transcript(path: Path) -> Path:
    """A conversation that grows past 600 tokens in its third turn."""
    told = "; ".join(f"{what} is {secret}" for what, secret in SECRETS.items())
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{PROMPTS[0]}. {PAD}"}]
    lines = [json.dumps({"messages": messages, "max_tokens": 200})]
    for text in (PROMPTS[1], f"{told} {PAD * 40}", "and now?"):
        messages = [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": text}]
        lines.append(json.dumps({"messages": messages, "max_tokens": 200}))
    path.write_text("\n".join(lines))
    return path


def test_a_planted_fault_comes_again_from_the_bundle_and_nobody_is_in_it(tmp_path: Path) -> None:
    kernel, runs = tmp_path / "kern.log", tmp_path / "runs"
    kernel.touch()
    plant = json.dumps({"action": "exit", "after": {"context_tokens": 600}, "xid": 31, "kernel_log": str(kernel)})
    settings = [f"SOAKRIG_PLANT={plant}", f"HF_TOKEN={SECRETS['Hugging Face']}", f"TWIN_CACHE={SECRETS['home']}"]
    ran = soak(
        "run", "--runs-dir", str(runs), "--transcript", str(transcript(tmp_path / "talk.jsonl")), "--keep-text",
        "--kernel-log", str(kernel), "--stall-timeout", "5", "--json", *(f"--set={one}" for one in settings),
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    result = json.loads(ran.stdout)
    assert result["simulated"]
    run = (runs / "latest").resolve()
    for name, lines in (("kernel.log", kernel_lines()), ("engine.log", engine_lines())):
        with (run / name).open("a") as stream:
            stream.write("\n".join(lines) + "\n")
    planted = survivors({path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()})
    assert {what for _, what in planted} >= set(SECRETS)

    archive = tmp_path / "bundle.tar.gz"
    healthy = tmp_path / "healthy"
    healthy.mkdir()
    shell = {"DEPLOY_PASSWORD": SECRETS["password"], "HOME": "/home/oneoperatorq", "USER": SECRETS["user"]}
    with running(healthy) as engine:
        made = soak("bundle", str(run), "--out", str(archive), "--url", engine.base, env=shell)
        assert made.returncode == 0, made.stderr
        folder = unpacked(archive, tmp_path / "unpacked")
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert survivors(files) == []
        assert all(b"simulated" in data.lower() for data in files.values())
        exact = re.search(
            r"([\d,]+) texts, ([\d,]+) tokens \(the engine's /tokenize\), 0 of", files["issue.md"].decode()
        )
        assert exact is not None
        clean = repro(folder, engine.base, "--kernel-log", str(kernel))
        assert clean.returncode == 0, clean.stdout + clean.stderr
        assert "no fault in 3 turns" in clean.stdout

    sick = tmp_path / "sick"
    sick.mkdir()
    with running(sick, SOAKRIG_PLANT=plant) as engine:
        found = repro(folder, engine.base, "--kernel-log", str(kernel))
        assert found.returncode == 1, found.stdout + found.stderr
        assert "FAULT at turn 3" in found.stdout
        assert "SIMULATED" in found.stdout
        again = repro(folder, engine.base, "--kernel-log", str(kernel))
        assert again.returncode == 1  # it was dead before


def test_what_the_script_cannot_tell(tmp_path: Path) -> None:
    """A fault that only a kernel log shows, requests that are not taken, nothing that answers, no payload."""
    run = write_run(tmp_path / "run", long_run(3, faults=1, prompt_tokens=40, context_tokens=40))
    assert invoke(["bundle", str(run), "--out", str(tmp_path / "b.tar.gz")]) == 0
    folder = unpacked(tmp_path / "b.tar.gz", tmp_path / "unpacked")
    log = tmp_path / "kern.log"
    log.touch()
    with running(tmp_path) as engine:
        assert repro(folder, engine.base, "--kernel-log", str(log)).returncode == 0
        unseen = repro(folder, engine.base, "--kernel-log", str(tmp_path / "none"))
        assert (unseen.returncode, "cannot be read" in unseen.stdout) == (2, True)
        payload = (folder / "payload.jsonl").read_bytes()
        (folder / "payload.jsonl").write_bytes(payload.replace(b'"role":"user"', b'"role":"nobody"'))
        rejected = repro(folder, engine.base, "--kernel-log", str(log))
        assert (rejected.returncode, "status 4" in rejected.stdout) == (2, True)
    assert repro(folder, f"http://127.0.0.1:{free_port()}").returncode == 2
    (folder / "payload.jsonl").unlink()
    assert repro(folder, "http://127.0.0.1:1").returncode == 2


def test_a_fault_of_a_turn_comes_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", long_run(3, bad_every=3, prompt_tokens=40, context_tokens=40))
    assert invoke(["bundle", str(run), "--out", str(tmp_path / "b.tar.gz")]) == 0
    folder = unpacked(tmp_path / "b.tar.gz", tmp_path / "unpacked")
    with running(tmp_path, SOAKRIG_PLANT=json.dumps({"action": "empty_200", "after": {"turns": 2}})) as engine:
        found = repro(folder, engine.base, "--kernel-log", str(tmp_path / "none"))
    assert found.returncode == 1, found.stdout + found.stderr
    assert "FAULT at turn 3" in found.stdout
