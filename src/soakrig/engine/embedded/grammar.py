"""A value for a JSON schema, as a script: what the schema fixes is forced, what it leaves open the model chooses.

The value always parses and satisfies type, required, enum, const, bounds and lengths. ``pattern`` is not obeyed: no
regular expression is turned into a grammar here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from typing import Any, cast

from .actions import Channel, Choice, Forced, Option, Script, Span
from .number_values import integers, numbers

Schema = Mapping[str, Any]
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
DEEP = 6
"""Below this depth only what is required is written."""
TOO_DEEP = 24
DEFAULT_CHARS = 60
ITEMS = 3
_FORMATS = {
    "date-time": "2025-11-{d:02d}T{h:02d}:{m:02d}:00Z",
    "date": "2025-11-{d:02d}",
    "time": "{h:02d}:{m:02d}:00Z",
    "email": "user{n}@example.com",
    "uri": "https://example.com/{n}",
    "url": "https://example.com/{n}",
    "ipv4": "192.0.2.{d}",
    "uuid": "00000000-0000-4000-8000-{n:012d}",
}


class SchemaError(ValueError):
    """A tool's schema that no value can be made for; the message says where and why."""


class Grammar:
    """Writes one value. ``tokens`` bounds the free text: once spent, optional parts are left out."""

    def __init__(self, root: Schema, rng: random.Random, *, tokens: int = 48, channel: Channel = "arguments") -> None:
        self._root = root
        self._rng = rng
        self._left = tokens
        self._channel: Channel = channel

    def script(self) -> Script:
        yield from self._value(self._root, 0)

    def _value(self, schema: Any, depth: int) -> Script:
        if depth > TOO_DEEP:
            raise SchemaError(f"the schema nests more than {TOO_DEEP} levels of required values")
        found = resolve(schema, self._root, self._rng)
        if "const" in found:
            yield self._forced(found["const"])
        elif "enum" in found:
            yield self._choice(found["enum"])
        else:
            kind = self._kind(found)
            match kind:
                case "object":
                    yield from self._object(found, depth)
                case "array":
                    yield from self._array(found, depth)
                case "string":
                    yield from self._string(found)
                case "integer":
                    yield self._choice(integers(found, self._rng))
                case "number":
                    yield self._choice(numbers(found, self._rng))
                case "boolean":
                    yield self._choice((True, False))
                case _:
                    yield self._forced(None)

    def _object(self, schema: Schema, depth: int) -> Script:
        properties = cast(dict[str, Any], schema.get("properties") or {})
        required = [str(name) for name in schema.get("required") or ()]
        rest = schema.get("additionalProperties")
        anything: Any = rest if isinstance(rest, dict) else {"type": "string"}
        written = 0
        yield Forced(self._channel, "{")
        # Whether an optional one is taken is decided when its turn comes: by then the budget knows what was written.
        names = [*properties, *(name for name in required if name not in properties)]
        least = int(schema.get("minProperties", 0))
        for place, name in enumerate(names):
            if name in required or self._take_optional(depth) or least - written >= len(names) - place:
                yield from self._member(name, properties.get(name, anything), written, depth)
                written += 1
        for number in range(least - written):
            yield from self._member(f"key_{number}", anything, written + number, depth)
        yield Forced(self._channel, "}")

    def _member(self, name: str, schema: Any, before: int, depth: int) -> Script:
        yield Forced(self._channel, f"{', ' if before else ''}{_literal(name)}: ")
        yield from self._value(schema, depth + 1)

    def _array(self, schema: Schema, depth: int) -> Script:
        leading = list(cast(Iterable[Any], schema.get("prefixItems") or ()))
        items: Any = schema.get("items", {"type": "string"})
        low = int(schema.get("minItems", 0))
        high = max(low, int(schema.get("maxItems", max(low, ITEMS))))
        wanted = self._rng.randint(max(low, min(1, high)), min(high, max(low, ITEMS)))
        count = wanted if self._left > 0 and depth < DEEP else low
        if items is False or (items is True and leading):
            count = max(low, min(count, len(leading)))
        unique = bool(schema.get("uniqueItems"))
        distinct = self._distinct(items) if unique else None
        if distinct is not None:
            count = max(low, min(count, len(distinct)))
        yield Forced(self._channel, "[")
        for number in range(count):
            if number:
                yield Forced(self._channel, ", ")
            if distinct is not None:
                # Distinct values are dealt, not chosen: the model could choose one twice.
                yield self._forced(distinct[number % len(distinct)])
            else:
                yield from self._value(leading[number] if number < len(leading) else items, depth + 1)
        yield Forced(self._channel, "]")

    def _distinct(self, items: Any) -> list[Any] | None:
        found = resolve(items, self._root, self._rng)
        if "enum" in found:
            values = list(found["enum"])
        elif "const" in found:
            values = [found["const"]]
        else:
            match self._kind(found):
                case "boolean":
                    values = [True, False]
                case "integer":
                    values = integers(found, self._rng)
                case "number":
                    values = numbers(found, self._rng)
                case _:
                    return None
        self._rng.shuffle(values)
        return values

    def _string(self, schema: Schema) -> Script:
        shape = _FORMATS.get(str(schema.get("format")))
        if shape is not None:
            draw = self._rng
            yield self._forced(
                shape.format(
                    d=draw.randint(1, 28), h=draw.randint(0, 23), m=draw.randint(0, 59), n=draw.randint(1, 9999)
                )
            )
            return
        low = int(schema.get("minLength", 0))
        high = int(schema.get("maxLength", max(low, DEFAULT_CHARS)))
        yield Forced(self._channel, '"')
        tokens = self._rng.randint(2, 8) if self._left > 0 else 1
        self._left -= tokens
        text = yield Span(self._channel, "string", tokens, min_chars=low, max_chars=high)
        yield Forced(self._channel, "x" * max(0, low - len(text)) + '"')

    def _take_optional(self, depth: int) -> bool:
        return self._rng.random() < 0.4 and depth < DEEP and self._left > 0

    def _kind(self, schema: Schema) -> str:
        kind: Any = schema.get("type")
        if isinstance(kind, list):
            kinds = cast(list[Any], kind)
            kind = self._rng.choice([one for one in kinds if one != "null"] or ["null"])
        if kind is None:
            kind = (
                "object"
                if "properties" in schema or "required" in schema
                else "array"
                if "items" in schema
                else "string"
            )
        return str(kind)

    def _choice(self, values: Iterable[Any]) -> Choice:
        self._left -= 1
        return Choice(self._channel, tuple(Option(text, text) for text in dict.fromkeys(map(_literal, values))))

    def _forced(self, value: Any) -> Forced:
        return Forced(self._channel, _literal(value))


def resolve(schema: Any, root: Schema, rng: random.Random) -> Schema:
    """Follow ``$ref``, merge ``allOf``, pick one of ``anyOf``/``oneOf`` (not null where there is a choice)."""
    if isinstance(schema, bool):
        return {"type": "string"}
    for _ in range(TOO_DEEP):
        if "$ref" in schema:
            target = follow(str(schema["$ref"]), root)
            schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
        elif "allOf" in schema:
            schema = _merge(
                [
                    {k: v for k, v in schema.items() if k != "allOf"},
                    *(part for part in schema["allOf"] if isinstance(part, dict)),
                ]
            )
        elif "anyOf" in schema or "oneOf" in schema:
            key = "anyOf" if "anyOf" in schema else "oneOf"
            options = [option if isinstance(option, dict) else {} for option in cast(list[Any], schema[key])]
            some = [option for option in options if option.get("type") != "null"] or options
            schema = _merge([{k: v for k, v in schema.items() if k != key}, rng.choice(some)])
        else:
            return cast(Schema, schema)
    raise SchemaError(f"references and combinations in the schema do not end after {TOO_DEEP} steps")


def follow(reference: str, root: Schema) -> Schema:
    """The schema that a local reference (``#/$defs/name``) names. Raises SchemaError where there is none."""
    found: Any = root
    if not reference.startswith("#"):
        raise SchemaError(f"$ref {reference!r} leaves the document; only local references (#/...) can be followed")
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            raise SchemaError(f"$ref {reference!r} names nothing in the schema")
        found = cast(dict[str, Any], found)[name]
    if not isinstance(found, dict):
        raise SchemaError(f"$ref {reference!r} does not name a schema")
    return cast(Schema, found)


def check(schema: Any, root: Schema | None = None, where: str = "parameters") -> None:
    """Raise SchemaError for a schema that ``Grammar`` could not write: unknown type, empty enum, dead reference."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaError(f"{where} is {type(schema).__name__}, a schema object was expected")
    found = cast(dict[str, Any], schema)
    top = found if root is None else root
    kinds = found.get("type", [])
    for kind in cast(list[Any], kinds) if isinstance(kinds, list) else [kinds]:
        if kind not in TYPES:
            raise SchemaError(f"{where}.type is {kind!r}, one of {', '.join(TYPES)} was expected")
    _check_bounds(found, where)
    if "enum" in found and not (isinstance(found["enum"], list) and found["enum"]):
        raise SchemaError(f"{where}.enum holds no values")
    if "$ref" in found:
        follow(str(found["$ref"]), top)
    for key in ("properties", "$defs", "definitions"):
        inner = found.get(key)
        if inner is not None and not isinstance(inner, dict):
            raise SchemaError(f"{where}.{key} is {type(inner).__name__}, an object was expected")
        for name, part in cast(dict[str, Any], inner or {}).items():
            check(part, top, f"{where}.{key}.{name}")
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        parts = found.get(key)
        if parts is not None and not (isinstance(parts, list) and parts):
            raise SchemaError(f"{where}.{key} holds no schemas")
        for number, part in enumerate(cast(list[Any], parts or [])):
            check(part, top, f"{where}.{key}[{number}]")
    for key in ("items", "additionalProperties"):
        if key in found:
            check(found[key], top, f"{where}.{key}")


def _check_bounds(found: Schema, where: str) -> None:
    for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties"):
        value = found.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise SchemaError(f"{where}.{key} is {value!r}, a whole number of 0 or more was expected")
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        value = found.get(key, 0)
        if not isinstance(value, int | float):
            raise SchemaError(f"{where}.{key} is {value!r}, a number was expected")
    names = found.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast(list[Any], names)):
        raise SchemaError(f"{where}.required is {names!r}, a list of names was expected")


def _merge(parts: Iterable[Schema]) -> Schema:
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key == "properties":
                merged[key] = {**merged.get(key, {}), **value}
            elif key == "required":
                merged[key] = [*merged.get(key, ()), *value]
            else:
                merged[key] = value
    return merged


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
