"""Where logs quote what was sent or answered: runs of words that a prompt has too are found and hidden."""

from __future__ import annotations

import re
from collections.abc import Iterable

RUN = 5
"""Words in a row that a log and a prompt have in common by quoting only."""
SHORT = 12
"""Characters of a text of fewer words that is looked for as it stands."""
_QUOTED = re.compile(r"(['\"]).*\1", re.DOTALL)
_WORD = re.compile(r"[^\s\"'`<>(){}\[\],;|\\]+")
_EDGES = ".:!?*_-=#"
"""An address, a path or an id is one word: what they are made of is the redactor's to judge."""
_REQUEST_LOG = (
    (
        re.compile(r"(?P<name>\bprompt(?:_text)?[\"']?\s*[:=]\s*)(?P<quote>['\"])(?:\\.|(?!(?P=quote)).)*(?P=quote)"),
        "text",
    ),
    (re.compile(r"(?P<name>\b(?:prompt_)?token_ids[\"']?\s*[:=]\s*)\[[\d,\s]*\]?"), "token ids"),
    (re.compile(r"(?P<name>\"(?:content|text|arguments)\"\s*:\s*)(?P<quote>\")(?:\\.|[^\"\\])*\""), "text"),
)
"""Fields of engines' request logs that hold a prompt, whatever it says."""


class Quotes:
    """Knows the runs of words of some documents; ``feed`` takes prompts and notes which of those runs they have.

    So the documents, which are short, are in memory, and the prompts, which may be a gigabyte, are not.
    """

    def __init__(self, documents: Iterable[str]) -> None:
        self.documents = list(documents)
        self._runs = {run for text in self.documents for run in _runs(_words(text))}
        self._whole = "\n".join(self.documents)
        self.quoted: set[tuple[str, ...]] = set()
        self.short: set[str] = set()
        self.answers: set[str] = set()
        self.hidden = 0

    def feed(self, prompt: str) -> None:
        """Note what of ``prompt`` stands in the documents."""
        words = _words(prompt)
        if len(words) >= RUN:
            self.quoted.update(run for run in _runs(words) if run in self._runs)
        elif len(whole := prompt.strip()) >= SHORT and whole in self._whole:
            self.short.add(whole)

    def answer(self, why: str) -> None:
        """Note what ``why``, said of an answer's content, quotes of it."""
        if (match := _QUOTED.search(why)) is not None and len(match[0]) >= SHORT:
            self.answers.add(match[0])

    def hide(self, text: str) -> str:
        """``text`` with every quotation replaced by its length in words."""
        for wholes, what in ((self.answers, "answer"), (self.short, "prompt")):
            for whole in sorted(wholes, key=lambda one: (-len(one), one)):
                if whole in text:
                    self.hidden += 1
                    text = text.replace(whole, f"[{what}, {len(_words(whole))} words]")
        for pattern, what in _REQUEST_LOG:
            text = pattern.sub(lambda m, what=what: self._mark(m, what), text)
        return self._without_runs(text) if self.quoted else text

    def _mark(self, match: re.Match[str], what: str) -> str:
        self.hidden += 1
        return f"{match['name']}[prompt {what}]"

    def _without_runs(self, text: str) -> str:
        found = _found(text)
        words = [word for _, word in found]
        covered = [False] * len(words)
        for place, run in enumerate(_runs(words)):
            if run in self.quoted:
                covered[place : place + RUN] = [True] * RUN
        made, last, place = "", 0, 0
        while place < len(found):
            if not covered[place]:
                place += 1
                continue
            end = place
            while end < len(found) and covered[end]:
                end += 1
            made += f"{text[last : found[place][0].start()]}[prompt, {end - place} words]"
            last, place = found[end - 1][0].end(), end
            self.hidden += 1
        return made + text[last:]


def _found(text: str) -> list[tuple[re.Match[str], str]]:
    """The words with their places; an escaped newline parts words too, and keeps its two places."""
    plain = text.replace("\\n", "  ")
    return [(one, word) for one in _WORD.finditer(plain) if (word := one[0].strip(_EDGES).lower())]


def _words(text: str) -> list[str]:
    return [word for _, word in _found(text)]


def _runs(words: list[str]) -> list[tuple[str, ...]]:
    return [tuple(words[n : n + RUN]) for n in range(len(words) - RUN + 1)]
