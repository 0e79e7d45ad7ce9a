"""Text without information: one token or one short cycle for ever, NUL or replacement garbage."""

from __future__ import annotations

MIN_ONE = 16
MIN_TAIL = 64
"""Characters of repetition below which nothing is said: rulers, indentation and short lists repeat as well."""
MAX_PERIOD = 128
MIN_CYCLES = 6
TAIL_SHARE = 0.5
WINDOW = 4096
PROBE = 32
MIN_GARBAGE = 16
GARBAGE_SHARE = 0.3


def why_degenerate(text: str) -> str:
    """The reason when ``text`` carries no information, else an empty string.

    A text is degenerate when its end is one cycle of at most 128 characters, repeated at least 6 times over at least
    64 characters and making up at least half of the text (of its last 4096 characters): a model that looped goes on
    looping, so only the end counts. Or when it is one character at least 16 times and nothing else; or when at least 16
    characters, and 30 % of all, are NUL or U+FFFD.
    """
    garbage = text.count("\0") + text.count("\ufffd")
    if garbage >= MIN_GARBAGE and garbage >= GARBAGE_SHARE * len(text):
        return f"{garbage} of {len(text)} characters are NUL or U+FFFD"
    if len(text) >= MIN_ONE and text == text[0] * len(text):
        return f"{len(text)} times {text[0]!r} and nothing else"
    if len(text) < MIN_TAIL or text.rfind(text[-PROBE:], -PROBE - MAX_PERIOD, -1) < 0:
        return ""  # the last 32 characters stand at no distance of up to 128 before: no such cycle can end here
    window = text[-WINDOW:]
    period, length = repeated_tail(window)
    if period and length >= MIN_TAIL and length >= MIN_CYCLES * period and length >= TAIL_SHARE * len(window):
        return f"the last {length} characters repeat {window[-period:]!r}"
    return ""


def repeated_tail(text: str) -> tuple[int, int]:
    """The longest end of ``text`` that is a cycle: its period (at most 128) and its length in characters, (0, 0)
    without one.

    The prefix function of Knuth, Morris and Pratt over the reversed text: a prefix of length n whose border is b has
    period n - b. Linear in the text.
    """
    backward = text[::-1]
    border = [0] * len(backward)
    best = (0, 0)
    k = 0
    for i in range(1, len(backward)):
        while k and backward[i] != backward[k]:
            k = border[k - 1]
        if backward[i] == backward[k]:
            k += 1
        border[i] = k
        period = i + 1 - k
        if k and period <= MAX_PERIOD and i + 1 >= MIN_CYCLES * period:
            best = (period, i + 1)
    return best
