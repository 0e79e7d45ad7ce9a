"""Context, KV cap, contradictions, ports, slots, folders that shadow, what is installed; and overriding by name."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faked_machine import CPU_VLLM, FORK, embedded, fake_machine, glm53
from soakrig.engine.preflight.checks import CHECKS, check_names, exit_code, refuse, run_checks
from soakrig.engine.preflight.finding import Finding
from soakrig.engine.preflight.machine import Machine, Serving, look_for_engine
from soakrig.engine.registry import load_registry, order_for
from soakrig.engine.registry_entry import Entry
from soakrig.errors import PreflightRefusedError, UsageError
from sparse_checkpoint import glm_checkpoint


def found(name: str, entry: Entry, machine: Machine) -> Finding:
    (finding,) = run_checks(entry, machine, names=[name])
    assert finding.name == name
    return finding


def with_settings(**changes: str | None) -> Entry:
    """glm53 with variables replaced; None takes one out."""
    settings = {**glm53().settings, **{key: value for key, value in changes.items() if value is not None}}
    return glm53(settings={key: value for key, value in settings.items() if changes.get(key, "") is not None})


def with_flag(flag: str) -> Entry:
    name = flag.partition("=")[0]
    return glm53(flags=(*(one for one in glm53().flags if one.partition("=")[0] != name), flag))


def test_one_token_more_than_was_validated_is_refused(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path)
    fits = found("context", glm53(), machine)
    assert fits.state == "ok"
    assert "the longest prompt really read is 304,800 (93%)" in fits.text
    over = found("context", glm53().with_context(327_681), machine)
    assert (over.state, over.needs, over.has) == ("refused", 327_681, 327_680)
    assert "327,681 tokens asked, 327,680 validated" in over.text
    assert over.remedy
    assert found("context", glm53(validated_context=None), machine).state == "unknown"


def test_the_checkpoints_own_limit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 131072}))
    over = found("context", glm53(checkpoint=str(tmp_path)), fake_machine(tmp_path))
    assert (over.state, over.needs, over.has) == ("refused", 327_680, 131_072)


def test_the_kv_cap_of_the_seed(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path)
    follows = found("kv-cap", glm53(), machine)
    assert (follows.state, follows.has) == ("ok", 5_636_096_000)
    assert found("kv-cap", with_flag("--kv-cache-memory-bytes=5636096000"), machine).state == "ok"
    short = found("kv-cap", with_flag("--kv-cache-memory-bytes=5636095999"), machine)
    assert (short.state, short.needs, short.has) == ("refused", 5_636_096_000, 5_636_095_999)
    assert "327679 at most" in short.remedy
    # The operator's former launcher had 1 MiB more.
    assert found("kv-cap", with_flag("--kv-cache-memory-bytes=5637144576"), machine).state == "ok"
    blind = with_flag("--kv-cache-memory-bytes=5").model_copy(update={"kv_bytes_per_token": None})
    assert found("kv-cap", blind, machine).state == "unknown"


def test_the_kv_budget_of_the_embedded_engine(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path)
    assert found("kv-cap", embedded(), machine).state == "ok"
    short = found("kv-cap", embedded(flags=("--kv-tokens=32767",)), machine)
    assert (short.state, short.needs, short.has) == ("refused", 32768, 32767)


def test_offload_without_slots(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path)
    assert found("offload-slots", glm53(), machine).state == "ok"
    for slots in (None, "0", ""):
        none = found("offload-slots", with_settings(VLLM_MOE_HOT_SLOTS=slots), machine)
        assert none.state == "refused"
        assert "125 GiB are offloaded" in none.text
    assert found("offload-slots", embedded(), machine).state == "ok"


def test_the_offload_is_said_twice_and_has_to_agree(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path)
    assert found("offload-twice", glm53(), machine).text == "both say 125 GiB"
    differs = found("offload-twice", with_flag("--cpu-offload-gb=105"), machine)
    assert (differs.state, differs.needs, differs.has) == ("refused", 105, 125)


def profile(path: Path, offload: float | None) -> Entry:
    data = {"schema": "soakrig.hot_profile/1", "model": "m", "offload_gb": offload, "experts": 2, "steps": 1,
            "counts": {"0": [1, 2]}}  # fmt: skip
    path.write_text(json.dumps(data))
    return with_settings(VLLM_MOE_HOT_PROFILE=str(path))


def test_a_profile_of_another_offload(tmp_path: Path) -> None:
    machine, path = fake_machine(tmp_path), tmp_path / "hot.json"
    assert found("profile", profile(path, 125.0), machine).state == "ok"
    other = found("profile", profile(path, 127.0), machine)
    assert (other.state, other.needs, other.has) == ("refused", 125, 127)
    assert found("profile", profile(path, None), machine).state == "unknown"
    path.write_text("[[1, 2]]")  # a build's own format: the registry says where it is from
    foreign = with_settings(VLLM_MOE_HOT_PROFILE=str(path))
    assert found("profile", foreign, machine).state == "ok"
    moved = foreign.model_copy(update={"profile_offload_gib": 105.0})
    assert "taken at 105 GiB of offload, this launch offloads 125" in found("profile", moved, machine).text
    assert found("profile", foreign.model_copy(update={"profile_offload_gib": None}), machine).state == "unknown"
    path.unlink()
    assert found("profile", foreign, machine).state == "refused"


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (with_flag('--speculative-config={"method":"mtp","num_speculative_tokens":1}'), "speculative depth 1"),
        (with_flag('--speculative-config={"method":"mtp","num_speculative_tokens":4}'), "speculative depth 4"),
        (with_flag("--max-num-batched-tokens=4096"), "4096 (< 8192 is fatal)"),
        (with_flag('--kernel-config={"moe_backend":"flashinfer_cutlass"}'), "native FP4"),
        (with_settings(CPU_OFFLOAD_GB="99"), "offload too small"),
        (with_settings(VLLM_WEIGHT_OFFLOADING_DISABLE_UVA="1"), "D state"),
        (with_settings(VLLM_USE_BREAKABLE_CUDAGRAPH=None), "VLLM_USE_BREAKABLE_CUDAGRAPH is unset"),
        (with_settings(VLLM_USE_DEEP_GEMM="1"), "DeepGEMM"),
        (with_settings(VLLM_MOE_HOT_SLOTS="60"), "many slots"),
        (glm53(shutdown_timeout=0), "no time to unpin"),
    ],
)
def test_what_the_registry_marks_as_fatal(tmp_path: Path, entry: Entry, why: str) -> None:
    hit = found("fatal", entry, fake_machine(tmp_path))
    assert hit.state == "refused"
    assert why in hit.text
    assert hit.remedy


@pytest.mark.parametrize(
    "entry",
    [
        glm53(),
        with_flag('--speculative-config={"method":"mtp","num_speculative_tokens":5}'),  # untested is not fatal
        with_settings(VLLM_MOE_HOT_SLOTS="60").with_context(131072),
        with_settings(VLLM_USE_DEEP_GEMM="1").model_copy(update={"flags": glm53().flags[:4]}),
    ],
)
def test_what_is_not_fatal(tmp_path: Path, entry: Entry) -> None:
    assert found("fatal", entry, fake_machine(tmp_path)).state == "ok"


def test_a_condition_that_cannot_be_judged_is_unknown(tmp_path: Path) -> None:
    assert found("fatal", with_flag("--max-num-batched-tokens=auto"), fake_machine(tmp_path)).state == "unknown"


def test_settings_that_the_engine_would_refuse(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path)
    bad = found("settings", embedded(settings={"VLLM_MOE_HOT_SLOTS": "8", "CPU_OFFLOAD_GB": "0"}), machine)
    assert bad.state == "refused"
    assert "does not go with" in bad.text
    near = found("settings", glm53(own_offload=False, settings={"VLLM_MOE_HOT_SLOT": "8"}), machine)
    assert near.state == "refused"
    assert "VLLM_MOE_HOT_SLOTS was probably meant" in near.remedy


def test_a_port_that_is_taken_is_told_by_pid(tmp_path: Path) -> None:
    import os

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        held = found("port", embedded(port=port), fake_machine(tmp_path))
    assert held.state == "refused"
    assert f"port {port} of 127.0.0.1 is taken by pid {os.getpid()}" in held.text
    assert found("port", embedded(port=port), fake_machine(tmp_path)).state == "ok"


def test_one_model_in_a_slot(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path)
    assert found("slot", glm53(), machine).state == "ok"
    taken = replace(machine, serving=(Serving("other", 9, "side"), Serving("flash", 4177, "main")))
    held = found("slot", glm53(), taken)
    assert (held.state, held.text) == ("refused", "slot main is held by flash, pid 4177")
    assert "switch glm53" in held.remedy
    assert found("slot", glm53(slot=""), taken).state == "ok"
    assert found("slot", glm53(slot="other"), taken).state == "ok"
    again = replace(machine, serving=(Serving("glm53", 9),))
    assert "on this machine already" in found("slot", glm53(slot=""), again).text


@pytest.mark.parametrize("name", ["vllm", "vllm.py", "torch"])
def test_a_folder_that_shadows_the_engine(tmp_path: Path, name: str) -> None:
    machine = fake_machine(tmp_path)
    folder = tmp_path / "work"
    folder.mkdir()
    assert found("shadow", glm53(directory=str(folder)), machine).state == "ok"
    assert "is not there" in found("shadow", glm53(directory=f"{folder}/none"), machine).text
    (folder / name).touch() if name.endswith(".py") else (folder / name).mkdir()
    hidden = found("shadow", glm53(directory=str(folder)), machine)
    assert hidden.state == "refused"
    assert str(folder) in hidden.text
    assert name in hidden.text
    path = found("shadow", glm53(settings={"PYTHONPATH": f"/nowhere:{folder}"}), machine)
    assert path.state == "refused"
    assert "PYTHONPATH" in path.text


def test_what_has_to_be_installed(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path)
    assert found("engine", glm53(), machine).state == "ok"
    assert found("engine", glm53(own_offload=False), machine).state == "refused"
    missing = look_for_engine(order_for(glm53(python="/nowhere/python"), caller={"HOME": "/h"}))
    none = found("engine", glm53(), replace(machine, installation=missing))
    assert none.state == "refused"
    assert "/nowhere/python is not there" in none.text
    gone = found("checkpoint", glm53(), machine)
    assert gone.state == "refused"
    assert "models.glm53.checkpoint" in gone.remedy
    (tmp_path / "config.json").write_text("{}")
    assert found("checkpoint", glm53(checkpoint=str(tmp_path)), machine).state == "ok"


def test_a_whole_host_that_fits_the_seeds_launch(tmp_path: Path) -> None:
    """Every preflight passes, so that each refusal above is the changed fact's alone."""
    glm_checkpoint(tmp_path)
    (tmp_path / "hot.json").write_text("[]")
    libraries = tmp_path / "venv/lib/python3.12/site-packages/torch-2.11.0+cu130.dist-info"
    libraries.mkdir(parents=True)
    machine = fake_machine(tmp_path, installation=replace(FORK, python=tmp_path / "venv/bin/python"))
    entry = with_settings(VLLM_MOE_HOT_PROFILE="~/hot.json").model_copy(update={"checkpoint": str(tmp_path)})
    findings = run_checks(entry, machine)
    assert [(one.name, one.state, one.text) for one in findings if one.state != "ok"] == []
    assert [one.name for one in findings] == list(CHECKS)
    assert exit_code(findings) == 0


def test_overriding_by_name(tmp_path: Path) -> None:
    entry = glm53().with_context(327_681)
    machine = fake_machine(tmp_path, installation=CPU_VLLM)
    names = ("context", "kv-cap")
    with pytest.raises(PreflightRefusedError, match="327,681 tokens asked") as caught:
        refuse("glm53", run_checks(entry, machine, names=names))
    assert caught.value.exit_code == 3
    assert "--force context" in caught.value.remedy
    forced = run_checks(entry, machine, force=["context", "kv-cap"], names=names)
    refuse("glm53", forced)
    assert [(one.name, one.state, one.forced) for one in forced] == [
        ("context", "refused", True), ("kv-cap", "ok", False),
    ]  # fmt: skip
    assert exit_code(forced) == 0
    assert forced[0].to_json()["forced"] is True


def test_unknown_is_never_ok() -> None:
    findings = [Finding("a", "ok", ""), Finding("b", "unknown", "")]
    assert exit_code(findings) == 2
    assert exit_code([*findings, Finding("c", "refused", "")]) == 3
    refuse("m", findings)


def test_a_preflight_that_is_none() -> None:
    with pytest.raises(UsageError, match="'host-ram' was meant"):
        check_names(["hostram"])


def test_a_check_that_breaks_is_unknown(tmp_path: Path) -> None:
    def broken(port: int) -> Any:
        raise OSError("no sockets")

    one = found("port", embedded(port=9), replace(fake_machine(tmp_path), port_refusal=broken))
    assert (one.state, "no sockets" in one.text) == ("unknown", True)


def test_the_embedded_engine_passes_on_this_machine(tmp_path: Path) -> None:
    entry = load_registry(environ={"HOME": "/nonexistent"}).models["embedded"]
    machine = Machine(installation=look_for_engine(order_for(entry)), launch_folder=tmp_path)
    findings = run_checks(entry, machine)
    assert [(one.name, one.text) for one in findings if one.state != "ok"] == []
    ram = next(one for one in findings if one.name == "host-ram")
    assert (ram.needs, ram.unit) == (0.75, "GiB")
    assert ram.has is not None
    assert ram.has > 0.75
