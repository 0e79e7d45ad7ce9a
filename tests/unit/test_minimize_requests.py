"""The requests of a smaller load: what stays the same, what goes, and that a server would still take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimize_world import material
from soakrig.bisect.minimize.requests import least_context, shaped, whole_shape
from soakrig.bisect.minimize.shape import Shape
from soakrig.errors import StoreError
from soakrig.record.request_log import read_requests, write_requests

MATERIAL = material(conversations=2)
WHOLE = whole_shape(MATERIAL)


def body(request: Any) -> dict[str, Any]:
    return orjson.loads(request.body)


def tokens(request: Any) -> float:
    """As the material counts: definitions at 3.5 bytes, messages at 3."""
    data = body(request)
    definitions = len(orjson.dumps(data["tools"])) / 3.5 if "tools" in data else 0.0
    return definitions + sum(len(orjson.dumps(one)) + 1 for one in data["messages"]) / 3.0


def test_the_whole_is_the_run_to_the_byte() -> None:
    assert Shape(2, 6, 1, 96, 12, WHOLE.context) == WHOLE
    assert shaped(MATERIAL, WHOLE) == [list(one) for one in MATERIAL.conversations]
    assert tokens(MATERIAL.last) == pytest.approx(WHOLE.context, rel=0.01)


def test_tools_go_and_the_prompt_stays_as_long() -> None:
    for count in (11, 5, 1, 0):
        (lane,) = shaped(MATERIAL, WHOLE.with_("conversations", 1).with_("requests", 1).with_("tools", count))
        (request,) = lane
        assert len(body(request).get("tools", [])) == count
        assert tokens(request) == pytest.approx(WHOLE.context, rel=0.02)
    assert "tools" not in body(request)
    assert "tool_choice" not in body(request), "a choice among no tools is refused"


def test_shorter_prompts_lose_whole_rounds_from_the_oldest_on() -> None:
    for share in (0.95, 0.85, 0.75):
        context = round(WHOLE.context * share)
        ((request,),) = shaped(MATERIAL, WHOLE.with_("conversations", 1).with_("requests", 1).with_("context", context))
        assert tokens(request) == pytest.approx(context, rel=0.02)
        messages = body(request)["messages"]
        assert [one["role"] for one in messages[:2]] == ["system", "user"]
        assert all(one["role"] in ("assistant", "tool") for one in messages[2:])
        calls = {call["id"] for one in messages for call in one.get("tool_calls", ())}
        assert calls == {one["tool_call_id"] for one in messages if one["role"] == "tool"}
        assert orjson.dumps(messages[-1]) == MATERIAL.last.messages[-1] or len(messages) == 2


def test_the_least_context_is_the_opening_alone() -> None:
    for count in (0, 12):
        least = least_context(MATERIAL, count)
        shape = WHOLE.with_("conversations", 1).with_("requests", 1).with_("tools", count).with_("context", least)
        ((request,),) = shaped(MATERIAL, shape)
        assert len(body(request)["messages"]) == 2
        assert tokens(request) == pytest.approx(least, abs=3)


@given(
    st.integers(1, 2), st.integers(1, 6), st.integers(0, 1), st.integers(1, 96), st.integers(0, 12),
    st.integers(1, WHOLE.context),
)  # fmt: skip
def test_every_shape_is_a_load_that_a_server_takes(c: int, r: int, s: int, m: int, t: int, x: int) -> None:
    shape = Shape(c, r, s, m, t, x)
    lanes = shaped(MATERIAL, shape)
    assert [len(lane) for lane in lanes] == [r] * c
    for lane in lanes:
        for before, request in zip([None, *lane], lane, strict=False):
            data = body(request)
            assert data["max_tokens"] == m
            assert data["stream"] is bool(s)
            assert ("stream_options" in data) is bool(s)
            assert data["messages"][0]["role"] == "system"
            assert data["messages"][-1]["role"] in ("user", "tool")
            if before is not None:  # one request stays the beginning of the next: a prefix cache sees what it saw
                assert request.messages[: len(before.messages)] == before.messages


def test_one_request_without_a_text_of_a_user_is_left_as_it_is() -> None:
    plain = material(turns=1, count=0, max_completion_tokens=40)
    shape = whole_shape(plain)
    assert (shape.tools, shape.max_tokens, shape.requests) == (0, 96, 1)
    parts = [orjson.dumps({"role": "user", "content": [{"type": "text", "text": "x" * 90}]})]
    odd = type(plain)(
        plain.signature, ((plain.last.__class__(0, 1, plain.last.head, tuple(parts), {}),),), 20.0, 3.0, True
    )
    ((request,),) = shaped(odd, whole_shape(odd).with_("stream", 0).with_("context", 1))
    assert list(request.messages) == parts


def test_requests_are_written_as_they_are_read(tmp_path: Path) -> None:
    lanes = shaped(MATERIAL, WHOLE)
    write_requests(tmp_path, lanes)
    found = list(read_requests(tmp_path))
    assert [one.body for one in found] == [one.body for lane in lanes for one in lane]
    write_requests(tmp_path, lanes[:1])
    assert len(list(read_requests(tmp_path))) == 6, "what was there is replaced"
    odd = [lanes[0][3], lanes[0][1], lanes[1][5]]  # neither grows from the one before
    write_requests(tmp_path, [odd])
    assert [one.body for one in read_requests(tmp_path)] == [one.body for one in odd]
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot write"):
        write_requests(tmp_path / "file", lanes)
