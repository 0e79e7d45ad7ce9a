"""What a redactor knows things by: their kinds, placeholders, and where names of hosts and users stand as names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from soakrig.record import personal_patterns as personal

Kind = Literal["secret", "mail", "uuid", "mac", "ip", "serial", "path", "host", "user", "encoded"]
KINDS: dict[Kind, str] = {
    "secret": "keys, tokens, passwords, random-looking strings",
    "mail": "mail addresses",
    "uuid": "UUIDs (GPUs, boots)",
    "mac": "hardware addresses of network cards",
    "ip": "IP addresses, loopback left alone",
    "serial": "serial numbers",
    "path": "home and other absolute paths",
    "host": "host names and domains",
    "user": "user names",
    "encoded": "base64, hex or escapes with one of these inside",
}
"""What is redacted, in words."""
PLACEHOLDER = re.compile(rf"(?:{'|'.join(KINDS)})-\d+")
NAMES: tuple[tuple[Kind, str, re.Pattern[str]], ...] = (
    ("host", "host", personal.URL_HOST),
    ("host", "host", personal.HOST_NAMED),
    ("host", "host", personal.SYSLOG_HOST),
    ("host", "host", personal.LOGIN_AT),
    ("host", "domain", personal.MAIL),
    ("user", "user", personal.LOGIN_AT),
    ("user", "user", personal.HOME_USER),
    ("user", "user", personal.USER_NAMED),
    ("user", "uid", personal.USER_NAMED),
    ("user", "session", personal.USER_NAMED),
)
"""Whose name it is, the group of the pattern that has it, and where it stands as one."""


class Known(NamedTuple):
    """A value that must not be told. ``where``: how it is known, in words."""

    kind: Kind
    value: str
    where: str


def bounded(names: Iterable[str]) -> re.Pattern[str] | None:
    """Finds each of ``names`` where it is a word of its own, in either case; None without any. Underscores part words,
    but for names of up to four letters."""
    made = "|".join(
        rf"(?<![A-Za-z0-9{'_' if len(one) < 5 else ''}]){re.escape(one)}(?![A-Za-z0-9{'_' if len(one) < 5 else ''}])"
        for one in names
    )
    return re.compile(made, re.IGNORECASE) if made else None


def field_kind(name: str) -> Kind | None:
    """What the name of a field says of its value."""
    words = set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
    if "serial" in words:
        return "serial"
    if words & {"uuid", "guid"} or {"machine", "id"} <= words or {"boot", "id"} <= words:
        return "uuid"
    if words & {"hostname", "nodename", "fqdn"}:
        return "host"
    return "user" if words & {"username", "user", "login"} and len(words) == 1 else None


def worth(kind: Kind, value: str) -> bool:
    """Whether a value under a telling name tells anything."""
    if kind == "host":
        return not personal.is_public_host(value) and not value[:1].isdigit()
    return len(value) > 1 and value.lower() not in (
        "root",
        "user",
        "none",
        "null",
        "unknown",
        "nobody",
        "true",
        "false",
    )
