"""``soak watch`` on whole logs, and which source the watcher takes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from soakrig.cli.watch import watch
from soakrig.clock import FakeClock
from soakrig.errors import UsageError, WatcherError
from soakrig.soak.watch.kernel_log import KernelLogWatcher

GOLDEN = Path(__file__).parents[1] / "golden" / "kernel"
APP = "import typer; from soakrig.cli.watch import watch; a = typer.Typer(); a.command()(watch); a()"
KEYS = [
    "kind", "xid", "pci", "pid", "process", "engine", "client", "fault_type", "access", "address", "injected", "raw",
    "time", "severity", "signature",
]  # fmt: skip
EXIT = {"serving-fault": 1, "injected": 0, "host": 1, "quiet": 0}


def run(*argv: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TZ": "UTC", "COLUMNS": "100", "NO_COLOR": "1", **more}
    return subprocess.run(
        [sys.executable, "-c", APP, *argv], capture_output=True, text=True, timeout=60, env=env, check=False
    )


@pytest.mark.parametrize("name", sorted(EXIT))
def test_a_whole_log_as_json_lines(name: str) -> None:
    done = run("--kernel-log", str(GOLDEN / f"{name}.log"), "--once", "--json")
    assert done.returncode == EXIT[name], done.stderr
    got = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(list(one) == KEYS for one in got)
    want = [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").read_text().splitlines()]
    lines = (GOLDEN / f"{name}.log").read_text().splitlines()
    for one in got:
        assert one.pop("raw") in lines
        if name == "serving-fault":
            assert isinstance(one.pop("time"), float)  # syslog lines carry no year
            one["time"] = None
    assert got == want


@pytest.mark.parametrize("name", sorted(EXIT))
def test_a_whole_log_for_people(name: str) -> None:
    done = run("--kernel-log", str(GOLDEN / f"{name}.log"), "--once")
    assert done.returncode == EXIT[name]
    summary = "".join(line for line in done.stdout.splitlines(keepends=True) if "Mar 10 02" not in line)
    if name == "serving-fault":
        summary = "".join(summary.splitlines(keepends=True)[-3:])  # what comes before has the year of today
    assert summary == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", r"w\xe9\u2603 (pid 9)"), ("utf-8", "w\xe9\u2603 (pid 9)")])
def test_text_that_the_terminal_cannot_show_is_escaped(tmp_path: Path, encoding: str, shown: str) -> None:
    log = tmp_path / "kern.log"
    log.write_text("[ 100.000001] NVRM: Xid (PCI:0000:65:00): 31, pid=9, name=w\xe9\u2603, Ch 00000001\n", "utf-8")
    done = run("--kernel-log", str(log), "--once", PYTHONIOENCODING=encoding)
    assert done.returncode == 1, done.stderr
    assert shown in done.stdout
    assert "1 incident" in done.stdout


def test_following_prints_as_lines_come_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("NVRM: Xid (PCI:0000:65:00): 79, of before\n")
    argv = [sys.executable, "-c", APP, "--kernel-log", str(log), "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert "live" in child.stderr.readline()
        with log.open("a") as file:
            file.write("NVRM: Xid (PCI:0000:65:00): 31, Ch 00000001\n")
        line = child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.stdout.read() == ""
        assert child.wait(20) == 1
    assert json.loads(line)["xid"] == 31
    assert abs(json.loads(line)["time"] - time.time()) < 60


def test_a_log_that_cannot_be_read_is_no_clean_log(tmp_path: Path) -> None:
    with pytest.raises(WatcherError, match="does not exist") as error:
        watch(kernel_log=str(tmp_path / "missing.log"), once=True)
    assert error.value.exit_code == 2


def test_none_says_that_it_was_switched_off() -> None:
    with pytest.raises(WatcherError, match="switched off"):
        KernelLogWatcher("none", FakeClock()).open()


@pytest.mark.parametrize(
    ("given", "meant"), [("kmgs", "kmsg"), ("Journal", "journal"), ("dmsg", "dmesg"), ("atuo", "auto")]
)
def test_a_misspelt_source_is_refused_with_the_one_meant(given: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        KernelLogWatcher(given, FakeClock())


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to give root up")
def test_without_privilege_every_source_is_named_with_its_reason_and_the_remedy() -> None:
    restrict = Path("/proc/sys/kernel/dmesg_restrict")
    if not restrict.exists() or restrict.read_text().strip() != "1":
        pytest.skip("kernel.dmesg_restrict is not 1: everybody may read the kernel log here")
    # The modules are loaded as root and the watcher opened as nobody, who need not be able to read the checkout.
    code = (
        "import os, soakrig.soak.watch.kernel_log as k\nfrom soakrig.clock import RealClock\n"
        "from soakrig.errors import WatcherError\n"
        "w = k.KernelLogWatcher('auto', RealClock())\nos.setgroups([])\nos.setresgid(65534, 65534, 65534)\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "try:\n    print(w.open())\nexcept WatcherError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for part in ("/dev/kmsg: Operation not permitted (EPERM)", "journalctl", "dmesg: ", "CAP_SYSLOG",
                 "kernel.dmesg_restrict", "--cap-add SYSLOG --device /dev/kmsg:/dev/kmsg:r"):  # fmt: skip
        assert part in done.stdout


def test_auto_goes_on_to_the_next_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stub journalctl, first on PATH, and a /dev/kmsg that is not there."""
    stub = tmp_path / "journalctl"
    stub.write_text(
        """#!/bin/sh\ncase "$*" in *"-n 1"*) echo '{"_TRANSPORT":"kernel","MESSAGE":"x"}';; *) exec sleep 60;; esac\n"""
    )
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    watcher = KernelLogWatcher("auto", FakeClock())
    watcher._candidates[0].path = tmp_path / "no-kmsg"  # type: ignore[attr-defined]
    state = watcher.open()
    assert (state.state, watcher.reader_name) == ("live", "journal")
    assert "No such file or directory (ENOENT)" in state.detail
    threading.Event().wait(0)
    watcher.close()
