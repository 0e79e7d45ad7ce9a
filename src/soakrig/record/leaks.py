"""The last look at files that are to leave the house: does a secret survive in any of them, in any reading?

It shares the patterns of the redactor and nothing else: it reads bytes, as they would be written.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from soakrig.record import personal_patterns as personal
from soakrig.record.encodings import readings
from soakrig.record.private_things import PLACEHOLDER, Kind, Known, bounded
from soakrig.record.redaction import HIDDEN, is_secret
from soakrig.record.secret_patterns import FORMS, HEADER, LOGIN, forms, hides

SHORTEST = 6
"""Characters of a variable's value that make it worth looking for; a shorter one would be found everywhere."""
_MACHINE_ID = ("/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/sys/class/dmi/id/product_uuid")
_PLAIN = re.compile(r"[\d.,]+|true|false|none|null|yes|no|default", re.IGNORECASE)
_HOME = re.compile(r"(?:/home|/Users)/[A-Za-z_][\w.-]*")


class Leak(NamedTuple):
    """What survives, and where. The value itself is not in it."""

    file: str
    line: int
    what: str


def known_values(environ: Mapping[str, str], settings: Any) -> list[Known]:
    """What must not be told whatever it looks like: values of ``environ`` and of a manifest's ``settings`` whose names
    say that they are secrets, and the names of this host and its user."""
    found: list[Known] = []
    for name, value in environ.items():
        if len(value) >= SHORTEST and is_secret(name) and not _PLAIN.fullmatch(value):
            found.append(Known("secret", value, f"the value of {name}"))
    found += [Known("secret", value, f"the value of {name}") for name, value in _hidden(settings)]
    host = platform.node()
    found.append(Known("host", host, "this host's name"))
    for name in ("USER", "LOGNAME", "SUDO_USER"):
        if environ.get(name, "root") != "root":
            found.append(Known("user", environ[name], "this user's name"))
    home = environ.get("HOME", "/")
    if home.count("/") > 1:
        found.append(Known("path", home.rstrip("/"), "this user's home"))
    for path in _MACHINE_ID:
        try:
            value = Path(path).read_text("utf-8").strip()
        except OSError:
            continue
        if len(value) >= SHORTEST:
            found.append(Known("uuid", value, "an id of this host"))
    return list(dict.fromkeys(found))


class LeakCheck:
    """``known``: values that must not be there; ``learned``: those that a redactor replaced, by kind. Names of hosts
    and users are looked for as words, everything else as it stands. ``ours``: strings of the tool's own that look
    random (a page's digest)."""

    def __init__(self, known: Iterable[Known], learned: Iterable[tuple[Kind, str]], ours: Iterable[str] = ()) -> None:
        every = [*known, *(Known(kind, value, f"a redacted {kind}") for kind, value in learned)]
        self._names = {one.value.lower(): one for one in every if one.kind in ("host", "user")}
        self._words = bounded(sorted(self._names, key=len, reverse=True))
        rest = {one.value.lower(): one for one in reversed(every) if one.kind not in ("host", "user")}
        self._values = {value: one for value, one in rest.items() if len(value) > 2}
        self._ours = frozenset(ours)

    def file(self, name: str, data: bytes) -> list[Leak]:
        """What survives in a file's bytes, and in its name."""
        found = [Leak(name, 0, f"{what} in its name") for what in self._survivors(name)]
        text = data.decode("utf-8", "surrogateescape")
        for number, line in enumerate(text.split("\n"), 1):
            found += [Leak(name, number, what) for what in self._survivors(line)]
        whole = re.sub(r"\\?\r?\n", "", text) if "PRIVATE KEY" not in text else text
        found += [Leak(name, 0, f"{what} over several lines") for what in self._known(whole) if not found]
        return found

    def _survivors(self, text: str) -> list[str]:
        found: dict[str, None] = {}
        for number, reading in enumerate(readings(text)):
            seen = [*self._known(reading), *self._formed(reading, plain=number == 0)]
            found |= dict.fromkeys(what if number == 0 else f"{what}, encoded" for what in seen)
        return list(found)

    def _known(self, text: str) -> list[str]:
        folded = text.lower()
        found = [
            one.where for value, one in self._values.items() if value in folded and self._stands(value, one, folded)
        ]
        if self._words is not None:
            found += [self._names[match[0].lower()].where for match in self._words.finditer(text)]
        return found

    def _stands(self, value: str, one: Known, text: str) -> bool:
        """A secret counts within other text too; a path or a number by itself: no ``/data`` in ``/metrics/data``."""
        if one.kind in ("secret", "encoded"):
            return True
        return re.search(rf"(?<![\w/.<~-]){re.escape(value)}(?![\w-])", text) is not None

    def _formed(self, text: str, *, plain: bool) -> list[str]:
        """What has the form of a secret; looking random counts in the plain text only."""
        found = [
            one.what
            for one in forms(text)
            if (plain or one.what in _FORM_NAMES) and not self._excused(text[one.start : one.end])
        ]
        found += ["a mail address" for match in personal.MAIL.finditer(text) if not self._excused(match[0])]
        found += ["a UUID" for match in personal.UUID.finditer(text) if not self._excused(match[0])]
        found += ["a home folder" for match in _HOME.finditer(text) if not self._excused(match[0])]
        found += ["an IP address" for match in personal.IPV4.finditer(text) if plain and _tells(match)]
        for pattern in (HEADER, LOGIN):
            found += [
                "a credential"
                for match in pattern.finditer(text)
                if not PLACEHOLDER.fullmatch(match["value"]) and hides("credential", match["value"]) and plain
            ]
        return found

    def _excused(self, text: str) -> bool:
        return any(one in text for one in self._ours) or PLACEHOLDER.search(text) is not None


_FORM_NAMES = frozenset(what for what, _ in FORMS)


def _tells(match: re.Match[str]) -> bool:
    before = match.string[max(0, match.start() - 16) : match.start()]
    return personal.is_address(match[0]) and not personal.VERSION_BEFORE.search(before)


def _hidden(data: Any, name: str = "") -> Iterable[tuple[str, str]]:
    """Values of nested settings under names of secrets, that were not hidden when they were recorded."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _hidden(value, str(key))
    elif isinstance(data, list):
        for one in data:
            yield from _hidden(one, name)
    elif isinstance(data, str):
        flag, equals, value = data.partition("=") if data.startswith("-") else (name, "=", data)
        if equals and len(value) >= SHORTEST and value != HIDDEN and hides(flag, value):
            yield flag, value
