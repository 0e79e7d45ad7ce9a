"""The event-stream parser: however the bytes are cut, the same payloads come out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soakrig.soak.sse import MAX_EVENT, SSEError, SSEParser

STREAM = b'data: {"a": 1}\n\ndata: {"b": 2}\n\n: ping\n\nevent: x\nid: 7\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": 1}', b'{"b": 2}', b"one\ntwo", b"[DONE]"]


def parse(*chunks: bytes) -> list[bytes]:
    parser = SSEParser()
    return [payload for chunk in chunks for payload in parser.feed(chunk)]


def test_whole_events_in_one_chunk() -> None:
    assert parse(STREAM) == PAYLOADS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_any_cut_and_any_line_end_gives_the_same_payloads(cuts: list[int], end: bytes) -> None:
    text = STREAM.replace(b"\n", end)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in pairwise(places)]
    assert parse(*chunks) == PAYLOADS


def test_a_chunk_that_only_looks_whole_is_read_line_by_line() -> None:
    assert parse(b"data: a\ndata: b\n\n") == [b"a\nb"]
    assert parse(b"data: a\n\n: comment\n\n") == [b"a"]
    assert parse(b"data: a\r\n\r\ndata: b\n\n") == [b"a", b"b"]


def test_what_is_left_over_is_told() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: half") == []
    assert parser.rest() == b"data: half"


@pytest.mark.parametrize("text", [b"<html>\n", b'{"id": 1}\n', b"HTTP/1.1 200 OK\n", b"data\x00x: 1\n"])
def test_other_protocols_are_refused(text: bytes) -> None:
    with pytest.raises(SSEError):
        SSEParser().feed(text)


def test_an_event_without_end_is_refused() -> None:
    parser = SSEParser()
    parser.feed(b"data: " + b"x" * (MAX_EVENT - 100))
    with pytest.raises(SSEError, match="more than"):
        parser.feed(b"x" * 200)
