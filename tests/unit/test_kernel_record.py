"""Records of the kernel log: fields, escapes, times."""

from __future__ import annotations

import json
import time

import pytest

from soakrig.soak.watch.kernel_record import parse_journal, parse_kmsg, parse_record, parse_text


def test_kmsg_record_carries_its_header_and_device_lines() -> None:
    record = parse_kmsg(
        "12,337,5140900,c,caller=T1;two\\x0alines \\xc3\\xa9 \\x5c\n SUBSYSTEM=pci\n DEVICE=+pci:0000:01:00.0\n"
    )
    assert record is not None
    assert (record.facility, record.level, record.seq, record.kernel_us) == (1, 4, 337, 5140900)
    assert record.text == "two\nlines é \\"
    assert record.fields == {"SUBSYSTEM": "pci", "DEVICE": "+pci:0000:01:00.0"}
    assert not record.from_kernel


def test_kmsg_bytes_that_are_no_utf8_are_replaced() -> None:
    record = parse_kmsg("4,1,1,-;a\\xffb")
    assert record is not None
    assert record.text == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize("text", ["4,1;x", "4,1,1,-", "four,1,1,-;x", "", "4,1,1,-\n;x"])
def test_what_is_no_kmsg_record_is_none(text: str) -> None:
    assert parse_kmsg(text) is None


def test_journal_entry_gives_the_kernels_time_not_the_reception() -> None:
    entry = {
        "_TRANSPORT": "kernel", "SYSLOG_FACILITY": "0", "PRIORITY": "4", "MESSAGE": "hello", "_BOOT_ID": "b1",
        "_SOURCE_BOOTTIME_TIMESTAMP": "6000001", "__MONOTONIC_TIMESTAMP": "7000000",
        "__REALTIME_TIMESTAMP": "1790000000000000",
    }  # fmt: skip
    record = parse_journal(json.dumps(entry))
    assert record is not None
    assert (record.kernel_us, record.wall, record.boot_id) == (6000001, 1790000000.0, "b1")
    assert record.from_kernel


def test_journal_without_facility_is_the_kernels_only_under_its_own_name() -> None:
    own = parse_journal('{"_TRANSPORT":"kernel","MESSAGE":"x"}')
    other = parse_journal('{"_TRANSPORT":"kernel","SYSLOG_IDENTIFIER":"demo","MESSAGE":"x"}')
    assert own is not None
    assert other is not None
    assert own.facility == 0
    assert (other.facility, other.text) == (1, "demo: x")


def test_a_programs_identifier_ends_the_stripping() -> None:
    record = parse_text("Mar 10 04:05:06 box app[7]: kernel: [  1.000000] NVRM: x")
    assert (record.identifier, record.text) == ("app", "kernel: [  1.000000] NVRM: x")
    assert not record.from_kernel


@pytest.mark.parametrize(
    ("line", "epoch"),
    [
        ("2026-03-10T04:05:06.250000+01:00 box kernel: x", 1773111906.25),
        ("2026-03-10T03:05:06Z box kernel: x", 1773111906.0),
        ("kern  :info  : 2026-03-10T04:05:06,250000+01:00 x", 1773111906.25),
        ("[Tue Mar 10 04:05:06 2026] x", time.mktime((2026, 3, 10, 4, 5, 6, 0, 0, -1))),
        ("[二 3月 10 04:05:06 2026] x", None),
        ("[  12.5] x", None),
    ],
)
def test_wall_time_is_read_where_the_prefix_has_one(line: str, epoch: float | None) -> None:
    record = parse_text(line)
    assert record.text == "x"
    assert record.wall == epoch


def test_syslog_time_takes_the_newest_year_that_is_not_ahead() -> None:
    soon = time.localtime(time.time() + 3 * 86_400)
    record = parse_text(time.strftime("%b %d %H:%M:%S", soon) + " box kernel: x")
    assert record.wall is not None
    assert record.wall < time.time()


def test_seconds_prefix_is_microseconds_of_the_kernels_clock() -> None:
    assert parse_text("[  671.000004] x").kernel_us == 671_000_004
    assert parse_text("[  +0.000049] x").kernel_us is None


@pytest.mark.parametrize("line", ["[drm:foo] x", "[  2665]     0  2665", "<999999>x", "plain"])
def test_brackets_that_are_no_prefix_stay(line: str) -> None:
    assert parse_record(line).text == line
