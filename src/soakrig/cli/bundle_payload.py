"""The requests of a bundle: the run's own up to its fault, with filler for their text, or made from sizes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from soakrig.errors import RecordError, UsageError
from soakrig.record.events import TurnDone, TurnSent
from soakrig.record.request_log import StoredRequest, read_requests
from soakrig.record.store import RunReader
from soakrig.reports.bundle.bundle import Bundle
from soakrig.reports.bundle.reproducer import Payload, fault_point
from soakrig.reports.run_view import RunView
from soakrig.soak.transcripts.anonymise import Anonymiser
from soakrig.soak.transcripts.filler import Filler
from soakrig.soak.transcripts.request import Request
from soakrig.soak.transcripts.token_counts import EstimatedCounts, TokenCounts

Key = tuple[int, int]
"""Conversation and turn."""
_LEAST_ANSWER = 16


class MeasuredCounts(EstimatedCounts):
    """Tokens by the characters that a token had in the run itself, as its engine counted."""

    def __init__(self, per_token: float) -> None:
        self.per_token = per_token
        self.how = f"estimated, {per_token:.2f} characters a token as the run's engine counted"

    def count(self, text: str) -> int:
        return max(1, round(len(text) / self.per_token)) if text else 0


def bundle_payload(bundle: Bundle, counts: TokenCounts | None) -> Payload | None:
    """The payload, redacted; None for a run without a turn. ``counts``: who counts tokens; None: by the run's own
    ratio."""
    view = bundle.view
    point = fault_point(view)
    sent, done = _turns(view)
    if point is None and not sent:
        return None
    wanted = _until(sent, done, point or sent[-1])
    clean = bundle.cleaner.redactor.data
    why = ""
    try:
        requests = [one for one in read_requests(view.folder) if (one.conversation, one.turn) in wanted]
        if requests:
            return _from_requests(requests, counts, done, clean, keep_text=bundle.keep_text)
        why = "the run's folder holds none of its requests"
    except (RecordError, UsageError) as error:
        why = error.message
    return _from_sizes(view, sent, done, wanted, counts or EstimatedCounts(), why, clean)


def _turns(view: RunView) -> tuple[list[Key], dict[Key, TurnDone]]:
    sent: list[Key] = []
    done: dict[Key, TurnDone] = {}
    for event in RunReader(view.folder).events():
        if isinstance(event, TurnSent):
            sent.append((event.conversation, event.turn))
        elif isinstance(event, TurnDone):
            done[event.conversation, event.turn] = event
    return sent, done


def _until(sent: Sequence[Key], done: dict[Key, TurnDone], point: Key) -> set[Key]:
    """What had left when the faulting turn was over."""
    end = done[point].mono if point in done else None
    began = {key: one.mono - one.duration_s for key, one in done.items()}
    return {
        key
        for key in sent
        if key == point or ((end is None or began.get(key, 0.0) <= end) and (key[0] != point[0] or key[1] <= point[1]))
    }


def _from_requests(
    requests: Sequence[StoredRequest],
    counts: TokenCounts | None,
    done: dict[Key, TurnDone],
    clean: Any,
    *,
    keep_text: bool,
) -> Payload:
    counts = counts or _measured(requests, done)
    maker = None if keep_text else Anonymiser(Filler(counts))
    lines = list(_lines(requests, maker, clean))
    if maker is None:
        how = "Texts are those of the run (--keep-text), redacted."
    else:
        facts = maker.facts()
        how = (
            f"Every text is filler of as many tokens: {facts['texts']:,} texts, {facts['tokens']:,} tokens "
            f"({facts['counted']}), {facts['texts_of_another_length']:,} of another length."
        )
    conversations = len({one.conversation for one in requests})
    return Payload(b"".join(lines), how, len(requests), conversations, keep_text)


def _lines(requests: Sequence[StoredRequest], maker: Anonymiser | None, clean: Any) -> Iterator[bytes]:
    """As ``requests/`` has them, with a line more where a conversation begins."""
    conversation, head = -1, b""
    kept: list[bytes] = []
    for one in requests:
        where = f"conversation {one.conversation} turn {one.turn}"
        if one.conversation != conversation:
            conversation, head, kept = one.conversation, b"", []
            yield _line({"conversation": conversation})
        if one.head != head:
            head = one.head
            yield _line({"head": clean(_fields(orjson.loads(head + b"}"), maker, where))})
        common = list(one.messages[: len(kept)]) == kept
        if not common:
            kept = []
            yield _line({"part": one.turn})
        for raw in one.messages[len(kept) :]:
            message = orjson.loads(raw)
            made = message if maker is None else maker.request(Request(where, [message])).messages[0]
            yield _line({"message": clean(made)})
        kept = list(one.messages)
        extra = _fields(dict(one.extra), maker, where)
        yield _line({"send": {"messages": len(kept), "extra": clean(extra)}})


def _fields(data: dict[str, Any], maker: Anonymiser | None, where: str) -> dict[str, Any]:
    """Fields of a request beside its messages; the model is the one that is served where it is sent."""
    model = {"model": "model"} if data.pop("model", None) is not None else {}
    if maker is None:
        return model | data
    made = maker.request(Request(where, [], data.pop("tools", None) or [], data))
    return model | made.fields | ({"tools": made.tools} if made.tools else {})


def _from_sizes(
    view: RunView,
    sent: Sequence[Key],
    done: dict[Key, TurnDone],
    wanted: set[Key],
    counts: TokenCounts,
    why: str,
    clean: Any,
) -> Payload:
    """Prompts that grow as the run's did: what is new in a turn is one message of filler."""
    filler = Filler(counts)
    lines: list[bytes] = []
    number = 0
    lanes = list(dict.fromkeys(key[0] for key in sent if key in wanted))
    for lane in lanes:
        had = 0
        lines.append(_line({"conversation": lane}))
        lines.append(_line({"head": {"model": "model", "stream": True, "stream_options": {"include_usage": True}}}))
        for key in (key for key in sent if key in wanted and key[0] == lane):
            turn = done.get(key)
            size = max(1, (turn.prompt_tokens or turn.context_tokens) if turn is not None else had)
            if size < had:
                had = 0
                lines.append(_line({"part": key[1]}))
            if size > had:
                text = filler.make(size - had, f"{lane} {key[1]}")
                lines.append(_line({"message": {"role": "user", "content": text}}))
                had = size
            answer = max(_LEAST_ANSWER, turn.output_tokens if turn is not None else _LEAST_ANSWER)
            lines.append(_line({"send": {"extra": {"max_tokens": answer}}}))
            number += 1
    how = f"Made from sizes alone, since {clean(why)}: prompts are filler of as many tokens ({counts.how}), no tools."
    return Payload(b"".join(lines), how, number, len(lanes))


def _measured(requests: Sequence[StoredRequest], done: dict[Key, TurnDone]) -> TokenCounts:
    """By the largest prompt that the engine counted."""
    known = [
        (tokens, len(one.body))
        for one in requests
        if (turn := done.get((one.conversation, one.turn))) is not None and (tokens := turn.prompt_tokens)
    ]
    if not known:
        return EstimatedCounts()
    tokens, size = max(known)
    return MeasuredCounts(min(12.0, max(1.0, size / tokens)))


def _line(data: dict[str, Any]) -> bytes:
    return orjson.dumps(data) + b"\n"
