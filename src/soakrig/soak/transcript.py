"""Real transcripts as loads: a file of any format that ``transcripts/`` reads, or another run's own ``requests/``,
which are sent again byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from soakrig.errors import UsageError
from soakrig.record.request_log import read_requests
from soakrig.soak.classify import Outcome
from soakrig.soak.conversation import CHARS_PER_TOKEN, Conversation, Turn
from soakrig.soak.probe import Probe
from soakrig.soak.reply import Reply
from soakrig.soak.target import Target
from soakrig.soak.transcripts.anonymise import Anonymiser
from soakrig.soak.transcripts.arrivals import TraceText
from soakrig.soak.transcripts.deck import DealtConversation, Deck
from soakrig.soak.transcripts.filler import Filler
from soakrig.soak.transcripts.formats import read_file
from soakrig.soak.transcripts.line import Line, make_line
from soakrig.soak.transcripts.mooncake import BLOCK_TOKENS
from soakrig.soak.transcripts.request import Recorded, TraceEntry, tool_names
from soakrig.soak.transcripts.token_counts import EngineCounts, EstimatedCounts, TokenCounts

PLACES = 64
"""Requests of a trace in flight at once, where nobody says how many: arrivals wait for a free place."""


@dataclass
class TranscriptConversation:
    """Sends the lines of a transcript in order: once, or ``over_again`` from the beginning when they are through."""

    number: int
    lines: Sequence[Line]
    over_again: bool = False
    turn: int = 0
    part: int = 0
    _measured: dict[int, int] = field(default_factory=dict[int, int])

    def next_turn(self) -> Turn | None:
        if self.turn >= len(self.lines) and not self.over_again:
            return None
        index = self.turn % len(self.lines)
        line = self.lines[index]
        if self.turn and not _extends(line.messages, self.lines[(self.turn - 1) % len(self.lines)].messages):
            self.part += 1
        self.turn += 1
        body = line.body
        estimate = self._measured.get(index) or int(len(body) / CHARS_PER_TOKEN)
        return Turn(
            self.number, self.turn, self.part, body, estimate, line.tools, line.head, line.messages, line.extra,
            line.due_s, line.whole,
        )  # fmt: skip

    def answered(self, reply: Reply, outcome: Outcome) -> None:
        if reply.prompt_tokens:
            self._measured[(self.turn - 1) % len(self.lines)] = reply.prompt_tokens


@dataclass
class Transcript:
    """A transcript as it was read; ``ready`` once the target is known, then ``conversations``.

    ``block_tokens`` and ``speed`` are for traces; ``places``: conversations in parallel, None for the format's own
    number. ``anonymise`` replaces every text; ``seed`` is the filler's.
    """

    path: Path
    recorded: Recorded
    stored: list[list[Line]] = field(default_factory=list[list[Line]])
    max_tokens: int = 512
    anonymise: bool = False
    seed: int = 0
    block_tokens: int = BLOCK_TOKENS
    speed: float = 1.0
    places: int | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    _text: TraceText | None = None

    @property
    def is_nobodys(self) -> bool:
        """Whether no text of a person is sent."""
        return self.anonymise or self.recorded.form == "mooncake"

    @property
    def keeps_text(self) -> bool:
        """Whether a run keeps what it sends unasked: nobody's text, or what another run has kept already."""
        return self.is_nobodys or self.recorded.form == "run"

    @property
    def lanes(self) -> list[int]:
        """Turns of each conversation; of all together, as one number, where sessions are dealt."""
        if self.stored:
            return [len(lines) for lines in self._stored]
        if self._is_dealt:
            return [self.recorded.requests]
        return [self.recorded.requests] * (self.places or 1)

    @property
    def parallel(self) -> int:
        """Conversations at once. A session that stands alone is sent by every place."""
        if self.stored:
            return len(self._stored)
        if self.recorded.form == "mooncake":
            return min(self.places or PLACES, self.recorded.requests)
        return min(self.places or 1, len(self.recorded.sessions)) if self._is_dealt else self.places or 1

    def said(self) -> list[str]:
        """What was read, in sentences."""
        names = {"openai": "OpenAI requests", "sharegpt": "ShareGPT conversations", "mooncake": "Mooncake arrivals"}
        found = self.recorded
        if found.form == "run":
            return [f"{self.path.name} is a run folder: {sum(self.lanes)} requests, sent again byte for byte"]
        many = len(found.entries) or len(found.sessions)
        count = f"{found.requests} requests" + (f" in {many} sessions" if found.sessions else "")
        return [f"{self.path.name} was read as {names[found.form]}: {count}", *found.notes]

    def prepare(self, target: Target) -> None:
        """Ask the engine how it counts and rewrite what is to be rewritten; blocks. ``facts`` are complete then."""
        if not self.is_nobodys or self._text is not None or "anonymised" in self.facts:
            return
        with EngineCounts(target) as asked:
            counts: TokenCounts = asked if asked.available() else EstimatedCounts()
            filler = Filler(counts, self.seed)
            counts.overhead()
            if self.anonymise:
                hidden = Anonymiser(filler)
                self.recorded.sessions = [
                    [hidden.request(one) for one in session] for session in self.recorded.sessions
                ]
                self.facts["anonymised"] = hidden.facts()
                return
        self._text = TraceText(filler, self.block_tokens, self.speed)
        self.facts["trace"] = {
            "block_tokens": self.block_tokens,
            "speed": self.speed,
            "counted": counts.how,
            "output_length": "exact (ignore_eos)" if counts.extended else "at most",
        }

    def conversations(self, probe: Probe, *, over_again: bool = False) -> list[Conversation]:
        """The load. Raises ``UsageError`` where an arrival of a trace does not fit the engine's context."""
        if self.stored:
            return [TranscriptConversation(number, lines, over_again) for number, lines in enumerate(self._stored)]
        if not self._is_dealt:
            lines = self._session(0, probe.model)
            return [TranscriptConversation(number, lines, over_again) for number in range(self.parallel)]
        if self.recorded.form == "mooncake":
            self._fits(probe)
            over_again = False  # the clock does not start again
        deck = Deck(self._count, lambda index: self._session(index, probe.model), over_again)
        return [DealtConversation(number, deck) for number in range(self.parallel)]

    @property
    def _stored(self) -> list[list[Line]]:
        return self.stored * (self.places or 1) if len(self.stored) == 1 else self.stored

    @property
    def _is_dealt(self) -> bool:
        return self.recorded.form in ("sharegpt", "mooncake")

    @property
    def _count(self) -> int:
        return len(self.recorded.entries) or len(self.recorded.sessions)

    def _session(self, index: int, model: str) -> list[Line]:
        if self.recorded.entries:
            assert self._text is not None, "prepare() was not called"
            return [make_line(self._text.request(self.recorded.entries[index]), model, self.max_tokens)]
        return [make_line(request, model, self.max_tokens) for request in self.recorded.sessions[index]]

    def _fits(self, probe: Probe) -> None:
        limit = probe.context_limit
        if limit is None:
            return
        long: list[TraceEntry] = [e for e in self.recorded.entries if e.input_tokens + e.output_tokens > limit]
        if long:
            first = long[0]
            raise UsageError(
                f"{len(long)} of {self._count} arrivals do not fit the engine's context of {limit} tokens; the first "
                f"is {first.where}: {first.input_tokens} of prompt and {first.output_tokens} of answer",
                remedy="Serve a longer context, or cut the file: "
                f"jq -c 'select(.input_length+.output_length<={limit})'",
            )


def open_transcript(path: Path, **options: Any) -> Transcript:
    """Read a file or a run folder. ``options``: fields of ``Transcript``.

    Raises ``UsageError`` with the first line that does not fit, before anything is sent, and for options that mean
    nothing to what was found.
    """
    if path.is_dir():
        stored = _read_run(path)
        found = Transcript(path, Recorded("run"), stored, **options)
        count = len(stored)
    else:
        if path.exists() and not path.is_file():
            raise UsageError(f"--transcript {path} is neither a file nor a folder", remedy="Give a JSONL file.")
        found = Transcript(path, read_file(path, options.get("block_tokens", BLOCK_TOKENS)), **options)
        count = found.recorded.requests
    if found.anonymise and found.recorded.form in ("run", "mooncake"):
        why = "a run is re-sent byte for byte" if found.stored else "a trace holds nobody's text"
        raise UsageError(f"--anonymise makes no sense with {path}: {why}", remedy="Leave --anonymise out.")
    if count > 1 and found.stored and found.places not in (None, 1, count):
        raise UsageError(
            f"--conversations {found.places}: {path} holds {count} conversations, each sent once",
            remedy="Leave --conversations out.",
        )
    found.facts = _facts(path, found)
    return found


def read_transcript(path: Path, *, model: str = "", max_tokens: int = 512) -> list[list[Line]]:
    """The sessions of a transcript that has texts, or of a run folder, each a list of requests with their bytes.

    A run folder gives its bodies unchanged. Raises as ``open_transcript``.
    """
    found = open_transcript(path)
    if found.stored:
        return found.stored
    return [[make_line(request, model, max_tokens) for request in session] for session in found.recorded.sessions]


def transcript_facts(path: Path, conversations: Sequence[Sequence[Line]]) -> dict[str, Any]:
    """What the record keeps of a transcript: where it was, how much, and its hash."""
    facts: dict[str, Any] = {"path": str(path.resolve()), "requests": sum(len(lines) for lines in conversations)}
    if path.is_file():
        with path.open("rb") as stream:
            facts["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
    return facts


def _facts(path: Path, found: Transcript) -> dict[str, Any]:
    facts = transcript_facts(path, found.stored)
    if not found.stored:
        facts["requests"] = found.recorded.requests
        facts["sessions"] = len(found.recorded.sessions) or None
    facts["format"] = found.recorded.form
    if found.recorded.notes:
        facts["notes"] = found.recorded.notes
    return facts


def _read_run(folder: Path) -> list[list[Line]]:
    conversations: dict[int, list[Line]] = {}
    for stored in read_requests(folder):
        fields = orjson.loads(stored.head + b"}")
        tools, whole = tool_names(fields.get("tools")), not fields.get("stream", False)
        line = Line(stored.head, stored.messages, stored.extra, tools, stored.due_s, whole)
        conversations.setdefault(stored.conversation, []).append(line)
    return list(conversations.values())


def _extends(messages: Sequence[bytes], before: Sequence[bytes]) -> bool:
    return len(messages) >= len(before) and list(messages[: len(before)]) == list(before)
