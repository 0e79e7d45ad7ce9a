"""The names of what can become of a turn. The rules that choose one are in ``soak.classify``."""

from __future__ import annotations

from typing import Literal, get_args

OutcomeName = Literal[
    "ok",
    "refused",
    "http_error",
    "empty_200",
    "answerless",
    "truncated",
    "error_frame",
    "hung",
    "malformed",
    "tool_malformed",
    "degenerate",
    "post_mortem",
    "aborted",
]
"""``aborted``: the tool itself ended the turn (second Ctrl-C, a run cut short). It says nothing about the engine and
makes a verdict inconclusive; every other name but ``ok`` makes it fail."""

OUTCOMES: tuple[OutcomeName, ...] = get_args(OutcomeName)

MARKS: dict[OutcomeName, str] = {
    "ok": ".",
    "refused": "R",
    "http_error": "H",
    "empty_200": "E",
    "answerless": "A",
    "truncated": "T",
    "error_frame": "F",
    "hung": "S",
    "malformed": "M",
    "tool_malformed": "C",
    "degenerate": "D",
    "post_mortem": "p",
    "aborted": "-",
}
"""One character a turn for the live view and the report."""

WORK_DONE: frozenset[OutcomeName] = frozenset(
    {"ok", "answerless", "truncated", "error_frame", "hung", "malformed", "tool_malformed", "degenerate"}
)
"""Outcomes that can count as exposure: the engine took the turn up and sent data."""

CONTENT: frozenset[OutcomeName] = frozenset({"answerless", "tool_malformed", "degenerate"})
"""Outcomes that speak of what the model wrote in a reply that was served whole."""
