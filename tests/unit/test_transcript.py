"""Transcripts: what a line may be, and what a bad one gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soakrig.errors import UsageError
from soakrig.soak.classify import Outcome
from soakrig.soak.reply import Reply
from soakrig.soak.transcript import TranscriptConversation, read_transcript, transcript_facts

ASK = {"role": "user", "content": "What is in the folder?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "list_dir", "arguments": "{}"}}],
}
SAID = {"role": "tool", "tool_call_id": "c1", "content": "a.py"}
TOOL = {"type": "function", "function": {"name": "list_dir", "parameters": {"type": "object"}}}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "talk.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_requests_and_message_lists_and_blank_lines(tmp_path: Path) -> None:
    request = {"model": "theirs", "messages": [ASK], "tools": [TOOL], "temperature": 0.2, "stream": False}
    path = write(tmp_path, request, "", [ASK, CALL, SAID])
    (lane,) = read_transcript(path, model="ours", max_tokens=99)
    talk = TranscriptConversation(0, lane, over_again=True)
    first = talk.next_turn()
    sent = json.loads(first.body)
    assert sent["model"] == "ours"
    assert sent["messages"] == [ASK]
    assert sent["temperature"] == 0.2
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}
    assert sent["max_tokens"] == 99
    assert first.tools == {"list_dir"}
    talk.answered(Reply(usage={"prompt_tokens": 77}), Outcome("ok"))
    second = talk.next_turn()
    assert json.loads(second.body)["messages"] == [ASK, CALL, SAID]
    assert second.part == 0, "the first message list is a prefix of the second"
    third = talk.next_turn()
    assert third.body == first.body, "after the last line the first comes again"
    assert third.part == 1
    assert third.context_tokens == 77, "the engine's own count is remembered"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "line 2 is no JSON"),
        ('"text"', "line 2 is str"),
        ({"messages": [ASK], "temprature": 1}, "unknown field 'temprature'"),
        ({"messages": []}, "no messages"),
        ({"prompt": "x"}, "unknown field 'prompt'"),
        ([{"role": "robot", "content": "x"}], "message 1 has the role 'robot'"),
        ([ASK, "text"], "message 2 has the role None"),
        ([{"role": ["user"], "content": "x"}], "message 1 has the role"),
        ([{"role": "user", "content": 5}], "message 1 has a content"),
        ({"messages": [ASK], "tools": "all"}, "tools is no list"),
        ({"messages": [ASK], "tools": [1]}, "tools is no list"),
        ({"messages": [ASK], "max_tokens": "a"}, "max_tokens is 'a'"),
        ({"messages": [ASK], "max_tokens": 99999999999}, "max_tokens is 99999999999"),
        ({"messages": [ASK], "temperature": -1}, "temperature is -1"),
        ({"messages": [ASK], "n": 2}, "asks for n=2"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_sent(tmp_path: Path, line: object, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read_transcript(write(tmp_path, [ASK], line))
    assert "talk.jsonl line 2" in str(caught.value)
    assert caught.value.exit_code == 64


def test_a_transcript_ends_unless_it_is_to_be_sent_over_again(tmp_path: Path) -> None:
    (lane,) = read_transcript(write(tmp_path, [ASK], [ASK, CALL, SAID]))
    talk = TranscriptConversation(0, lane)
    assert [talk.next_turn() is not None for _ in range(4)] == [True, True, False, False]


def test_what_is_no_file_is_refused() -> None:
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        read_transcript(Path("/dev/zero"))


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no request"):
        read_transcript(write(tmp_path, ""))
    with pytest.raises(UsageError, match="cannot be read"):
        read_transcript(tmp_path / "nothing.jsonl")


def test_the_record_keeps_place_length_and_hash(tmp_path: Path) -> None:
    path = write(tmp_path, [ASK], [ASK, CALL, SAID])
    facts = transcript_facts(path, read_transcript(path))
    assert facts["requests"] == 2
    assert len(facts["sha256"]) == 64
