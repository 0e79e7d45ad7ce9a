"""One record of the kernel log: its message without prefixes, and what the prefixes said.

Three shapes are read: the record format of /dev/kmsg (Documentation/ABI/testing/dev-kmsg), the JSON lines of
``journalctl -o json`` (systemd.journal-fields), and text lines as dmesg, syslog daemons and consoles write them.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

import orjson


@dataclass(slots=True)
class KernelRecord:
    """What one record says and where it came from; what a shape does not carry is None.

    ``text`` is the message, several lines joined by newlines where the kernel printed them as one. ``facility`` 0
    proves the kernel's own word, any other number that a program wrote the record. ``kernel_us`` is the kernel's clock
    in microseconds, ``wall`` seconds since the epoch as printed. ``identifier`` is the syslog identifier: other than
    None or "kernel" it names the program whose log line this is. ``indented``: a text line that begins with blanks,
    so a continuation or a quotation.
    """

    text: str
    raw: str
    facility: int | None = None
    level: int | None = None
    seq: int | None = None
    kernel_us: int | None = None
    wall: float | None = None
    identifier: str | None = None
    boot_id: str | None = None
    indented: bool = False
    fields: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def from_kernel(self) -> bool:
        """False where the record proves that a program wrote it or that it is a program's own log line."""
        return self.facility in (None, 0) and self.identifier in (None, "kernel")


FACILITIES = (
    "kern", "user", "mail", "daemon", "auth", "syslog", "lpr", "news", "uucp", "cron", "authpriv", "ftp",
)  # fmt: skip
_LEVELS = {
    name: number
    for number, names in enumerate(
        ("emerg emergency", "alert", "crit critical", "err error", "warn warning", "notice", "info", "debug")
    )
    for name in names.split()
}
_MONTH_NAMES = "jan feb mar apr may jun jul aug sep oct nov dec"
_MONTHS = {m: n for n, m in enumerate(_MONTH_NAMES.split(), 1)}

_KMSG = re.compile(r"([0-9]{1,6}),([0-9]{1,20}),([0-9]{1,20}),([^;\n]*);(.*)", re.DOTALL)
_ESCAPED = re.compile(rb"\\x([0-9a-fA-F]{2})")
_ANSI = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")

_FACILITY = "kern|user|mail|daemon|auth|syslog|lpr|news|uucp|cron|authpriv|ftp|local[0-7]"
_DECODED = re.compile(rf"({_FACILITY})\s*:\s?([a-z]+)\s*:\s")
_ANGLE = re.compile(r"<([0-9]{1,3})>")
_RFC5424 = re.compile(r"1 (\S+) \S+ (\S+) \S+ \S+ (?:-|\[[^\]]*\]) ")
_ISO = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2})(?:([.,])([0-9]{1,9}))?"
    r"(Z|[+-][0-9]{2}:?[0-9]{2})?\s"
)
_SYSLOG = re.compile(r"(\w{1,12}\.?)\s+([0-9]{1,2})\s+([0-9]{2}):([0-9]{2}):([0-9]{2})(\.[0-9]+)?\s")
_SECONDS = re.compile(r"\[\s*([0-9]{1,12})\.([0-9]{1,9})\]\s?")
_CUT_SECONDS = re.compile(r"\s*([0-9]{1,12})\.([0-9]{6})\]\s")
_DELTA = re.compile(r"\[\s*[+-][0-9]+\.[0-9]+\]\s?")
_CTIME = re.compile(r"\[([^\[\]]{0,40}?[0-9]{1,2}:[0-9]{2}:[0-9]{2}[^\[\]]{0,20})\]:?\s")
_CALLER = re.compile(r"\[\s*[TC][0-9]+\]\s")
_TALOS = re.compile(rf"\S+: ({_FACILITY}): ([a-z]+): \[([^\[\]]+)\]:\s")
_KERNEL = re.compile(r"kernel(?:\[[0-9]+\])?:\s")
_HEADER = re.compile(r"(?:(?P<host>\S*[^\s:])\s+)(?:[a-z0-9]+\.[a-z]+\s+)?(?P<ident>[^\s:\[\]]+)(?:\[[0-9]+\])?:\s")
_CTIME_PARTS = re.compile(r"\w+\s+(\w{3})\s+([0-9]{1,2})\s+([0-9]{2}):([0-9]{2}):([0-9]{2})\s+([0-9]{4})$")
_FIELD = re.compile(r" ([A-Z0-9_]+)=(.*)")


def parse_record(raw: str) -> KernelRecord:
    """Read a record of any of the three shapes; never raises, text that fits none is its own message."""
    if raw[:1].isdigit():
        record = parse_kmsg(raw)
        if record is not None:
            return record
    elif raw[:1] == "{":
        record = parse_journal(raw)
        if record is not None:
            return record
    return parse_text(raw)


def parse_kmsg(raw: str) -> KernelRecord | None:
    """A record of /dev/kmsg: ``prio,seq,usec,flags[,more];text`` and `` KEY=value`` lines; None if it is none."""
    first, _, more = raw.rstrip("\r\n").partition("\n")
    match = _KMSG.fullmatch(first)
    if match is None:
        return None
    prio, text = int(match[1]), match[5]
    if "\\x" in text:
        plain = _ESCAPED.sub(lambda m: bytes([int(m[1], 16)]), text.encode("utf-8", "surrogateescape"))
        text = plain.decode("utf-8", "replace")
    return KernelRecord(
        text=_tidy(text),
        raw=raw.rstrip("\n"),
        facility=prio >> 3,
        level=prio & 7,
        seq=int(match[2]),
        kernel_us=int(match[3]),
        fields={m[1]: m[2] for line in more.split("\n") if (m := _FIELD.match(line))} if more else {},
    )


def parse_journal(raw: str) -> KernelRecord | None:
    """A line of ``journalctl -o json``; None if it is not JSON or carries no MESSAGE."""
    try:
        entry = orjson.loads(raw)
    except (orjson.JSONDecodeError, UnicodeError):
        return None
    if not isinstance(entry, dict) or "MESSAGE" not in entry:
        return None
    fields = cast("dict[str, Any]", entry)
    text = _message(fields["MESSAGE"])
    identifier = _string(fields.get("SYSLOG_IDENTIFIER"))
    transport = _string(fields.get("_TRANSPORT"))
    facility = _number(fields.get("SYSLOG_FACILITY"))
    if transport == "kernel":
        # journald leaves the facility out for the kernel's own records, or did so in older versions; from what a
        # program wrote to /dev/kmsg it splits a leading "WORD: " off as the identifier.
        if facility is None and identifier in (None, "kernel"):
            facility = 0
        elif facility != 0 and identifier not in (None, "kernel"):
            text = f"{identifier}: {text}"
            facility = facility or 1
        identifier = "kernel"
    elif transport is not None or identifier is not None:
        identifier = identifier or transport
    source_us = _number(fields.get("_SOURCE_MONOTONIC_TIMESTAMP"))
    if source_us is None:
        source_us = _number(fields.get("_SOURCE_BOOTTIME_TIMESTAMP"))
    wall = _number(fields.get("__REALTIME_TIMESTAMP"))
    return KernelRecord(
        text=_tidy(text),
        raw=raw.rstrip("\n"),
        facility=facility,
        level=_number(fields.get("PRIORITY")),
        kernel_us=source_us,
        wall=None if wall is None else wall / 1e6,
        identifier=identifier,
        boot_id=_string(fields.get("_BOOT_ID")),
        fields={"_TRANSPORT": transport} if transport else {},
    )


def parse_text(raw: str) -> KernelRecord:
    """A text line: prefixes of dmesg, syslog, RFC 3339 and RFC 5424, Talos and consoles are taken off, in any order.

    Stripping ends at a program's own identifier: what follows is that program's text.
    """
    text = _tidy(raw)
    record = KernelRecord(text="", raw=raw.rstrip("\n"), indented=text[:1] in (" ", "\t"))
    while True:
        rest = _strip_one(text, record)
        if rest is None:
            break
        text = rest
        if record.identifier not in (None, "kernel"):
            break
    if record.indented and (record.kernel_us is not None or record.wall is not None):
        record.indented = False
    record.text = text.replace("#012", "\n") if "#012NVRM" in text else text
    return record


def _strip_one(text: str, record: KernelRecord) -> str | None:
    """``text`` without its first prefix, which is noted in ``record``; None where there is none."""
    match text[:1]:
        case "[":
            if m := _SECONDS.match(text):
                record.kernel_us = int(m[1]) * 1_000_000 + int(m[2].ljust(6, "0")[:6])
            elif m := _DELTA.match(text) or _CALLER.match(text):
                pass
            elif m := _CTIME.match(text):
                record.wall = _from_ctime(m[1])
            else:
                return None
            return text[m.end() :]
        case "<":
            if m := _ANGLE.match(text):
                prio = int(m[1])
                record.level = prio & 7
                # dmesg -r prints the facility of a program's record wrongly as 0 (util-linux 2.38), so 0 proves nothing
                record.facility = prio >> 3 or None
                text = text[m.end() :]
                if m := _RFC5424.match(text):
                    return _rfc5424(m, text, record)
                return text
            return None
        case _:
            pass
    if m := _DECODED.match(text):
        if m[2] not in _LEVELS:
            return None
        record.level = _LEVELS[m[2]]
        record.facility = _facility(m[1])
        return text[m.end() :]
    if m := _ISO.match(text):
        record.wall = _from_iso(m)
        return text[m.end() :] if m[2] == "," else _header(text[m.end() :], record)
    if m := _SYSLOG.match(text):
        record.wall = _from_syslog(m)
        return _header(text[m.end() :], record)
    if m := _RFC5424.match(text):
        return _rfc5424(m, text, record)
    if m := _TALOS.match(text):
        record.facility = _facility(m[1])
        record.level = _LEVELS.get(m[2])
        return text[m.end() :]
    if m := _KERNEL.match(text):
        record.identifier = "kernel"
        return text[m.end() :]
    if m := _CUT_SECONDS.match(text):
        record.kernel_us = int(m[1]) * 1_000_000 + int(m[2])
        return text[m.end() :]
    return None


def _header(text: str, record: KernelRecord) -> str:
    """Take "host identifier[pid]: " off, as a syslog daemon writes it after the time."""
    if _KERNEL.match(text):
        return text
    m = _HEADER.match(text)
    if m is None:
        return text
    if m["ident"] == "NVRM":
        # journald splits "NVRM:" off as the identifier of what a program wrote to /dev/kmsg; logger -t does it too
        record.facility = record.facility or 1
        return text[m.start("ident") :]
    record.identifier = m["ident"]
    return text[m.end() :]


def _rfc5424(match: re.Match[str], text: str, record: KernelRecord) -> str:
    record.identifier = match[2]
    if m := _ISO.match(match[1] + " "):
        record.wall = _from_iso(m)
    return text[match.end() :]


def _tidy(text: str) -> str:
    return (_ANSI.sub("", text) if "\x1b" in text else text).rstrip()


def _facility(name: str) -> int:
    return 16 + int(name[5:]) if name.startswith("local") else FACILITIES.index(name)


def _message(value: object) -> str:
    """MESSAGE is text, an array of byte values where it is no UTF-8, or null where it is too large."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        numbers = [v for v in cast("list[object]", value) if isinstance(v, int) and 0 <= v <= 255]
        return bytes(numbers).decode("utf-8", "replace")
    return ""


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _from_iso(match: re.Match[str]) -> float | None:
    fraction = (match[3] or "")[:6].ljust(6, "0")
    zone = (match[4] or "").replace("Z", "+00:00")
    try:
        return datetime.fromisoformat(f"{match[1]}.{fraction}{zone}").timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _from_ctime(text: str) -> float | None:
    match = _CTIME_PARTS.match(text)
    if match is None or match[1].lower() not in _MONTHS:
        return None
    return _local(int(match[6]), _MONTHS[match[1].lower()], *(int(match[i]) for i in range(2, 6)))


def _from_syslog(match: re.Match[str]) -> float | None:
    """RFC 3164 carries no year: the newest one that does not put the line more than a day into the future."""
    month = _MONTHS.get(match[1].rstrip(".").lower()[:3])
    if month is None:
        return None
    now = time.time()
    year = time.localtime(now).tm_year
    for candidate in (year, year - 1):
        when = _local(candidate, month, *(int(match[i]) for i in range(2, 6)))
        if when is not None and when <= now + 86_400:
            return when + float(match[6] or 0)
    return None


def _local(year: int, month: int, day: int, hour: int, minute: int, second: int) -> float | None:
    try:
        return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))
    except (ValueError, OverflowError):
        return None
