"""Nobody is left in an anonymised transcript, and its shape is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soakrig.engine.embedded.tokenizer import Tokenizer
from soakrig.errors import UsageError
from soakrig.soak.transcript import open_transcript
from soakrig.soak.transcripts.anonymise import Anonymiser
from soakrig.soak.transcripts.filler import Filler
from soakrig.soak.transcripts.line import make_line
from soakrig.soak.transcripts.request import Request
from soakrig.soak.transcripts.token_counts import EstimatedCounts

TOKENIZER = Tokenizer()
SECRET = "Zqxv"
"""Stands in every text of a person below, and in nothing that may stay."""


class Counts:
    how, exact, extended = "the engine's /tokenize", True, True

    def count(self, text: str, /) -> int:
        return len(TOKENIZER.encode(text))

    def overhead(self) -> int:
        return 0


SYSTEM = {"role": "system", "content": f"You serve {SECRET} Inc. and nobody else. Be brief."}
ASK = {
    "role": "user",
    "content": f"Why does {SECRET}'s build fail?\nHis number is 0171 5550123.",
    "name": f"{SECRET}son",
}
ARGUMENTS = f'{{"path": "/home/{SECRET}/a.py", "depth": 2, "since": 1729954321, "deep": [true, null, "{SECRET}"]}}'
CALLS = {
    "role": "assistant",
    "content": None,
    "reasoning_content": f"The user {SECRET} wants the file.",
    "tool_calls": [{"id": f"c{SECRET}", "type": "function", "function": {"name": "read_file", "arguments": ARGUMENTS}}],
}
RESULT = {
    "role": "tool",
    "tool_call_id": f"c{SECRET}",
    "content": f'{{\n  "file": "{SECRET} says \\"no\\"",\n  "/home/{SECRET}": 12,\n  "size": 48213\n}}',
}
SAID = {"role": "assistant", "content": [{"type": "text", "text": f"{SECRET}, the path is wrong."}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": f"Reads a file of {SECRET}.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": f"as in /home/{SECRET}", "enum": [SECRET, "b"]}},
            "required": ["path"],
        },
    },
}
FIELDS = {
    "temperature": 0.2,
    "user": SECRET,
    "metadata": {"who": SECRET},
    "stop": [SECRET],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": SECRET, "schema": {"type": "object"}}},
}


def request(*messages: dict[str, Any], **fields: Any) -> Request:
    return Request("t line 1", [*messages], [TOOL], {**FIELDS, **fields})


def hidden(*requests: Request, seed: int = 0) -> tuple[list[Request], Anonymiser]:
    hider = Anonymiser(Filler(Counts(), seed))
    return [hider.request(one) for one in requests], hider


def body(one: Request) -> dict[str, Any]:
    return json.loads(make_line(one, "m", 10).body)


def test_no_word_of_a_person_is_left_and_the_shape_is() -> None:
    (made,), hider = hidden(request(SYSTEM, ASK, CALLS, RESULT, SAID))
    text = json.dumps(body(made))
    assert SECRET.lower() not in text.lower()
    assert not re.search(r"0171|5550123|1729954321|48213|brief|build fail", text)
    sent = body(made)
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    call, result = sent["messages"][2]["tool_calls"][0], sent["messages"][3]
    assert call["function"]["name"] == "read_file"
    assert result["tool_call_id"] == call["id"]
    arguments = json.loads(call["function"]["arguments"])
    assert list(arguments) == ["path", "depth", "since", "deep"]
    assert arguments["depth"] == 2
    assert arguments["deep"][:2] == [True, None]
    assert len(str(arguments["since"])) == 10
    content = result["content"]
    assert content.startswith('{\n  "file": "')
    assert content.endswith("\n}")
    assert "size" in json.loads(content)
    assert [len(str(value)) for value in json.loads(content).values()][1:] == [2, 5]
    function = sent["tools"][0]["function"]
    assert function["name"] == "read_file"
    assert function["parameters"]["required"] == ["path"]
    assert function["parameters"]["properties"]["path"]["type"] == "string"
    assert sent["temperature"] == 0.2
    assert sent["tool_choice"] == "auto"
    assert hider.facts()["fields_left_out"] == ["metadata", "stop", "user"]


def test_every_text_keeps_its_length_in_tokens() -> None:
    (made,), hider = hidden(request(SYSTEM, ASK, CALLS, RESULT, SAID))
    count = Counts().count
    for before, after in zip(
        (SYSTEM, ASK, RESULT), (made.messages[0], made.messages[1], made.messages[3]), strict=True
    ):
        assert count(after["content"]) == count(before["content"])
        assert after["content"] != before["content"]
    assert count(made.messages[2]["tool_calls"][0]["function"]["arguments"]) == count(ARGUMENTS)
    facts = hider.facts()
    assert facts["tokens"] == facts["filler_tokens"]
    assert facts["texts_of_another_length"] == 0
    assert facts["counted"] == "the engine's /tokenize"


def test_a_re_sent_history_stays_a_prefix_and_the_seed_decides() -> None:
    first, second = request(SYSTEM, ASK), request(SYSTEM, ASK, CALLS, RESULT)
    (one, two), _ = hidden(first, second)
    assert two.messages[:2] == one.messages
    (same, _), _ = hidden(first, second)
    assert same == one
    (other, _), _ = hidden(first, second, seed=1)
    assert other.messages[1]["content"] != one.messages[1]["content"]


def test_filler_depends_on_no_text() -> None:
    """Nobody can hold a guess against it: another text of that length in that place gets the same filler."""
    asked = [request({"role": "user", "content": text}) for text in ("house tree", "light snow")]
    one, two = (Anonymiser(Filler(EstimatedCounts())).request(each) for each in asked)
    assert one.messages == two.messages


def test_different_texts_of_one_length_get_different_filler_and_equal_ones_the_same() -> None:
    texts = ["a" * 64, "b" * 64, "a" * 64]
    asked = request(*({"role": "user", "content": text} for text in texts))
    one, two, again = (message["content"] for message in Anonymiser(Filler(EstimatedCounts())).request(asked).messages)
    assert one != two
    assert one == again


def test_what_cannot_be_replaced_is_refused() -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}]}
    with pytest.raises(UsageError, match="t line 1: a content part of type 'image_url' cannot be anonymised"):
        hidden(request(picture))


def test_arguments_that_are_no_json_and_empty_texts() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "run", "arguments": f'{{"cmd": "{SECRET}'}}
    ]}  # fmt: skip
    (made,), _ = hidden(request(call, {"role": "tool", "tool_call_id": "c", "content": "   "}))
    assert SECRET not in json.dumps(made.messages)
    assert made.messages[0]["content"] == ""
    assert made.messages[1]["content"] == "   "


def test_without_an_engine_lengths_are_estimated_and_said_so() -> None:
    hider = Anonymiser(Filler(EstimatedCounts()))
    made = hider.request(request({"role": "user", "content": "x" * 320}))
    assert len(made.messages[0]["content"].split()) == 100
    assert hider.facts()["counted"].startswith("estimated")


def test_a_transcript_is_anonymised_once_and_may_be_kept(tmp_path: Path) -> None:
    from soakrig.soak.probe import Probe
    from soakrig.soak.target import Target

    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps([SYSTEM, ASK]) + "\n")
    talk = open_transcript(path, anonymise=True, seed=3)
    assert talk.is_nobodys
    assert not open_transcript(path).is_nobodys
    for _ in range(2):
        talk.prepare(Target("http://127.0.0.1:9"))  # nobody answers: the estimate
    assert talk.facts["anonymised"]["seed"] == 3
    (conversation,) = talk.conversations(Probe("m"))
    assert SECRET.encode() not in conversation.next_turn().body


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=30).map(lambda text: text + SECRET),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def shape(value: Any) -> Any:
    """Kinds and nesting alone."""
    if isinstance(value, dict):
        return [shape(one) for one in value.values()]
    if isinstance(value, list):
        return [shape(one) for one in value]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


@given(JSON.filter(lambda value: isinstance(value, dict | list)), st.sampled_from([None, 1]), st.booleans())
def test_any_json_stays_json_of_the_same_shape(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    (made,), _ = hidden(request({"role": "tool", "tool_call_id": "c", "content": text}))
    content = made.messages[0]["content"]
    assert SECRET not in content
    try:
        text.encode()
    except UnicodeEncodeError:
        return  # lone surrogates: no text that a transcript can hold
    assert shape(json.loads(content)) == shape(value)
    assert content.count("\n") == text.count("\n")
