"""`soak doctor`: what it says of this very machine, and of others by their files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from soakrig.cli import doctor as doc
from soakrig.cli.doctor import Check

app = typer.Typer()
app.command()(doc.doctor)


def test_json_is_one_object_with_every_check(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--json", "--runs-dir", str(tmp_path)])
    report = json.loads(result.stdout)
    assert [row["name"] for row in report["checks"]] == [
        "kernel log", "NVML", "processes", "ptrace", "cgroup", "disk", "memlock", "shared memory",
    ]  # fmt: skip
    assert {row["state"] for row in report["checks"]} <= {"ok", "partial", "no"}
    assert all(row["detail"] for row in report["checks"])
    assert report["exit_code"] == result.exit_code
    kernel = report["checks"][0]
    assert (result.exit_code == 2) == (kernel["state"] == "no")


def test_without_a_kernel_log_it_exits_2_and_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--kernel-log", "none", "--runs-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "switched off" in result.stdout
    assert "inconclusive" in result.stdout


def test_a_readable_log_is_enough(tmp_path: Path) -> None:
    (tmp_path / "kern.log").touch()
    result = CliRunner().invoke(app, ["--kernel-log", str(tmp_path / "kern.log"), "--runs-dir", str(tmp_path / "a/b")])
    assert result.exit_code == 0
    assert "can end in a verdict" in result.stdout


@pytest.mark.parametrize(
    ("state", "needed", "code"), [("no", True, 2), ("no", False, 0), ("partial", True, 0), ("ok", True, 0)]
)
def test_only_what_is_needed_decides(state: doc.State, *, needed: bool, code: int) -> None:
    assert doc.exit_code([Check("a", "ok", "x"), Check("b", state, "x", needed=needed)]) == code


def test_a_check_that_breaks_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doc, "check_memlock", broken)
    rows = {check.name: check for check in doc.examine(tmp_path)}
    assert len(rows) == 8
    assert rows["memlock"].state == "no"
    assert "Input/output error" in rows["memlock"].detail


@pytest.mark.parametrize(("text", "as_root", "as_user"), [("0", "ok", "ok"), ("1", "ok", "partial"), ("3", "no", "no")])
def test_ptrace(tmp_path: Path, text: str, as_root: str, as_user: str) -> None:
    (tmp_path / "scope").write_text(f"{text}\n")
    assert doc.check_ptrace(tmp_path / "scope").state == (as_root if os.geteuid() == 0 else as_user)
    assert doc.check_ptrace(tmp_path / "none").state == "ok"


def cgroup(root: Path, line: str, file: str | None, text: str = "") -> Check:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line + "\n")
    if file:
        place = root / "sys/fs/cgroup" / file
        place.parent.mkdir(parents=True)
        place.write_text(text + "\n")
    return doc.check_cgroup(root)


def test_cgroup_limits(tmp_path: Path) -> None:
    limited = cgroup(tmp_path / "a", "0::/user/x", "user/x/memory.max", str(3 << 30))
    assert (limited.state, "3.0 GiB" in limited.detail) == ("ok", True)
    assert "no memory limit" in cgroup(tmp_path / "b", "0::/", "memory.max", "max").detail
    old = cgroup(tmp_path / "c", "4:memory:/box", "memory/box/memory.limit_in_bytes", str(1 << 30))
    assert "1.0 GiB" in old.detail
    inside = cgroup(tmp_path / "d", "4:memory:/docker/x", "memory/memory.limit_in_bytes", str(1 << 30))
    assert "1.0 GiB" in inside.detail, "in a container the path is the host's, the mount its own"
    assert cgroup(tmp_path / "e", "0::/", None).state == "partial"
    assert doc.check_cgroup(tmp_path / "nothing").state == "no"


def test_processes_as_the_mount_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mounts").write_text("proc /proc proc rw,nosuid,hidepid=invisible 0 0\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    hidden = doc.check_processes(tmp_path)
    assert hidden.state == "partial"
    assert "hidepid=invisible" in hidden.detail
    (tmp_path / "self/mounts").write_text("proc /proc proc rw,nosuid 0 0\n")
    assert "this user's only" in doc.check_processes(tmp_path).detail
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert doc.check_processes(tmp_path).state == "ok"
    assert doc.check_processes(tmp_path / "gone").state == "no"


def test_disk_and_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(tmp_path) in doc.check_disk(tmp_path / "not" / "yet").detail
    for limit, state in ((1 << 60, "partial"), (0, "ok")):
        monkeypatch.setattr(doc, "LITTLE_DISK", limit)
        monkeypatch.setattr(doc, "LITTLE_SHM", limit)
        assert doc.check_disk(tmp_path).state == state
        assert doc.check_shm(tmp_path).state == state
    monkeypatch.setattr(doc, "NO_DISK", 1 << 60)
    assert (doc.check_disk(tmp_path).state, doc.check_disk(tmp_path).needed) == ("no", True)
    assert doc.check_shm(tmp_path / "none").state == "no"
