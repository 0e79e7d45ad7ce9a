"""Answers that were not asked for as a stream: one JSON object, whole or not."""

from __future__ import annotations

import orjson
import pytest

from soakrig.soak.classify import classify
from soakrig.soak.reply import Reply

MESSAGE = {"role": "assistant", "content": "Done, and the tests pass."}
USAGE = {"prompt_tokens": 900, "completion_tokens": 7}


def answer(message: dict | None = None, finish: str | None = "stop", **more: object) -> bytes:
    choice = {"index": 0, "message": message or MESSAGE, "finish_reason": finish}
    return orjson.dumps({"object": "chat.completion", "choices": [choice], "usage": USAGE, **more})


def reply(data: bytes, ending: str = "eof", pieces: int = 3) -> Reply:
    found = Reply(whole=True, status=200)
    step = max(1, len(data) // pieces)
    for n, start in enumerate(range(0, len(data), step)):
        found.feed(data[start : start + step], 1.0 + n)
    found.finish(ending, 9.0)  # type: ignore[arg-type]
    return found


def test_a_whole_answer_is_ok_and_has_no_first_token() -> None:
    found = reply(answer())
    assert classify(found, tools=frozenset()).name == "ok"
    assert (found.text, found.prompt_tokens, found.output_tokens) == (MESSAGE["content"], 900, 7)
    assert found.first_token_at is found.first_answer_at is found.last_token_at is None
    assert found.first_byte_at == 1.0


def test_calls_of_a_whole_answer() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a"}'}}
    found = reply(answer({"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"))
    assert classify(found, tools={"read_file"}).name == "ok"
    assert found.calls[0].argument_text == '{"path": "a"}'
    assert classify(found, tools={"other"}).name == "tool_malformed"


@pytest.mark.parametrize(
    ("data", "ending", "outcome"),
    [
        (b"", "eof", "empty_200"),
        (b"  \n", "eof", "empty_200"),
        (answer()[:-40], "eof", "malformed"),
        (answer()[:-40], "reset", "truncated"),
        (b"<html>busy</html>", "eof", "malformed"),
        (answer(finish=None), "eof", "truncated"),
        (answer({"role": "assistant", "content": ""}), "eof", "answerless"),
        (orjson.dumps({"error": {"message": "CUDA error"}}), "eof", "error_frame"),
        (answer()[:20], "stalled", "hung"),
        (b"data: [DONE]\n\n", "eof", "malformed"),
    ],
)
def test_what_is_not_whole(data: bytes, ending: str, outcome: str) -> None:
    assert classify(reply(data, ending), tools=frozenset()).name == outcome


def test_a_stream_is_read_as_one() -> None:
    found = Reply(status=200)
    found.feed(answer(), 1.0)
    found.finish("eof", 2.0)
    assert classify(found, tools=frozenset()).name == "malformed", "nobody asked for this"
