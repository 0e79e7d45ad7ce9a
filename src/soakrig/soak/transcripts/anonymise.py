"""Takes the people out of a transcript: every text becomes filler of as many tokens, and the shape stays.

Kept: roles, the order and number of messages, tool names, the names of their parameters, JSON structure (keys that are
plain identifiers, brackets, white space, true, false, null, numbers of one or two digits), and which texts are equal.
Replaced: every other text, longer numbers digit by digit, identifiers of calls. What cannot be replaced is refused.

The n-th different text gets the n-th filler of the seed. So nothing in the result depends on a text but its length and
where it came up first, and nobody can check a guess against it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random
from typing import Any

import orjson

from soakrig.errors import UsageError
from soakrig.soak.transcripts.filler import Filler
from soakrig.soak.transcripts.request import Request

_JSON = re.compile(
    r'(?P<string>"(?:[^"\\]|\\.)*")(?P<key>\s*:)?|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)', re.DOTALL
)
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,40}")
_SCHEMA_WORDS = frozenset({"type", "format", "$ref", "$schema", "$id", "required", "pattern", "dependentRequired"})
"""Keywords of JSON schema whose values are structure: kept as they are."""
_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_KEPT_FIELDS = frozenset({"tool_choice", "reasoning_effort", "service_tier", "stream_options", "parallel_tool_calls"})
_LEFT_OUT = frozenset({"user", "metadata", "stop", "store"})
"""Fields that name the caller or hold texts of his, and change no shape."""
_ROUNDS = 3


@dataclass
class Anonymiser:
    """Rewrites requests one after another; ``filler`` says how texts are made and counted."""

    filler: Filler
    texts: dict[str, str] = field(default_factory=dict[str, str])
    names: dict[str, str] = field(default_factory=dict[str, str])
    tokens: int = 0
    made: int = 0
    off: int = 0
    left_out: set[str] = field(default_factory=set[str])

    def request(self, request: Request) -> Request:
        """The same request with nobody in it. Raises ``UsageError`` for what cannot be replaced (pictures, say)."""
        messages = [self._message(message, request.where) for message in request.messages]
        tools = [self._tool(tool) for tool in request.tools]
        fields: dict[str, Any] = {}
        for name, value in request.fields.items():
            if name in _LEFT_OUT:
                self.left_out.add(name)
            elif name in _KEPT_FIELDS or value is None or isinstance(value, bool | int | float):
                fields[name] = value
            else:
                fields[name] = self._schema(value)
        return Request(request.where, messages, tools, fields, request.due_s)

    def facts(self) -> dict[str, Any]:
        """For the record: what was done and how well lengths were kept."""
        return {
            "seed": self.filler.seed,
            "texts": len(self.texts),
            "tokens": self.tokens,
            "filler_tokens": self.made,
            "texts_of_another_length": self.off,
            "counted": self.filler.counts.how,
            "fields_left_out": sorted(self.left_out),
        }

    # -- parts of a request --------------------------------------------------------------------------------------

    def _message(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in message.items():
            if name == "role" or value is None:
                made[name] = value
            elif name == "tool_calls" and isinstance(value, list):
                made[name] = [self._call(call) for call in value]
            elif name == "function_call" and isinstance(value, dict):
                made[name] = self._function(value)
            elif name == "tool_call_id":
                made[name] = self._renamed(str(value), "call")
            elif name == "name":
                made[name] = value if message.get("role") in ("tool", "function") else self._renamed(str(value), "name")
            elif name == "content" and isinstance(value, list):
                made[name] = [self._content_part(part, where) for part in value]
            else:
                made[name] = self._anything(value)
        return made

    def _content_part(self, part: Any, where: str) -> dict[str, Any]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UsageError(
                f"{where}: a content part of type {kind!r} cannot be anonymised; only text can",
                remedy="Take it out of the transcript.",
            )
        return {"type": "text", "text": self._text(part["text"])}

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return self._anything(call)
        made = dict(call)
        if "id" in made:
            made["id"] = self._renamed(str(made["id"]), "call")
        if isinstance(function := made.get("function"), dict):
            made["function"] = self._function(function)
        return made

    def _function(self, function: dict[str, Any]) -> dict[str, Any]:
        made = {name: value if name == "name" else self._anything(value) for name, value in function.items()}
        if isinstance(arguments := function.get("arguments"), str):
            made["arguments"] = self._text(arguments, keys=True)
        return made

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        made = {
            name: value if name == "name" else self._schema(value) if name == "parameters" else self._anything(value)
            for name, value in function.items()
        }
        return {**{name: value for name, value in tool.items() if name == "type"}, "function": made}

    def _schema(self, value: Any) -> Any:
        """A JSON schema, or an object that holds one: structure stays, descriptions and examples go."""
        if isinstance(value, dict):
            made: dict[str, Any] = {}
            for name, part in value.items():
                if name in _SCHEMA_WORDS:
                    made[name] = part
                elif name in _SCHEMA_MAPS and isinstance(part, dict):
                    made[name] = {key: self._schema(one) for key, one in part.items()}
                else:
                    made[name] = self._schema(part)
            return made
        if isinstance(value, list):
            return [self._schema(one) for one in value]
        return self._anything(value)

    def _anything(self, value: Any) -> Any:
        match value:
            case str():
                return self._text(value)
            case dict():
                return {self._key(str(key)): self._anything(one) for key, one in value.items()}
            case list():
                return [self._anything(one) for one in value]
            case bool() | None:
                return value
            case int() | float():
                return orjson.loads(self._number(orjson.dumps(value).decode()))
            case _:
                return None

    # -- texts ---------------------------------------------------------------------------------------------------

    def _text(self, text: str, *, keys: bool = False) -> str:
        """Filler for a text; JSON stays JSON. ``keys``: of any form are kept, as those of arguments are a tool's."""
        if not text.strip():
            return text
        mark = f"{keys}{text}"
        found = self.texts.get(mark)
        if found is None:
            wanted = self.filler.counts.count(text)
            serial = len(self.texts)
            found = self._json(text, serial, wanted, keys) if text.lstrip()[0] in "{[" else None
            found = self.filler.make(wanted, f"text {serial}") if found is None else found
            self.texts[mark] = found
            got = self.filler.counts.count(found) if self.filler.counts.exact else wanted
            self.tokens, self.made, self.off = self.tokens + wanted, self.made + got, self.off + (got != wanted)
        return found

    def _json(self, text: str, serial: int, wanted: int, keys: bool) -> str | None:
        """The same JSON text around other strings, None where it is none. Its longest string takes up what is missing
        in tokens or too much: counts of parts do not add up."""
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        strings = [m for m in _JSON.finditer(text) if m["string"] and not m["key"]]
        lengths = [self.filler.counts.count(m["string"][1:-1]) for m in strings]
        made = self._rewritten(text, serial, lengths, keys)
        if not self.filler.counts.exact or not lengths:
            return made
        longest = lengths.index(max(lengths))
        for _ in range(_ROUNDS):
            off = self.filler.counts.count(made) - wanted
            if off == 0 or lengths[longest] - off < 1:
                break
            lengths[longest] -= off
            made = self._rewritten(text, serial, lengths, keys)
        return made

    def _rewritten(self, text: str, serial: int, lengths: list[int], keys: bool) -> str:
        place = -1

        def other(match: re.Match[str]) -> str:
            nonlocal place
            if match["number"]:
                return self._number(match["number"])
            if match["key"]:
                key = match["string"][1:-1]
                return match[0] if keys else f'"{self._key(key)}"{match["key"]}'
            place += 1
            return f'"{self.filler.make(lengths[place], f"text {serial}.{place}")}"'

        return _JSON.sub(other, text)

    def _key(self, key: str) -> str:
        return key if _PLAIN_KEY.fullmatch(key) else self._renamed(key, "key")

    def _number(self, text: str) -> str:
        """As many digits, others; a number of one or two digits counts something and is kept."""
        if sum(character.isdigit() for character in text) < 3:
            return text
        known = self.names.get(f"number {text}")
        if known is None:
            rng = Random(f"{self.filler.seed}/number {len(self.names)}")  # noqa: S311 - no secret
            mantissa, exponent = re.fullmatch(r"([^eE]*)(.*)", text).groups()  # pyright: ignore
            known = re.sub(r"[1-9]", lambda digit: str(rng.randint(1, 9)), mantissa) + exponent
            self.names[f"number {text}"] = known
        return known

    def _renamed(self, name: str, kind: str) -> str:
        """Another name, the same wherever the name stands."""
        return self.names.setdefault(f"{kind} {name}", f"{kind}_{len(self.names)}")
