"""Template markup that a tool-call parser left in a call: taken out of answers, streamed or not, and of histories.

A parser that misses a tag leaves it where two parts of a call meet: at an end of a key or of a text, outside any text,
or in the function's name. There it is taken out. In the midst of a text it stays, since it may be quoted: a file about
such templates holds the same letters.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from soakrig.engine.gateway.body import Json, inner, objects
from soakrig.engine.gateway.stream import Event

NAMES = ("arg_key", "arg_value", "tool_call")
MAX_RUN = 256
"""Characters of tags and space in a row beyond which they are somebody's text."""
MAX_HELD = 64
"""Events that may wait for the rest of what may be a tag."""

_OPEN, _SLASH, _CLOSE = ("<", "\\u003c", "\\u003C"), ("", "/", "\\/"), (">", "\\u003e", "\\u003E")
_SPELLED = [a + b + name + c for a in _OPEN for b in _SLASH for name in NAMES for c in _CLOSE]
_STARTS = frozenset(tag[:length] for tag in _SPELLED for length in range(1, len(tag)))
"""What may still become a tag."""
_TAG = re.compile("|".join(re.escape(tag) for tag in _SPELLED))
_OUTSIDE = re.compile(r'["<]')
_INSIDE = re.compile(r'["<\\]')
_SPACE = re.compile(r"[ \t\r\n]|\\[nrt]")


class Scanner:
    """Reads the JSON text of a call's arguments piece by piece and finds the spans to cut (offsets from the start).

    ``settled`` is the offset up to which nothing can change any more. The spans do not depend on how the text was cut.
    """

    __slots__ = ("_base", "_fresh", "_inside", "_tail", "cuts", "settled")

    def __init__(self) -> None:
        self.cuts: list[tuple[int, int]] = []
        self.settled = 0
        self._base = 0
        self._tail = ""
        self._inside = self._fresh = False

    @property
    def end(self) -> int:
        """The offset behind everything that was fed."""
        return self._base + len(self._tail)

    def feed(self, piece: str) -> None:
        """Take in the next piece."""
        self._tail += piece
        self._run(final=False)

    def finish(self) -> None:
        """Nothing more comes: what waited is text."""
        self._run(final=True)

    def drop(self, upto: int) -> None:
        """Forget cuts before an offset that was sent."""
        while self.cuts and self.cuts[0][1] <= upto:
            del self.cuts[0]

    def _run(self, *, final: bool) -> None:
        at, text = 0, self._tail
        while at < len(text):
            here = self._step(text, at, final)
            if here == at:
                break
            at = here
        self._base += at
        self._tail = text[at:]
        self.settled = self._base

    def _step(self, text: str, at: int, final: bool) -> int:
        """The next offset, the same one where more has to come first."""
        found = (_INSIDE if self._inside else _OUTSIDE).search(text, at)
        if found is None or found.start() > at:
            self._fresh = False
            return len(text) if found is None else found.start()
        if text[at] == '"':
            self._inside = self._fresh = not self._inside
            return at + 1
        end, tags, waits = _tags_from(text, at)
        if waits and not final:
            return at
        if tags and (not self._inside or self._fresh or text[end : end + 1] == '"'):
            self.cuts += [(self._base + start, self._base + stop) for start, stop in tags]
        self._fresh = False
        if end > at:
            return end
        return min(at + 2, len(text)) if text[at] == "\\" else at + 1


def _tags_from(text: str, at: int) -> tuple[int, list[tuple[int, int]], bool]:
    """Tags in a row from ``at``, with space between: where they end, their spans, and whether more may come."""
    here = at
    tags: list[tuple[int, int]] = []
    while here - at < MAX_RUN:
        tag = _TAG.match(text, here)
        if tag is not None:
            tags.append(tag.span())
        space = _SPACE.match(text, here) if tag is None and tags else None
        step = tag or space
        if step is None:
            rest = text[here : here + 32]
            return here, tags, rest in _STARTS or (not rest and bool(tags))
        here = step.end()
    return here, [], False


def clean_arguments(text: str) -> str:
    """A call's whole arguments without leaked tags."""
    if "arg_" not in text and "tool_call" not in text:
        return text
    scanner = Scanner()
    scanner.feed(text)
    scanner.finish()
    return _without(text, 0, scanner.cuts)


def clean_name(name: str) -> str:
    """A function's name without tags."""
    cleaned = _TAG.sub("", name)
    return cleaned.strip() if cleaned != name else name


def clean_calls(message: Json) -> bool:
    """Clean the calls of a whole message, an answer's or one of a history; whether anything was taken out."""
    changed = False
    for call in objects(message.get("tool_calls")):
        function = inner(call, "function")
        for field_name, clean in (("name", clean_name), ("arguments", clean_arguments)):
            value = function.get(field_name)
            if isinstance(value, str) and (cleaned := clean(value)) != value:
                function[field_name] = cleaned
                changed = True
    return changed


def _without(text: str, start: int, cuts: list[tuple[int, int]]) -> str:
    """``text``, which begins at offset ``start``, without the cuts."""
    parts: list[str] = []
    at = 0
    for first, last in cuts:
        first, last = max(first - start, at), min(last - start, len(text))
        if last <= at:
            continue
        if first >= len(text):
            break
        parts.append(text[at:first])
        at = last
    return "".join(parts) + text[at:]


@dataclass(slots=True)
class _Piece:
    """A piece of arguments that waits: where it stands in its call, and the object that holds it."""

    scanner: Scanner
    start: int
    end: int
    function: Json


@dataclass(slots=True)
class _Waiting:
    event: Event
    pieces: list[_Piece] = field(default_factory=list[_Piece])

    @property
    def settled(self) -> bool:
        return all(piece.scanner.settled >= piece.end for piece in self.pieces)


class StreamCleaner:
    """Cleans the calls of a stream. An event waits only while the end of its piece may be the start of a tag; events
    leave in the order in which they came, and one without a tag leaves as it came."""

    def __init__(self) -> None:
        self.cleaned = 0
        self._scanners: dict[tuple[int, int], tuple[str, Scanner]] = {}
        self._waiting: deque[_Waiting] = deque()

    def feed(self, event: Event) -> list[Event]:
        """Take an event; the events that may go on now."""
        waiting = _Waiting(event)
        if event.data is not None:
            for number, choice in enumerate(objects(event.data.get("choices"))):
                index = choice.get("index")
                self._choice(waiting, choice, index if type(index) is int else number)
        elif event.is_done:
            self._finish(None)
        self._waiting.append(waiting)
        if len(self._waiting) > MAX_HELD:
            for piece in self._waiting[0].pieces:
                piece.scanner.finish()
        return self._release()

    def end(self) -> list[Event]:
        """The stream is over; all that waited."""
        self._finish(None)
        return self._release()

    def _choice(self, waiting: _Waiting, choice: Json, index: int) -> None:
        for position, call in enumerate(objects(inner(choice, "delta").get("tool_calls"))):
            function = inner(call, "function")
            name, text = function.get("name"), function.get("arguments")
            if isinstance(name, str) and (cleaned := clean_name(name)) != name:
                function["name"] = cleaned
                waiting.event.changed = True
                self.cleaned += 1
            if isinstance(text, str) and text:
                scanner = self._scanner(call, index, position)
                start = scanner.end
                scanner.feed(text)
                waiting.pieces.append(_Piece(scanner, start, start + len(text), function))
        if choice.get("finish_reason"):
            self._finish(index)

    def _scanner(self, call: Json, choice: int, position: int) -> Scanner:
        """The scanner of a call. Servers that give every call index 0 are told by the id, which begins a new one."""
        stated, call_id = call.get("index"), call.get("id")
        key = (choice, stated if type(stated) is int else position)
        known = self._scanners.get(key)
        if known is not None and not (isinstance(call_id, str) and call_id and call_id != known[0]):
            return known[1]
        if known is not None:
            known[1].finish()
        scanner = Scanner()
        self._scanners[key] = (call_id if isinstance(call_id, str) else "", scanner)
        return scanner

    def _finish(self, choice: int | None) -> None:
        for (owner, _), (_, scanner) in self._scanners.items():
            if choice is None or owner == choice:
                scanner.finish()

    def _release(self) -> list[Event]:
        free: list[Event] = []
        while self._waiting and self._waiting[0].settled:
            waiting = self._waiting.popleft()
            for piece in waiting.pieces:
                text = piece.function["arguments"]
                cleaned = _without(text, piece.start, piece.scanner.cuts)
                if cleaned != text:
                    piece.function["arguments"] = cleaned
                    waiting.event.changed = True
                    self.cleaned += 1
                piece.scanner.drop(piece.end)
            free.append(waiting.event)
        return free
