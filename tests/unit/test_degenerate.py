"""Text without information, and text that only looks like it."""

from __future__ import annotations

import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soakrig.soak.agent import results
from soakrig.soak.degenerate import repeated_tail, why_degenerate


@pytest.mark.parametrize(
    "text",
    [
        "!" * 64,
        "!!!!" * 64,
        "the " * 60,
        "A fair start of a sentence. " + "and then it went on " * 20,
        "\n" * 200,
        "\0" * 20,
        "ok \ufffd\ufffd\ufffd" * 10,
        "line one\nline two\nline three\n" * 12,
    ],
)
def test_loops_and_garbage(text: str) -> None:
    assert why_degenerate(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "!!!!",
        "ok",
        "no no no no no no",
        "-" * 60 + "\nTotal 12 files, 3 changed, which is what was asked for.\n",
        "def f(x):\n    return x\n\n\ndef g(x):\n    return x + 1\n\n\ndef h(x):\n    return x + 2\n",
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n| 5 | 6 |\n",
        "x = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]\nThe table is padded with zeros up to the block's end.",
        "caf\ufffd au lait is what the log says, since it was written in another encoding",
    ],
)
def test_sound_text(text: str) -> None:
    assert why_degenerate(text) == ""


@pytest.mark.parametrize(
    "tool", ["read_file", "list_dir", "git_diff", "run_tests", "search_text", "query_database", "x"]
)
def test_no_tool_result_looks_degenerate(tool: str) -> None:
    for seed in range(200):
        text = results.result_of(tool, random.Random(seed), scale=3.0)
        assert why_degenerate(text) == "", text


@given(st.text(alphabet="ab", min_size=1, max_size=12), st.integers(6, 60), st.text(max_size=30))
@settings(max_examples=200)
def test_the_tail_found_is_a_cycle_of_its_period(cycle: str, times: int, before: str) -> None:
    text = before + cycle * times
    period, length = repeated_tail(text)
    assert length >= len(cycle) * times
    tail = text[-length:]
    assert all(tail[i] == tail[i + period] for i in range(len(tail) - period))
    assert period <= len(cycle)


def test_random_text_has_no_cycle() -> None:
    rng = random.Random(7)
    for _ in range(50):
        text = "".join(rng.choice(string.ascii_letters + " ") for _ in range(2000))
        assert why_degenerate(text) == ""
