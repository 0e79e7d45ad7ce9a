"""The shipped tokenizer and the chat template: what becomes a token, and that prompts only grow."""

from __future__ import annotations

import json
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soakrig.engine.embedded.chat_template import ChatTemplate
from soakrig.engine.embedded.config import VOCABULARY
from soakrig.engine.embedded.tokenizer import SPECIAL_TOKENS, Tokenizer

TOKENIZER = Tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)
SPECIAL_IDS = set(TOKENIZER.special.values())
TOOLS = [
    {
        "name": "read_file",
        "description": "Reads a file & returns <text>",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
]


def assistant(content: str = "", reasoning: str = "", calls: list[dict[str, str]] | None = None) -> dict[str, object]:
    return {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": calls or []}


def plain(role: str, content: str) -> dict[str, object]:
    return {"role": role, "content": content, "reasoning": "", "tool_calls": []}


@given(st.text())
@settings(max_examples=150, deadline=None)
def test_text_comes_back_and_never_becomes_a_special_token(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert not SPECIAL_IDS & set(ids)
    assert "".join(TOKENIZER.split_text(ids)) == text


@pytest.mark.parametrize("spelling", sorted(SPECIAL_TOKENS.values()))
def test_a_spelled_special_token_is_text(spelling: str) -> None:
    ids = TEMPLATE.render([plain("user", f"a {spelling} b")])
    expected = [TOKENIZER.special[name] for name in ("user", "end", "assistant", "think")]
    assert [i for i in ids if i in SPECIAL_IDS] == expected
    assert spelling in TOKENIZER.decode(ids)


def test_every_id_has_bytes_and_all_bytes_can_be_written() -> None:
    assert len(TOKENIZER.bytes_of) == VOCABULARY
    singles = {piece for piece in TOKENIZER.bytes_of if len(piece) == 1}
    assert len(singles) == 256


def test_free_text_pieces_are_clean() -> None:
    allowed = set(string.ascii_letters + string.digits + " _'-")
    for number in TOKENIZER.text_ids:
        assert set(TOKENIZER.text_of[number]) <= allowed
        assert re.search(r"[A-Za-z0-9]", TOKENIZER.text_of[number])
    for number in TOKENIZER.string_ids:
        assert json.loads(f'"{TOKENIZER.text_of[number]}"') == TOKENIZER.text_of[number]
    assert len(TOKENIZER.text_ids) > 1000
    assert len(TOKENIZER.string_ids) > 1000


def test_tool_definitions_cost_about_a_token_for_three_and_a_half_bytes() -> None:
    properties = {
        name: {"type": "string", "description": f"The {name.replace('_', ' ')} to work on, relative to the workspace"}
        for name in ("file_path", "symbol", "start_line", "branch_name", "glob", "replacement")
    }
    definition = {
        "type": "function",
        "function": {
            "name": "rename_symbol",
            "description": "Renames a symbol in all files of the project and reports what was changed.",
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
    text = json.dumps(definition)
    assert 3.0 < len(text) / len(TOKENIZER.encode(text)) < 4.6


def test_appending_messages_only_appends_tokens() -> None:
    call = {"name": "read_file", "arguments": '{"path": "a<b>&c"}'}
    conversation = [
        plain("system", "Be brief."),
        plain("user", "Look"),
        assistant(calls=[call]),
        plain("tool", "line 1\nline 2"),
        assistant("Done.", reasoning="I read it."),
        plain("system", "A second system message"),
        plain("user", "Thanks"),
    ]
    before: list[int] = []
    for count in range(1, len(conversation) + 1):
        ids = TEMPLATE.render(conversation[:count], TOOLS, add_generation_prompt=False)
        assert ids[: len(before)] == before
        assert len(ids) > len(before)
        before = ids


def test_tools_and_calls_are_in_the_prompt_as_they_were_sent() -> None:
    text = TOKENIZER.decode(
        TEMPLATE.render(
            [plain("user", "x"), assistant(calls=[{"name": "read_file", "arguments": '{"a": "<é>"}'}])], TOOLS
        )
    )
    assert json.dumps(TOOLS[0]) in text
    assert '{"name": "read_file", "arguments": {"a": "<é>"}}' in text


def test_thinking_changes_only_the_end_of_the_prompt() -> None:
    messages = [plain("user", "x"), assistant("y"), plain("user", "z")]
    on = TEMPLATE.render(messages, enable_thinking=True)
    off = TEMPLATE.render(messages, enable_thinking=False)
    assert off == [*on, TOKENIZER.special["end_think"]]


def test_remembered_parts_encode_like_new_ones() -> None:
    text = "def f(x):\n    return x\n" * 20
    assert TOKENIZER.encode_part(text) == TOKENIZER.encode(text) == TOKENIZER.encode_part(text)
