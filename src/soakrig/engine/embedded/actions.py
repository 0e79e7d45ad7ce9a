"""What a reply is made of: forced text, free spans and choices, in the order in which a script asks for them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

Channel = Literal["reasoning", "content", "name", "arguments", "hidden"]
"""Where text goes in the answer; ``hidden`` tokens count, but have no text (special tokens, a call's frame)."""


@dataclass(frozen=True, slots=True)
class Forced:
    """Text that has no alternative: computed together, never sampled."""

    channel: Channel
    text: str


@dataclass(frozen=True, slots=True)
class Special:
    """One special token, by its name in the tokenizer."""

    name: str


@dataclass(frozen=True, slots=True)
class Span:
    """``tokens`` tokens that the model chooses among a set of clean pieces.

    ``max_chars`` ends the span before a token that would pass it; ``min_chars`` goes on past ``tokens`` until reached.
    The script gets the text.
    """

    channel: Channel
    pieces: Literal["text", "string"]
    tokens: int
    min_chars: int = 0
    max_chars: int | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """``shown`` is what the answer carries, ``written`` what the model writes (with what closes it)."""

    shown: str
    written: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of ``options``, chosen by the model token by token. The script gets what is shown."""

    channel: Channel
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class OneToken:
    """A planted fault: this token until the request's limit."""

    token: int


Action = Forced | Special | Span | Choice | OneToken
Script = Generator[Action, str, None]
