"""Takes secrets and people out of texts and plain data. The same thing gets the same placeholder everywhere.

First it learns: names of hosts and users stand bare in places where nothing tells that they are names, so every text
is shown to ``learn`` before any goes through ``text``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from typing import Any

import orjson

from soakrig.record import personal_patterns as personal
from soakrig.record.encodings import BASE64, ESCAPED, HEX, PERCENT, readings, unescaped, unwrapped
from soakrig.record.private_things import NAMES, PLACEHOLDER, Kind, Known, bounded, field_kind, worth
from soakrig.record.secret_patterns import FLAG, HEADER, LOGIN, NAMED, forms, hides

_LITERALS = frozenset(
    {"kind", "outcome", "severity", "state", "counted", "reason", "verdict", "schema", "schema_", "attribution", "unit",
     "ended", "source", "name", "role", "type", "finish_reason", "reproducer", "launched", "conclusion_kind"}
)  # fmt: skip
"""Fields whose values a schema names: there, common words stay."""
_LONGEST_LEARNED = 60
_LEAST = 8
"""Characters of a secret or a serial that is replaced wherever it stands."""


class Redactor:
    """``common``: words that stay even where somebody's name is one of them, since text of ours is made of them; such
    a name is replaced where it stands as a name only, and is in ``ambiguous``."""

    def __init__(self, known: Iterable[Known] = (), common: Iterable[str] = ()) -> None:
        self.common = frozenset(word.lower() for word in common)
        self.counts: Counter[Kind] = Counter()
        self.ambiguous: dict[tuple[Kind, str], None] = {}
        self.values: dict[tuple[Kind, str], str] = {}
        self.known = list(known)
        self._literal: dict[str, Kind] = {}
        self._text = lru_cache(1 << 12)(self._redacted)
        for one in self.known:
            if one.kind in ("host", "user"):
                self._learn(one.kind, one.value)
            else:
                self._note(one.kind, one.value, least=0)

    # -- learning ------------------------------------------------------------------------------------------------

    def learn(self, text: str) -> None:
        """Note the hosts, users, serials and named secrets in ``text``, wrapped ones too: they are replaced wherever
        they stand."""
        for reading in readings(text):
            self._learn_plain(reading)

    def _learn_plain(self, text: str) -> None:
        for kind, group, pattern in NAMES:
            for match in pattern.finditer(text):
                if match[group]:
                    self._learn(kind, match[group].rstrip("."))
        for pattern in (FLAG, NAMED):
            for match in pattern.finditer(text):
                if hides(match["name"], match["value"]):
                    self._note("secret", match["value"])
        for match in HEADER.finditer(text):
            self._note("secret", match["value"])
        for match in LOGIN.finditer(text):
            user, colon, password = match["value"].partition(":")
            self._note("secret", password if colon else user)
            self._learn("user", user)
        for match in personal.SERIAL.finditer(text):
            self._note("serial", match["value"])

    def learn_data(self, data: Any) -> None:
        """The same of every string in plain data."""
        match data:
            case str():
                self.learn(data)
            case dict():
                for name, value in data.items():
                    kind = field_kind(str(name))
                    if kind in ("host", "user") and isinstance(value, str):
                        self._learn(kind, value)
                    elif kind == "serial" and isinstance(value, str | int):
                        self._note("serial", str(value))
                    elif isinstance(value, str) and hides(str(name), value):
                        self._note("secret", value)
                    self.learn_data(value)
            case list():
                for one in data:
                    self.learn_data(one)
            case _:
                pass

    def literals(self) -> list[tuple[Kind, str]]:
        """What was replaced, and must not be found again; names that are common words left out."""
        return [
            key
            for key in self.values
            if key not in self.ambiguous and (key[0] != "secret" or key[1] in self._literal or _telling(key[1]))
        ]

    def _note(self, kind: Kind, value: str, least: int = _LEAST) -> None:
        if len(value) < least or (least and not _telling(value) and self._ours(value)) or PLACEHOLDER.search(value):
            return
        self._literal[value] = kind
        self.__dict__.pop("_literals", None)
        self._text.cache_clear()

    def _learn(self, kind: Kind, value: str) -> None:
        if kind == "host" and (personal.is_public_host(value) or personal.is_address(value) or value[:1].isdigit()):
            return
        name = value.partition(".")[0] if kind == "host" else value
        if not name or len(name) > _LONGEST_LEARNED or PLACEHOLDER.fullmatch(name) or not re.search(r"[A-Za-z]", name):
            return
        if name.lower() in self.common or len(name) < 3:
            self.ambiguous[kind, name.lower()] = None
            if name == value:
                return
        told = self.values.get((kind, name.lower())) or self.values.get((kind, value.lower())) or self._next(kind)
        for one in (value, name) if name.lower() not in self.common else (value,):
            self.values.setdefault((kind, one.lower()), told)
        self.__dict__.pop("_names", None)
        self._text.cache_clear()

    @cached_property
    def _names(self) -> re.Pattern[str] | None:
        """Every learned name, the longest first."""
        found = (key[1] for key in self.values if key[0] in ("host", "user") and key not in self.ambiguous)
        names = sorted(found, key=lambda one: (-len(one), one))
        return bounded(names)

    @cached_property
    def _literals(self) -> re.Pattern[str] | None:
        """Every noted value, the longest first."""
        values = sorted(self._literal, key=lambda one: (-len(one), one))
        return re.compile("|".join(_pattern(self._literal[one], one) for one in values)) if values else None

    # -- redacting -----------------------------------------------------------------------------------------------

    def text(self, text: str) -> str:
        """``text`` with everything replaced; JSON objects in lines of their own are read as such."""
        return "\n".join(self._line(line) if line[:1] == "{" else self._text_line(line) for line in _lines(text))

    def data(self, data: Any, name: str = "") -> Any:
        """Plain data with every string replaced; ``name``: of the field that it stands under."""
        match data:
            case dict():
                return {self._key(str(key)): self.data(value, str(key)) for key, value in data.items()}
            case list():
                return [self.data(one, name) for one in data]
            case str():
                if name in _LITERALS and self._ours(data):
                    return data
                kind = field_kind(name)
                if kind is not None and worth(kind, data) and not PLACEHOLDER.fullmatch(data):
                    return self.placeholder(kind, data)
                return self.placeholder("secret", data) if name and hides(name, data) else self.text(data)
            case int() if not isinstance(data, bool) and field_kind(name) == "serial":
                return self.placeholder("serial", str(data))
            case _:
                return data

    def placeholder(self, kind: Kind, value: str) -> str:
        """What stands for ``value``, counted."""
        if PLACEHOLDER.fullmatch(value):
            return value
        self.counts[kind] += 1
        folded = value.lower() if kind != "secret" else value
        if kind == "host" and (short := self.values.get((kind, folded.partition(".")[0]))):
            return self.values.setdefault((kind, folded), short)
        if (kind, folded) not in self.values:
            self.values[kind, folded] = self._next(kind)
        return self.values[kind, folded]

    def _next(self, kind: Kind) -> str:
        return f"{kind}-{1 + len({told for (one, _), told in self.values.items() if one == kind})}"

    def _key(self, key: str) -> str:
        return key if self._ours(key) else self.text(key)

    def _ours(self, text: str) -> bool:
        return len(text) <= 64 and all(word in self.common for word in re.findall(r"[^\W\d_]+", text.lower()))

    def _line(self, line: str) -> str:
        try:
            data = orjson.loads(line)
        except orjson.JSONDecodeError:
            return self._text_line(line)
        made = self.data(data)
        return line if made == data else orjson.dumps(made).decode()

    def _text_line(self, text: str) -> str:
        before = self.counts.copy()
        found, more = self._text(text)
        self.counts = before + more
        return found

    def _redacted(self, text: str) -> tuple[str, Counter[Kind]]:
        kept, self.counts = self.counts, Counter()
        made = self._direct(self._opened(text))
        more, self.counts = self.counts, kept
        return made, more

    def _opened(self, text: str) -> str:
        """Escapes and encodings that hide something are replaced by what they say, redacted."""
        for pattern in (PERCENT, ESCAPED):
            text = pattern.sub(self._unhidden, text)
        for pattern in (BASE64, HEX):
            text = pattern.sub(self._unpacked, text)
        return text

    def _unhidden(self, match: re.Match[str]) -> str:
        from urllib.parse import unquote

        plain = unescaped(unquote(match[0]))
        made = self._direct(plain)
        return match[0] if made == plain else made

    def _unpacked(self, match: re.Match[str]) -> str:
        plain = unwrapped(match[0])
        if plain is None:
            return match[0]
        counts = self.counts.copy()
        hides_one = self._direct(self._opened(plain)) != plain
        self.counts = counts
        return self.placeholder("encoded", match[0]) if hides_one else match[0]

    def _direct(self, text: str) -> str:
        """The order matters: what is long and sure first, bare names last."""
        if self._literals is not None:
            text = self._literals.sub(lambda m: self.placeholder(self._literal[m[0]], m[0]), text)
        for start, end in reversed(_joined((one.start, one.end) for one in forms(text))):
            if not PLACEHOLDER.search(text, start, end):
                text = text[:start] + self.placeholder("secret", text[start:end]) + text[end:]
        for pattern in (LOGIN, HEADER):
            text = pattern.sub(lambda m: m["before"] + self.placeholder("secret", m["value"]), text)
        for pattern in (FLAG, NAMED):
            text = pattern.sub(self._named, text)
        text = personal.MAIL.sub(self._whole("mail"), text)
        text = personal.UUID.sub(self._whole("uuid"), text)
        text = personal.MAC.sub(self._whole("mac"), text)
        text = personal.SERIAL.sub(lambda m: m["before"] + self.placeholder("serial", m["value"]), text)
        text = personal.IPV4.sub(self._address, text)
        text = personal.IPV6.sub(self._address, text)
        text = personal.PATH.sub(self._path, text)
        text = personal.URL_HOST.sub(self._url, text)
        for pattern in (personal.SYSLOG_HOST, personal.HOST_NAMED, personal.USER_NAMED, personal.LOGIN_AT):
            text = pattern.sub(self._groups, text)
        text = personal.DOMAIN.sub(lambda m: m[0] if personal.is_public_host(m[0]) else self._whole("host")(m), text)
        return text if self._names is None else self._names.sub(self._name, text)

    def _whole(self, kind: Kind) -> Callable[[re.Match[str]], str]:
        return lambda match: self.placeholder(kind, match[0])

    def _named(self, match: re.Match[str]) -> str:
        value = match["value"]
        if not hides(match["name"], value) or PLACEHOLDER.match(value):
            return match[0]
        return f"{match['name']}{match['between']}{self.placeholder('secret', value)}"

    def _address(self, match: re.Match[str]) -> str:
        version = personal.VERSION_BEFORE.search(match.string, max(0, match.start() - 16), match.start())
        return match[0] if version or not personal.is_address(match[0]) else self.placeholder("ip", match[0])

    def _path(self, match: re.Match[str]) -> str:
        path = match[0].rstrip(".")
        end = match[0][len(path) :]
        parts = [part for part in path.split("/") if part]
        if personal.KEPT_PATH.match(path) or (len(parts) < 2 and parts[:1] and parts[0] not in personal.ROOTS):
            return match[0]
        if PLACEHOLDER.search(path) and path.startswith("/site-packages"):
            return match[0]
        if (package := personal.INSTALLED.search(path)) is not None:
            return self.placeholder("path", path[: package.start()]) + path[package.start() :] + end
        folder, slash, last = path.rpartition("/")
        if slash and folder and personal.CODE_FILE.fullmatch(last):
            return f"{self.placeholder('path', folder)}/{last}{end}"
        return self.placeholder("path", path.rstrip("/")) + end

    def _url(self, match: re.Match[str]) -> str:
        host = match["host"].rstrip(".")
        if personal.is_public_host(host) or re.fullmatch(r"[\d.]+", host) or PLACEHOLDER.match(host):
            return match[0]
        start = match.start("host") - match.start()
        return match[0][:start] + self.placeholder("host", host) + match[0][start + len(host) :]

    def _groups(self, match: re.Match[str]) -> str:
        """Hosts and users where they stand as such."""
        made, last = "", match.start()
        spots = [(match.start(name), match.end(name), name) for name, value in match.groupdict().items() if value]
        for start, end, name in sorted(spots):
            value = match.string[start:end].rstrip(".")
            kind: Kind = "host" if name in ("host", "domain") else "user"
            known = (kind, value.lower()) in self.values or (kind, value.lower()) in self.ambiguous
            made += match.string[last:start]
            made += self.placeholder(kind, value) if known and worth(kind, value) else match.string[start:end]
            last = start + len(value) if known and worth(kind, value) else end
        return made + match.string[last : match.end()]

    def _name(self, match: re.Match[str]) -> str:
        folded = match[0].lower()
        kind: Kind = "host" if ("host", folded) in self.values else "user"
        return self.placeholder(kind, match[0])


def _pattern(kind: Kind, value: str) -> str:
    """A secret is found within other text too; a path or a number only by itself."""
    return re.escape(value) if kind == "secret" else rf"(?<![\w/.-]){re.escape(value)}(?![\w-])"


def _telling(value: str) -> bool:
    """Whether a secret is long enough, and strange enough, to be looked for."""
    return len(value) >= _LEAST and not value.isalpha()


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that overlap made one."""
    made: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if made and start < made[-1][1]:
            made[-1] = (made[-1][0], max(end, made[-1][1]))
        else:
            made.append((start, end))
    return made


def _lines(text: str) -> list[str]:
    """Lines of a log; a private key goes over several and stays together."""
    return [text] if "PRIVATE KEY" in text or "\n" not in text else text.split("\n")
