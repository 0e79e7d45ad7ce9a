"""Planted faults in the embedded engine: each is found, named, tied to its turn, and marked as simulated."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from e2e.soaking import Soak, consistent, wait_for


def plant(**fields: object) -> str:
    return "SOAKRIG_PLANT=" + json.dumps(fields)


def can_write_kmsg() -> bool:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDWR | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def test_an_xid_at_turn_33_in_a_log_file(tmp_path: Path) -> None:
    planted = plant(
        action="exit", hazard=1, after={"turns": 32}, xid=31, kernel_log=str(tmp_path / "kernel-source.log")
    )
    with Soak(tmp_path, "--set", planted, turns=60) as soak:
        result = soak.finish(120)
    assert (result["verdict"], result["exit_code"]) == ("fail", 1)
    assert result["simulated"] is True
    (fault,) = [f for f in result["faults"] if f["xid"]]
    assert (fault["xid"], fault["turn"], fault["conversation"]) == (31, 33, 0)
    assert fault["context_tokens"] > 1000
    assert fault["signature"].startswith("Xid 31 FAULT_PDE")
    assert fault["source"] == "kernel_log"
    assert not fault["injected"], "a file proves nothing about who wrote it"
    assert result["engine"]["died_after_turn"] == 32
    assert result["outcomes"]["ok"] == 32
    assert len(result["faults"]) == 1, "Xid, exit and the log's last words are one fault"
    consistent(result, soak.events())


@pytest.mark.skipif(not can_write_kmsg(), reason="writing to /dev/kmsg needs root or CAP_SYSLOG")
def test_an_xid_at_turn_33_through_the_real_kernel_log_is_injected(tmp_path: Path) -> None:
    planted = plant(action="sigkill", hazard=1, after={"turns": 32}, xid=31, kernel_log="/dev/kmsg")
    with Soak(tmp_path, "--set", planted, "--kernel-log", "kmsg", turns=60) as soak:
        result = soak.finish(120)
    assert (result["verdict"], result["exit_code"]) == ("fail", 1)
    (fault,) = [f for f in result["faults"] if f["xid"]]
    assert fault["injected"] is True, "userspace wrote it, and it must not pass for the kernel's own word"
    assert (fault["turn"], fault["conversation"]) == (33, 0)
    assert fault["context_tokens"] > 1000
    assert result["simulated"] is True
    assert result["sources"]["kernel_log"]["state"] == "live"


@pytest.mark.skipif(not can_write_kmsg(), reason="writing to /dev/kmsg needs root or CAP_SYSLOG")
def test_somebody_else_s_line_in_the_kernel_log_is_not_clean_and_no_fault(tmp_path: Path) -> None:
    with Soak(tmp_path, "--kernel-log", "kmsg", turns=80) as soak:
        soak.wait_turn(2)
        line = f"NVRM: Xid (PCI:0000:65:00): 31, pid=1, name=made{os.getpid()}-{time.time_ns() % 1000}, Ch 00000001"
        Path("/dev/kmsg").write_text(line + "\n")
        kept = soak.run / "kernel.log"
        wait_for("the line", lambda: kept.exists() and line in kept.read_text())
        os.kill(soak.process.pid, signal.SIGINT)
        result = soak.finish()
    assert (result["verdict"], result["exit_code"]) == ("inconclusive", 2)
    assert result["faults"] == []
    assert any("injected" in reason for reason in result["reasons"])


ACTIONS = {
    "exit": {"truncated", "error_frame", "refused"},
    "sigkill": {"truncated", "refused"},
    "hang": {"hung"},
    "empty_200": {"empty_200"},
    "answerless": {"answerless"},
    "cut": {"truncated"},
    "error_frame": {"error_frame"},
    "one_token": {"degenerate"},
    "bad_expert_id": {"error_frame"},
}


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_has_its_outcome(tmp_path: Path, action: str) -> None:
    with Soak(tmp_path, "--set", plant(action=action, hazard=1, after={"turns": 2}), "--max-bad", "1", turns=6) as soak:
        result = soak.finish()
    assert (result["verdict"], result["exit_code"]) == ("fail", 1)
    assert result["simulated"] is True
    assert result["first_bad"]["turn"] == 3
    assert result["first_bad"]["outcome"] in ACTIONS[action]
    assert result["outcomes"]["ok"] == 2
    assert result["engine"]["alive"] is (action not in ("exit", "sigkill"))


def test_a_plant_that_waits_for_a_setting_fires_only_with_it(tmp_path: Path) -> None:
    when = {"VLLM_MOE_DMA_STAGING": "1"}
    planted = plant(action="error_frame", hazard=1, after={"turns": 1}, when=when)
    (tmp_path / "on").mkdir()
    (tmp_path / "off").mkdir()
    with Soak(tmp_path / "on", "--set", planted, turns=3) as soak:
        assert soak.finish()["outcomes"] == {"ok": 1, "error_frame": 2}
    with Soak(tmp_path / "off", "--set", planted, "--set", "VLLM_MOE_DMA_STAGING=0", turns=3) as soak:
        result = soak.finish()
    assert result["outcomes"] == {"ok": 3}
    assert result["verdict"] == "pass"
    assert result["simulated"] is True, "a clean run of an engine with a plant is still marked"
