"""Tool arguments: whatever the model chooses, they parse and satisfy their schema."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soakrig.engine.embedded.actions import Choice, Forced, Span
from soakrig.engine.embedded.grammar import Grammar, SchemaError, check
from soakrig.engine.embedded.tokenizer import Tokenizer

TOKENIZER = Tokenizer()


def write(schema: dict[str, Any], seed: int) -> str:
    """The text of one value, with a stand-in for the model that chooses at random."""
    rng = random.Random(seed)
    script = Grammar(schema, random.Random(seed)).script()
    text, answer, started = "", "", False
    while True:
        try:
            action = script.send(answer) if started else next(script)
        except StopIteration:
            return text
        started, answer = True, ""
        match action:
            case Forced():
                text += action.text
            case Choice():
                answer = rng.choice(action.options).shown
                text += answer
            case Span():
                pieces = 0
                while pieces < action.tokens or len(answer) < action.min_chars:
                    piece = TOKENIZER.text_of[rng.choice(TOKENIZER.string_ids)]
                    if action.max_chars is not None and len(answer + piece) > action.max_chars:
                        break
                    answer, pieces = answer + piece, pieces + 1
                text += answer
            case _:
                raise AssertionError(action)


def satisfies(value: Any, schema: Any) -> bool:
    """A validator of the part of JSON Schema that is under test, written apart from the grammar."""
    if isinstance(schema, bool):
        return schema
    for key, holds in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if key in schema and not holds(satisfies(value, part) for part in schema[key]):
            return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    kinds = schema.get("type")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null", float: "number"}
        kind = "integer" if type(value) is int else names[type(value)]
        if kind not in kinds and not (kind == "integer" and "number" in kinds):
            return False
    if isinstance(value, dict):
        inner = schema.get("properties", {})
        return all(name in value for name in schema.get("required", ())) and all(
            satisfies(value[name], part) for name, part in inner.items() if name in value
        )
    if isinstance(value, list):
        sized = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        unique = not schema.get("uniqueItems") or len({json.dumps(one) for one in value}) == len(value)
        return sized and unique and all(satisfies(one, schema.get("items", True)) for one in value)
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and value > schema.get("exclusiveMinimum", value - 1)
            and value < schema.get("exclusiveMaximum", value + 1)
            and (schema.get("multipleOf") is None or value % schema["multipleOf"] == 0)
        )
    return True


NAMES = st.sampled_from(["path", "limit", "a b", 'quo"te', "naïve", "new\nline", "x"])
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    st.just({"type": "string"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-9, 9),
        st.integers(0, 9),
    ),
    st.builds(lambda low: {"type": "integer", "exclusiveMinimum": low, "maximum": low + 3}, st.integers(-9, 9)),
    st.builds(lambda low: {"type": "number", "minimum": low, "exclusiveMaximum": low + 1}, st.integers(-9, 9)),
    st.builds(lambda unit: {"type": "integer", "multipleOf": unit, "minimum": 1}, st.integers(1, 9)),
    st.just({"type": ["null", "boolean"]}),
    st.just({"type": "null"}),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.text(), st.integers(), st.none()), min_size=1, max_size=4),
    ),
    st.builds(lambda value: {"const": value}, st.one_of(st.text(), st.lists(st.integers(), max_size=2))),
)


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(
            lambda properties, count: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:count],
            },
            st.dictionaries(NAMES, inner, max_size=4),
            st.integers(0, 4),
        ),
        st.builds(
            lambda items, low: {"type": "array", "items": items, "minItems": low, "maxItems": low + 2},
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )


@given(st.recursive(LEAVES, nested, max_leaves=12), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_any_schema_gets_a_value_that_satisfies_it(schema: dict[str, Any], seed: int) -> None:
    check(schema)
    assert satisfies(json.loads(write(schema, seed)), schema)


def test_the_validator_of_these_tests_can_say_no() -> None:
    assert not satisfies({}, {"required": ["a"]})
    assert not satisfies("x", {"enum": ["y"]})
    assert not satisfies(True, {"type": "integer"})
    assert not satisfies(5, {"exclusiveMaximum": 5})
    assert not satisfies([1, 1], {"uniqueItems": True})


def test_references_recursion_and_uniqueness() -> None:
    schema = {
        "type": "object",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value", "children"],
            }
        },
        "properties": {
            "tree": {"$ref": "#/$defs/node"},
            "kinds": {
                "type": "array",
                "items": {"enum": ["a", "b", "c"]},
                "uniqueItems": True,
                "minItems": 3,
                "maxItems": 3,
            },
        },
        "required": ["tree", "kinds"],
    }
    check(schema)
    for seed in range(200):
        value = json.loads(write(schema, seed))
        assert sorted(value["kinds"]) == ["a", "b", "c"]
        assert isinstance(value["tree"]["value"], int)


def test_a_tree_without_leaves_ends() -> None:
    schema = {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["children"],
    }
    for seed in range(20):
        assert "children" in json.loads(write(schema, seed))


def test_optional_properties_come_and_go_with_the_seed() -> None:
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in "abcd"}, "required": ["a"]}
    shapes = {tuple(json.loads(write(schema, seed))) for seed in range(60)}
    assert len(shapes) > 4
    assert all("a" in shape for shape in shapes)


def test_least_properties_are_taken_from_those_declared() -> None:
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in "abcd"}, "minProperties": 3}
    for seed in range(40):
        assert 3 <= len(json.loads(write(schema, seed))) <= 4
        assert set(json.loads(write(schema, seed))) <= set("abcd")


def test_replies_stay_short() -> None:
    schema = {"type": "object", "properties": {f"field_{n}": {"type": "string"} for n in range(200)}}
    assert max(len(write(schema, seed)) for seed in range(100)) < 1200


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "text"}, r"parameters\.type is 'text'"),
        ({"properties": {"a": {"enum": []}}}, r"parameters\.properties\.a\.enum"),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "#/\\$defs/gone"),
        ({"properties": {"a": {"$ref": "http://x/y"}}}, "leaves the document"),
        ({"properties": ["a"]}, r"parameters\.properties is list"),
        ({"items": 3}, r"parameters\.items is int"),
        ({"minLength": "3"}, r"parameters\.minLength is '3'"),
        ({"maximum": "9"}, r"parameters\.maximum is '9'"),
        ({"required": "a"}, r"parameters\.required is 'a'"),
        ({"anyOf": []}, r"parameters\.anyOf"),
    ],
)
def test_a_schema_that_cannot_be_written_is_refused_by_place(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(SchemaError, match=named):
        check(schema)
