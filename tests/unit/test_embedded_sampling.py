"""Sampling, stop strings and the worker's message framing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soakrig.engine.embedded.sampling import Sampler, SamplingParams, log_softmax, token_logprobs
from soakrig.engine.embedded.stop_strings import StopStrings
from soakrig.engine.embedded.wire import Framing, frame

LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.1, 0.025], dtype=np.float32))
ALL = np.arange(5)


def draws(params: SamplingParams, count: int = 4000, allowed: np.ndarray = ALL) -> np.ndarray:
    sampler = Sampler(params, np.random.default_rng(0))
    picked = [sampler.pick(LOGITS, allowed) for _ in range(count)]
    return np.bincount(picked, minlength=5) / count


def test_greedy_takes_the_best_of_what_is_allowed() -> None:
    assert draws(SamplingParams(temperature=0.0), 5).tolist() == [1, 0, 0, 0, 0]
    assert draws(SamplingParams(temperature=0.0), 5, np.array([2, 4])).tolist() == [0, 0, 1, 0, 0]


def test_draws_follow_the_distribution() -> None:
    assert draws(SamplingParams()).tolist() == pytest.approx([0.5, 0.25, 0.125, 0.1, 0.025], abs=0.03)
    hot = np.exp(LOGITS / 2.0)
    assert draws(SamplingParams(temperature=2.0)).tolist() == pytest.approx((hot / hot.sum()).tolist(), abs=0.03)


def test_top_p_and_top_k_leave_the_tail_out() -> None:
    assert draws(SamplingParams(top_p=0.7))[2:].sum() == 0
    assert draws(SamplingParams(top_p=0.7))[1] > 0.2
    assert draws(SamplingParams(top_p=0.001))[0] == 1
    assert draws(SamplingParams(top_k=3))[3:].sum() == 0


def test_logprobs_carry_rank_and_the_token_itself() -> None:
    table = log_softmax(LOGITS * 1.0)
    assert np.exp(table).sum() == pytest.approx(1.0, abs=1e-6)
    rows = token_logprobs(table, 3, 2)
    assert [(row[0], row[2]) for row in rows] == [(3, 4), (0, 1), (1, 2)]
    assert rows[0][1] == pytest.approx(np.log(0.1), abs=1e-5)
    assert [(row[0], row[2]) for row in token_logprobs(table, 1, 2)] == [(1, 2), (0, 1)]
    assert token_logprobs(table, 4, 0) == [[4, pytest.approx(np.log(0.025), abs=1e-5), 5]]


@given(
    st.text(alphabet="abc", max_size=40),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_stop_strings_end_at_the_first_one_however_the_text_comes(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    stop = StopStrings(stops)
    sent, place, hit = "", 0, False
    while place < len(text) and not hit:
        size = data.draw(st.integers(1, 5))
        piece, hit = stop.feed(text[place : place + size])
        sent, place = sent + piece, place + size
        assert not any(one in sent for one in stops)
    sent += "" if hit else stop.flush()
    found = [place for place in (text.find(one) for one in stops) if place >= 0]
    assert hit == bool(found)
    if not hit:
        assert sent == text
    else:
        assert text.startswith(sent)
        assert any(text.startswith(one, len(sent)) for one in stops)


@given(st.lists(st.dictionaries(st.text(), st.integers(-(2**53), 2**53)), max_size=5), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_messages_survive_any_cut(messages: list[dict[str, int]], size: int) -> None:
    data = b"".join(frame(message) for message in messages)
    framing = Framing()
    found = [one for start in range(0, len(data), size) for one in framing.feed(data[start : start + size])]
    assert found == messages
