"""journalctl and dmesg as child processes: the real dmesg where it may be read, else scripts in their place."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from soakrig.errors import WatcherError
from soakrig.soak.watch.dmesg import DmesgReader
from soakrig.soak.watch.followed_command import FollowedCommand
from soakrig.soak.watch.journal import JournalReader
from soakrig.soak.watch.kernel_reader import KernelReader
from soakrig.soak.watch.kernel_record import KernelRecord

XID = "NVRM: Xid (PCI:0000:65:00): 31, Ch 00000001"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def collect(reader: KernelReader, enough: Callable[[list[KernelRecord]], bool]) -> list[KernelRecord]:
    """Read until ``enough``, at most 10 s."""
    found: list[KernelRecord] = []
    deadline = time.monotonic() + 10
    while not enough(found) and time.monotonic() < deadline:
        found += reader.read().records
        threading.Event().wait(0.01)
    assert enough(found), [r.raw for r in found]
    return found


def journal_stub(tmp_path: Path, kernel: str, driver: str = "exec sleep 60") -> str:
    """Stands in for journalctl, of which there is no journal here: answers the probe, then plays two streams."""
    return script(
        tmp_path / "journalctl",
        f"""case "$*" in
*"-n 1"*) echo '{{"_TRANSPORT":"kernel","MESSAGE":"probe"}}';;
*_TRANSPORT=driver*) {driver};;
*"-k -f -n 0"*) {kernel};;
*) echo "unexpected: $*" >&2; exit 9;;
esac""",
    )


def test_journal_records_and_the_notice_of_lost_ones_are_read(tmp_path: Path) -> None:
    line = '{"_TRANSPORT":"kernel","SYSLOG_FACILITY":"%d","MESSAGE":"' + XID + '"}'
    notice = """echo '{"_TRANSPORT":"driver","MESSAGE":"Missed 7 kernel messages"}'; exec sleep 60"""
    reader = JournalReader(journal_stub(tmp_path, f"echo '{line % 0}'; echo '{line % 1}'; exec sleep 60", notice))
    reader.open()
    records = collect(reader, lambda found: len(found) == 3)
    reader.close()
    assert sorted(r.facility for r in records if r.facility is not None) == [0, 1]
    assert reader.lost == 7
    assert reader.doubt == ""


def test_a_journal_is_read_once_to_its_end(tmp_path: Path) -> None:
    line = '{"_TRANSPORT":"kernel","MESSAGE":"' + XID + '"}'
    notice = '{"_TRANSPORT":"driver","MESSAGE":"Missed 2 kernel messages"}'
    command = script(
        tmp_path / "journalctl",
        f"""case "$*" in
*" -f "*) exit 9;;
*_TRANSPORT=driver*) echo '{notice}';;
*) echo '{line}'; echo '{line}';;
esac""",
    )
    reader = JournalReader(command)
    reader.open(once=True)
    records: list[KernelRecord] = []
    deadline = time.monotonic() + 10
    at_end = False
    while not at_end and time.monotonic() < deadline:
        batch = reader.read()
        records, at_end = records + batch.records, batch.at_end
    reader.close()
    assert at_end
    assert [r.text for r in records if r.text == XID] == [XID, XID]


def test_a_journal_whose_notices_cannot_be_followed_is_in_doubt(tmp_path: Path) -> None:
    reader = JournalReader(journal_stub(tmp_path, "exec sleep 60", "echo no such match >&2; exit 4"))
    reader.open()
    deadline = time.monotonic() + 10
    while not reader.doubt and time.monotonic() < deadline:
        reader.read()
    reader.close()
    assert "status 4: no such match" in reader.doubt


def test_a_journalctl_that_ends_ends_the_watch_with_its_words(tmp_path: Path) -> None:
    reader = JournalReader(journal_stub(tmp_path, "echo broken pipe to journald >&2; exit 3"))
    reader.open()
    with pytest.raises(WatcherError, match="status 3: broken pipe to journald"):
        collect(reader, lambda found: False)
    reader.close()


def test_a_journalctl_without_a_journal_is_refused(tmp_path: Path) -> None:
    empty = script(tmp_path / "journalctl", "echo 'No journal files were found.' >&2; exit 0")
    for command in (empty, str(tmp_path / "missing")):
        with pytest.raises(WatcherError) as error:
            JournalReader(command).open()
        assert "systemd-journal" in error.value.remedy


def dmesg_refusal() -> str:
    try:
        done = subprocess.run(["dmesg", "-x"], capture_output=True, timeout=10, check=False)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.decode().strip() or f"status {done.returncode}"


@pytest.mark.skipif(bool(dmesg_refusal()), reason=f"dmesg: {dmesg_refusal()}")
def test_the_real_dmesg_is_read_once_and_followed() -> None:
    once = DmesgReader()
    once.open(once=True)
    deadline = time.monotonic() + 10
    records: list[KernelRecord] = []
    while time.monotonic() < deadline:
        batch = once.read()
        records += batch.records
        if batch.at_end:
            break
    else:
        pytest.fail("dmesg did not come to its end")
    once.close()
    assert all(r.facility is not None for r in records if not r.indented)
    follow = DmesgReader()
    follow.open()
    assert follow.read().at_end
    assert "does not tell" in follow.doubt
    follow.close()


def test_an_older_dmesg_that_prints_the_buffer_first_is_skipped_to_the_new(tmp_path: Path) -> None:
    old = f"echo 'kern  :warn  : [    1.000001] {XID}'; echo '                        second line'"
    new = f"echo 'kern  :warn  : [    2.000001] {XID}'; echo 'user  :warn  : [    3.000001] {XID}'"
    command = script(
        tmp_path / "dmesg",
        f"""case "$*" in
--help) echo "-w wait for new messages";;
-x) {old};;
"-w -x") {old}; {new}; exec sleep 60;;
*) exit 9;;
esac""",
    )
    reader = DmesgReader(command)
    reader.open()
    records = collect(reader, lambda found: len(found) >= 2)
    reader.close()
    assert [(r.kernel_us, r.facility) for r in records] == [(2_000_001, 0), (3_000_001, 1)]


def test_closing_ends_the_whole_group_even_a_deaf_one(tmp_path: Path) -> None:
    child = FollowedCommand([script(tmp_path / "deaf", "trap '' TERM; echo up; sleep 60 & wait; wait")])
    deadline = time.monotonic() + 10
    while child.lines(10)[0] != [b"up"] and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    group = [p.pid for p in psutil.process_iter() if _group(p.pid) == child.pid]
    assert child.pid in group
    child.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(_alive(pid) for pid in group):
        threading.Event().wait(0.01)
    assert [pid for pid in group if _alive(pid)] == []


def test_the_child_ends_with_its_killed_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom soakrig.soak.watch.followed_command import FollowedCommand\n"
        "child = FollowedCommand(['sleep', '60'])\nprint(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        deadline = time.monotonic() + 5
        while psutil.Process(pid).name() != "sleep" and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        parent.kill()
    deadline = time.monotonic() + 5
    while _alive(pid) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert not _alive(pid)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
