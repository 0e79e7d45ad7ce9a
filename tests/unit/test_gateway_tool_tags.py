"""Tags that a parser left in a call: taken out at the seams, left where they may be quoted, whatever the cuts."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soakrig.engine.gateway.answer import clean_history
from soakrig.engine.gateway.stream import Event
from soakrig.engine.gateway.tool_tags import MAX_HELD, MAX_RUN, Scanner, StreamCleaner, clean_arguments, clean_name

CLEANED = {
    '{"path</arg_key>": "/srv"}': '{"path": "/srv"}',
    '{"path": "/srv</arg_value>"}': '{"path": "/srv"}',
    '{"<arg_key>path": "<arg_value>/srv</arg_value>"}': '{"path": "/srv"}',
    '{"path": "/srv</arg_value></tool_call>"}': '{"path": "/srv"}',
    '{"path": "/srv</arg_value>\\n </tool_call>"}': '{"path": "/srv\\n "}',
    '{"path": "/srv"}</arg_value></tool_call>': '{"path": "/srv"}',
    '<arg_value>{"path": "/srv"}': '{"path": "/srv"}',
    '{"path": "</arg_value>"}': '{"path": ""}',
    '{"path": "/srv\\u003c/arg_value\\u003e"}': '{"path": "/srv"}',
    '{"path": "/srv<\\/arg_value>"}': '{"path": "/srv"}',
    '{"a": {"b</arg_key>": ["x</arg_value>", 3, "</arg_value>y"]}}': '{"a": {"b": ["x", 3, "y"]}}',
    '{"path": "a\\\\</arg_value>"}': '{"path": "a\\\\"}',
    '{"path": "say \\"hi\\"</arg_value>"}': '{"path": "say \\"hi\\""}',
}
LEFT = [
    "",
    "{}",
    '{"path": "/srv < 3 && a</b> <tool> </arg_keys>"}',
    '{"text": "the parser misses </arg_key> at times"}',
    '{"text": "a <tool_call> b </tool_call> c"}',
    '{"text": "ends with </arg_ke"}',
    '{"text": "cut off </arg_value>',
    '{"text": "cut off </arg_va',
    '{"text": "\\\\u003c/arg_value\\\\u003e and more"}',
    '{"quote": "\\"</arg_value>\\" is a tag"}',
]


@pytest.mark.parametrize(("leaked", "clean"), CLEANED.items())
def test_taken_out(leaked: str, clean: str) -> None:
    assert clean_arguments(leaked) == clean
    assert clean_arguments(clean) == clean


@pytest.mark.parametrize("text", LEFT)
def test_left_as_it_is(text: str) -> None:
    assert clean_arguments(text) == text


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("list_dir</arg_value>", "list_dir"),
        ("<tool_call>list_dir\n<arg_key>", "list_dir"),
        ("list_dir", "list_dir"),
        (" odd <b> ", " odd <b> "),
    ],
)
def test_names(name: str, clean: str) -> None:
    assert clean_name(name) == clean


def pieces_of(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def spans(pieces: list[str]) -> list[tuple[int, int]]:
    scanner = Scanner()
    for piece in pieces:
        scanner.feed(piece)
    scanner.finish()
    assert scanner.settled == scanner.end == sum(map(len, pieces))
    return scanner.cuts


PARTS = st.sampled_from(
    [
        '"',
        "\\",
        "<",
        "</",
        "arg_key",
        ">",
        "</arg_key>",
        "<tool_call>",
        "\\u003c/arg_value\\u003e",
        " ",
        "\\n",
        "x",
        "{",
        "u003c",
    ]
)


@settings(deadline=None)
@given(st.lists(PARTS, max_size=30).map("".join), st.lists(st.integers(0, 120), max_size=10))
def test_the_cuts_do_not_depend_on_the_pieces(text: str, places: list[int]) -> None:
    assert spans(pieces_of(text, places)) == spans([text])
    assert spans(list(text)) == spans([text])


def test_a_long_run_of_tags_is_somebody_s_text() -> None:
    text = '{"a": "x' + "<arg_key>" * (MAX_RUN // 4) + ' y"}'
    assert clean_arguments(text) == text
    assert spans(list(text)) == []


def delta(text: str | None = None, index: int = 0, **more: object) -> bytes:
    function = {} if text is None else {"arguments": text}
    call = {"index": index, **more, "function": {**function, **({"name": more.pop("name")} if "name" in more else {})}}
    call.pop("name", None)
    data = {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}\n\n'


def streamed(*raw: bytes) -> list[bytes]:
    cleaner = StreamCleaner()
    out = [event.encoded for one in raw for event in cleaner.feed(Event.parse(one))]
    return out + [event.encoded for event in cleaner.end()]


def test_a_tag_over_two_deltas_and_nothing_else_changes() -> None:
    first, last = delta('{"path</arg'), delta('_key>": 1}')
    assert streamed(first, last, FINISH) == [delta('{"path'), delta('": 1}'), FINISH]


def test_an_event_waits_only_while_it_may_begin_a_tag() -> None:
    cleaner = StreamCleaner()
    assert [e.encoded for e in cleaner.feed(Event.parse(delta('{"a": "x <')))] == []
    both = cleaner.feed(Event.parse(delta(' 3"}')))
    assert [event.encoded for event in both] == [delta('{"a": "x <'), delta(' 3"}')]
    assert [e.encoded for e in cleaner.feed(Event.parse(delta('{"b": 2')))] == [delta('{"b": 2')]


def test_what_comes_after_a_waiting_event_waits_with_it() -> None:
    cleaner = StreamCleaner()
    other = delta('{"n": 1}', index=1, id="b")
    assert cleaner.feed(Event.parse(delta('{"path</arg_key>', id="a"))) == []
    assert cleaner.feed(Event.parse(other)) == []
    ended = cleaner.feed(Event.parse(delta('": 1}')))
    assert [event.encoded for event in ended] == [delta('{"path', id="a"), other, delta('": 1}')]
    assert cleaner.cleaned == 1


def test_the_finish_and_the_end_free_what_waits() -> None:
    half = delta('{"path": "/srv</arg')
    for end in (FINISH, b"data: [DONE]\n\n"):
        cleaner = StreamCleaner()
        assert cleaner.feed(Event.parse(half)) == []
        assert [event.encoded for event in cleaner.feed(Event.parse(end))] == [half, end]
    assert streamed(half, FINISH) == [half, FINISH]
    assert streamed(half, b"data: [DONE]\n\n") == [half, b"data: [DONE]\n\n"]
    assert streamed(half) == [half]


def test_calls_that_all_have_index_0_are_told_by_their_ids() -> None:
    quoted = delta('{"text": "see <arg_key> here"}', id="b", name="y")
    assert streamed(delta('{"path": "/srv', id="a", name="x"), quoted, FINISH)[1] == quoted
    leaked = delta('{"q</arg_key>": 1}', id="c", name="z")
    assert streamed(quoted, leaked, FINISH)[1] == delta('{"q": 1}', id="c", name="z")


def test_no_more_events_wait_than_the_limit() -> None:
    cleaner = StreamCleaner()
    freed = cleaner.feed(Event.parse(delta('{"path</arg_key')))
    ping = Event.parse(b": ping\n\n")
    for _ in range(MAX_HELD + 2):
        freed += cleaner.feed(ping)
    assert len(freed) == MAX_HELD + 3
    assert freed[0].encoded == delta('{"path</arg_key')


def test_a_history_is_cleaned_and_the_rest_of_it_left_alone() -> None:
    call = {"id": "c", "function": {"name": "list_dir</arg_value>", "arguments": '{"path</arg_key>":"/s"}'}}
    messages = [
        {"role": "user", "content": "</arg_key>"},
        {"role": "assistant", "tool_calls": [call, "odd", {}]},
        "odd",
    ]
    assert clean_history(messages) == 1
    assert call["function"] == {"name": "list_dir", "arguments": '{"path":"/s"}'}
    assert messages[0] == {"role": "user", "content": "</arg_key>"}
    assert clean_history(messages) == clean_history(None) == clean_history("x") == 0
