"""Events of a stream: however the bytes are cut, the same events, and joined exactly the bytes that came."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_bench import FIXTURES
from soakrig.engine.gateway.stream import MAX_EVENT, Event, EventCutter, EventTooLongError, payload, split_events

STREAM = b': hi\n\ndata: {"a": 1}\n\nevent: x\nid: 7\ndata: one\ndata: two\n\ndata:{"b":2}\n\ndata\n\ndata: [DONE]\n\n'
PAYLOADS = [None, b'{"a": 1}', b"one\ntwo", b'{"b":2}', b"", b"[DONE]"]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def events(chunks: list[bytes]) -> tuple[list[bytes], bytes]:
    cutter = EventCutter()
    found = [event for chunk in chunks for event in split_events(cutter.whole(chunk))]
    return found, cutter.rest()


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_any_cut_and_any_line_end(places: list[int], end: bytes) -> None:
    text = STREAM.replace(b"\n", end)
    found, rest = events(cut(text, places))
    assert b"".join(found) + rest == text
    # A CR at the very end may be half of a line end, so that the last event waits there.
    whole = [*found, rest] if rest else found
    assert [payload(event) for event in whole] == PAYLOADS
    assert rest == b"" or end == b"\r"
    assert found == events([text])[0]


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.sse")), ids=lambda path: path.stem)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_every_stream_at_every_byte(path: object, end: bytes) -> None:
    text = path.read_bytes().replace(b"\n", end)  # type: ignore[attr-defined]
    expected = events([text])
    assert b"".join(expected[0]) == text
    for place in range(len(text) + 1):
        assert events([text[:place], text[place:]]) == expected
    assert events([text[n : n + 1] for n in range(len(text))]) == expected


def test_an_unchanged_event_keeps_its_bytes_and_a_changed_one_its_other_fields() -> None:
    raw = b'id: 7\r\ndata: {"a" : 1.10}\r\n\r\n'
    event = Event.parse(raw)
    assert event.data == {"a": 1.1}
    assert event.encoded == raw
    event.changed = True
    assert event.encoded == b'id: 7\ndata: {"a":1.1}\n\n'
    short = Event.parse(b'data: {"a": 1}\n\n')
    short.changed = True
    assert short.encoded == b'data: {"a":1}\n\n'


@pytest.mark.parametrize("raw", [b": ping\n\n", b"data: [DONE]\n\n", b"data: {broken\n\n", b"data: [1]\n\n", b"\n\n"])
def test_what_is_no_object_passes(raw: bytes) -> None:
    event = Event.parse(raw)
    event.changed = True
    assert event.data is None
    assert event.encoded == raw
    assert event.is_done == (raw == b"data: [DONE]\n\n")


def test_half_a_surrogate_pair_and_a_nan_survive_a_change() -> None:
    event = Event.parse(b'data: {"t":"\\ud83d","n":NaN}\n\n')
    assert event.data is not None
    event.data["x"] = 1
    event.changed = True
    assert event.encoded == b'data: {"t":"\\ud83d","n":NaN,"x":1}\n\n'


def test_an_event_without_end_is_refused() -> None:
    cutter = EventCutter()
    assert cutter.whole(b"data: " + b"x" * (MAX_EVENT - 100)) == b""
    with pytest.raises(EventTooLongError, match="more than"):
        cutter.whole(b"x" * 200)


def test_what_is_left_over_is_told() -> None:
    cutter = EventCutter()
    assert cutter.whole(b"data: 1\n\ndata: ha") == b"data: 1\n\n"
    assert cutter.rest() == b"data: ha"
