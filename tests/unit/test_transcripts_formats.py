"""Formats of a transcript: told apart by what stands in the file, each kept in its shape, none guessed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from soakrig.errors import UsageError
from soakrig.soak.probe import Probe
from soakrig.soak.transcript import open_transcript, read_transcript
from soakrig.soak.transcripts.formats import read_file

TALK = {
    "id": "x1",
    "conversations": [
        {"from": "human", "value": "Where is the log?"},
        {"from": "function_call", "value": '{"name": "list_dir", "arguments": {"path": "/srv"}}'},
        {"from": "observation", "value": "a.log"},
        {"from": "gpt", "value": "It is a.log."},
        {"from": "human", "value": "Thanks."},
    ],
    "system": "You help.",
    "tools": json.dumps([{"name": "list_dir", "description": "lists", "parameters": {"type": "object"}}]),
}
ARRIVAL = {"timestamp": 1000, "input_length": 600, "output_length": 9, "hash_ids": [4, 5]}


def write(folder: Path, *lines: Any, name: str = "t.json") -> Path:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def bodies(path: Path) -> list[list[dict[str, Any]]]:
    return [[json.loads(line.body) for line in session] for session in read_transcript(path, model="ours")]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_sharegpt_array_grows_as_it_grew_then(tmp_path: Path, indent: int | None) -> None:
    path = write(tmp_path, json.dumps([TALK, {"conversations": [{"from": "gpt", "value": "alone"}]}], indent=indent))
    (session,) = bodies(path)
    assert [len(body["messages"]) for body in session] == [2, 4, 6]
    assert [message["role"] for message in session[-1]["messages"]] == [
        "system", "user", "assistant", "tool", "assistant", "user"
    ]  # fmt: skip
    call = session[-1]["messages"][2]["tool_calls"][0]
    assert call["function"] == {"name": "list_dir", "arguments": '{"path":"/srv"}'}
    assert session[-1]["messages"][3]["tool_call_id"] == call["id"]
    assert session[0]["tools"][0]["function"]["name"] == "list_dir"
    assert all(body["model"] == "ours" and body["stream"] for body in session)
    for before, after in pairwise(session):
        assert after["messages"][: len(before["messages"])] == before["messages"]
    said = open_transcript(path).said()
    assert said[0] == "t.json was read as ShareGPT conversations: 3 requests in 1 sessions"
    assert "1 conversations in which nobody asks anything are left out" in said
    assert "the column 'id' is not sent" in said


def test_an_answer_that_nobody_asked_for_is_history_and_no_request(tmp_path: Path) -> None:
    said = [("gpt", "Hello, what is it?"), ("human", "Where?"), ("gpt", "Here."), ("gpt", "And there.")]
    talk = {"conversations": [{"from": who, "value": text} for who, text in said], "system": "You help."}
    (session,) = bodies(write(tmp_path, talk))
    assert [[m["role"] for m in body["messages"]] for body in session] == [["system", "assistant", "user"]]


def test_sharegpt_sessions_are_dealt_to_the_places(tmp_path: Path) -> None:
    other = {"conversations": [{"from": "user", "value": "Hi"}, {"from": "bard", "value": "Hello"}]}
    path = write(tmp_path, TALK, other, TALK, name="t.jsonl")
    talk = open_transcript(path, places=2)
    assert (talk.parallel, talk.lanes) == (2, [7])
    one, two = talk.conversations(Probe("m"))
    turns = [one.next_turn() for _ in range(3)] + [two.next_turn(), two.next_turn()]
    assert [(t.conversation, t.turn, t.part) for t in turns] == [(0, 1, 0), (0, 2, 0), (0, 3, 0), (1, 1, 0), (1, 2, 1)]
    assert [one.next_turn(), two.next_turn().turn, two.next_turn().turn, two.next_turn()] == [None, 3, 4, None]
    again = open_transcript(path).conversations(Probe("m"), over_again=True)[0]
    assert [again.next_turn().part for _ in range(9)] == [0, 0, 0, 1, 2, 2, 2, 3, 3], "from the first again"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"prompt": "x"}'], "line 1 fits no format of a transcript: it is an object with 'prompt'"),
        (["7"], "line 1 fits no format of a transcript: it is int 7"),
        (["", "{not json"], "line 2 is no JSON"),
        (['[{"instruction": "x"}]'], "whose first item fits no format: it has 'instruction'"),
        (['[{"messages": []}]'], "whose first item fits no format"),
        ([TALK, {"messages": []}], "line 2 is no conversation"),
        ([TALK, {**TALK, "convrsations": 1}], "unknown field 'convrsations'; 'conversations' was meant"),
        ([{**TALK, "images": ["a.png"]}], "'images': pictures cannot be sent"),
        ([{"conversations": [{"from": "robot", "value": "x"}]}], "nobody knows the speaker 'robot'"),
        ([{"conversations": [{"from": "human"}]}], "entry 1 is no"),
        ([{"conversations": [{"from": "function_call", "value": "ls"}]}], "function call is no JSON"),
        ([{**TALK, "tools": "none"}], "tools is no JSON"),
        ([{"conversations": [{"from": "gpt", "value": "x"}]}], "holds a question"),
        ([ARRIVAL, {**ARRIVAL, "hash_id": [1]}], "line 2 has the unknown field 'hash_id'; 'hash_ids' was meant"),
        ([ARRIVAL, {**ARRIVAL, "timestamp": 999}], "line 2: its timestamp is before"),
        ([{**ARRIVAL, "input_length": 0}], "input_length is 0"),
        ([{**ARRIVAL, "output_length": True}], "output_length is True"),
        ([{**ARRIVAL, "hash_ids": [1, "2"]}], "hash_ids is"),
        ([{**ARRIVAL, "hash_ids": [1, 2, 3, 4]}], "4 hash_ids for 600 tokens, expected 2 at 512"),
        ([{**ARRIVAL, "chat_id": 1}], "Bailian"),
        ([ARRIVAL, [1]], "line 2 is list"),
    ],
)
def test_what_does_not_fit_is_named_by_its_line(tmp_path: Path, lines: list[Any], says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("(", r"\(")) as caught:
        read_file(write(tmp_path, *lines, name="t.jsonl"))
    assert caught.value.exit_code == 64


def test_a_trace_is_read_with_its_times_and_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        ARRIVAL,
        {**ARRIVAL, "timestamp": 3500.5, "hash_ids": [4]},
        {**ARRIVAL, "timestamp": 4000, "hash_ids": []},
    )
    found = read_file(path)
    assert found.form == "mooncake"
    assert [(e.due_s, e.input_tokens, e.output_tokens, e.blocks) for e in found.entries] == [
        (0.0, 600, 9, (4, 5)), (2.5005, 600, 9, (4,)), (3.0, 600, 9, ())
    ]  # fmt: skip
    assert read_file(write(tmp_path, {**ARRIVAL, "hash_ids": [1, 2, 3]}), block_tokens=256).entries[0].blocks == (
        1,
        2,
        3,
    )


def test_options_that_mean_nothing_to_what_was_found_are_refused(tmp_path: Path) -> None:
    trace = write(tmp_path, ARRIVAL)
    with pytest.raises(UsageError, match="holds nobody's text"):
        open_transcript(trace, anonymise=True)
    talk = open_transcript(write(tmp_path, TALK, name="t.jsonl"))
    assert talk.facts["format"] == "sharegpt"
    assert talk.facts["requests"] == 3
