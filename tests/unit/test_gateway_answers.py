"""Answers in every reported shape, streamed at every cut and whole: what each policy changes, and no byte more."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_bench import FIXTURES, fixture
from soakrig.engine.gateway.answer import AnswerEditor
from soakrig.engine.gateway.policies import Policies
from soakrig.engine.gateway.reasoning_memory import ReasoningMemory, place
from soakrig.engine.gateway.stream import EventCutter

STREAMS = sorted(path.name for path in FIXTURES.glob("*.sse"))
WHOLE = sorted(path.name for path in FIXTURES.glob("*.json") if not path.name.startswith("req-"))
REPAIRED = {
    "leak-key": [("list_dir", {"path": "/srv/app"})],
    "leak-name": [("list_dir", {})],
    "leak-nested": [
        ("apply_edit", {"edit": {"files": [{"name": "a.py"}, "b.py"]}, "deep": {"x": {"y": 1}}}),
    ],
    "leak-split": [("list_dir", {"path": "/srv/app"})],
    "leak-two-calls": [("list_dir", {"path": "/a"}), ("read_file", {"path": "/b"})],
}
TAGS = (b"</arg_key>", b"</arg_value>", b"<arg_value>")
SPLIT = ((b"path</a", b"path"), (b'"rg_"', b'""'), (b"key>", b""), (b"app</arg", b"app"), (b"_value>", b""))
TWO = ((b"path</arg_key", b"path"), (b'">\\":', b'"\\":'), (b"/b</arg_value", b"/b"), (b'">\\"}', b'"\\"}'))
MIRRORED = ("stream-reasoning", "empty-", "reasoning-", "null-content")


def run(data: bytes, cuts: list[int] | None = None, memory: ReasoningMemory | None = None, **policies: Any) -> bytes:
    """A stream through the editor, cut anywhere."""
    memory = ReasoningMemory() if memory is None else memory
    editor = AnswerEditor(Policies(**policies), memory, place([]), lambda policy: None)
    cutter = EventCutter()
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts or [])})
    out = b"".join(editor.feed(whole) for a, b in pairwise(places) if (whole := cutter.whole(data[a:b])))
    out += editor.end(cutter.rest())
    editor.close()
    return out


def whole(data: bytes, memory: ReasoningMemory | None = None, **policies: Any) -> bytes:
    memory = ReasoningMemory() if memory is None else memory
    editor = AnswerEditor(Policies(**policies), memory, place([]), lambda policy: None)
    out = editor.whole(data)
    editor.close()
    return out


def calls_of(stream: bytes) -> list[tuple[str, Any]]:
    """The calls as a client puts them together."""
    calls: dict[int, list[str]] = {}
    for line in stream.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                for part in choice["delta"].get("tool_calls", ()):
                    call = calls.setdefault(part["index"], ["", ""])
                    call[0] += part["function"].get("name", "")
                    call[1] += part["function"].get("arguments", "")
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


def expected_clean(name: str) -> bytes:
    """The fixture's own bytes without the tags: nothing else of it may change."""
    data = fixture(name)
    stem = name.rpartition(".")[0]
    if stem not in REPAIRED:
        return data
    for tag in TAGS:
        data = data.replace(tag, b"")
    pairs = {"leak-split": SPLIT, "leak-two-calls": TWO}.get(stem, ()) if name.endswith(".sse") else ()
    for old, new in pairs:
        assert data.count(old) == 1, old
        data = data.replace(old, new)
    return data


@pytest.mark.parametrize("name", STREAMS)
def test_sanitized_stream(name: str) -> None:
    cleaned = run(fixture(name), sanitize_tool_tags=True)
    assert cleaned == expected_clean(name)
    stem = name.removesuffix(".sse")
    if stem in REPAIRED:
        assert calls_of(cleaned) == REPAIRED[stem]
        assert cleaned != fixture(name)


@pytest.mark.parametrize("name", WHOLE)
def test_sanitized_whole_answer(name: str) -> None:
    cleaned = whole(fixture(name), sanitize_tool_tags=True)
    assert cleaned == expected_clean(name)
    stem = name.removesuffix(".json")
    if stem in REPAIRED:
        calls = [call["function"] for call in json.loads(cleaned)["choices"][0]["message"]["tool_calls"]]
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == REPAIRED[stem]


@pytest.mark.parametrize("name", STREAMS)
def test_mirrored_stream(name: str) -> None:
    before, after = fixture(name).decode().splitlines(), run(fixture(name), mirror_content=True).decode().splitlines()
    assert len(before) == len(after)
    mirrored = 0
    for old, new in zip(before, after, strict=True):
        if old == new:
            assert '"reasoning' not in old
            continue
        was, now = json.loads(old[6:]), json.loads(new[6:])
        delta, mine = was["choices"][0]["delta"], now["choices"][0]["delta"]
        (thought,) = (delta[key] for key in ("reasoning", "reasoning_content") if key in delta)
        assert mine == {**delta, "reasoning": thought, "reasoning_content": thought}
        now["choices"][0]["delta"] = delta
        assert now == was
        mirrored += 1
    assert (mirrored > 0) == name.startswith(MIRRORED)


@pytest.mark.parametrize("name", WHOLE)
def test_mirrored_whole_answer(name: str) -> None:
    before, after = fixture(name), whole(fixture(name), mirror_content=True)
    assert (after != before) == name.startswith(MIRRORED)
    if after != before:
        was, now = json.loads(before)["choices"][0]["message"], json.loads(after)["choices"][0]["message"]
        thought = was.get("reasoning") or was["reasoning_content"]
        assert now == {**was, "reasoning": thought, "reasoning_content": thought}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("policy", [{}, {"restore_reasoning": True}])
def test_no_policy_that_edits_changes_no_byte(name: str, policy: dict[str, bool]) -> None:
    assert run(fixture(name), **policy) == fixture(name)


@pytest.mark.parametrize("name", STREAMS)
def test_every_stream_cut_at_every_byte_gives_the_same(name: str) -> None:
    data = fixture(name)
    everything = {"sanitize_tool_tags": True, "mirror_content": True, "restore_reasoning": True}
    once = run(data, **everything)
    for place_ in range(len(data)):
        assert run(data, [place_], **everything) == once
    assert run(data, list(range(len(data))), **everything) == once


@settings(deadline=None)
@given(st.sampled_from(STREAMS), st.lists(st.integers(0, 3000), max_size=8), st.sampled_from([b"\n", b"\r\n"]))
def test_every_stream_cut_anywhere_with_any_line_end(name: str, cuts: list[int], end: bytes) -> None:
    data = fixture(name).replace(b"\n", end)
    policies = {"sanitize_tool_tags": True, "mirror_content": True}
    assert run(data, cuts, **policies) == run(data, **policies)


@pytest.mark.parametrize("name", ["stream-reasoning-vllm", "stream-reasoning-legacy", "stream-reasoning-call"])
def test_streamed_and_whole_answers_are_remembered_alike(name: str) -> None:
    streamed, at_once = ReasoningMemory(), ReasoningMemory()
    run(fixture(f"{name}.sse"), memory=streamed, restore_reasoning=True)
    whole(fixture(f"{name.removeprefix('stream-')}.json"), memory=at_once, restore_reasoning=True)
    call = {"id": "call_5c0e91", "function": {"name": "list_dir", "arguments": '{"path": "/srv/app"}'}}
    for memory in (streamed, at_once):
        echo: dict[str, Any] = {"role": "assistant", "content": "I read the tree first."}
        if name.endswith("call"):
            echo = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert memory.restore([echo]) == 1
        assert echo["reasoning"] == echo["reasoning_content"] == "The listing comes first — über den Baum."


def test_an_answer_that_broke_off_is_remembered_as_far_as_it_came() -> None:
    memory = ReasoningMemory()
    data = fixture("stream-reasoning-vllm.sse")
    run(data[: data.index(b"tree first")], memory=memory, restore_reasoning=True)
    echo: dict[str, Any] = {"role": "assistant", "content": "I read the "}
    assert memory.restore([echo]) == 1


def test_an_answer_that_has_both_names_is_not_written_anew() -> None:
    both = b'{"choices": [{"message": {"reasoning": "a",  "reasoning_content": "b"}}]}'
    assert whole(both, mirror_content=True) == both
    stream = b'data: {"choices": [{"delta": {"reasoning": "a",  "reasoning_content": ""}}]}\n\n'
    assert run(stream, mirror_content=True) == stream


def test_a_body_that_is_no_object_passes() -> None:
    for body in (b"[]", b"broken", b"", b"3"):
        assert whole(body, sanitize_tool_tags=True, mirror_content=True) == body
