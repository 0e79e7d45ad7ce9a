"""What a faulting run gives to be made smaller: its requests, which conversation faulted, the fault, sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from soakrig.bisect.launch_result import signature_of, turn_signature
from soakrig.errors import UsageError
from soakrig.record.events import Event, TurnDone, TurnSent
from soakrig.record.finding import finding_signature
from soakrig.record.judge import Judge
from soakrig.record.outcome import CONTENT
from soakrig.record.request_log import StoredRequest, read_requests
from soakrig.record.result import Result
from soakrig.record.store import RunReader
from soakrig.soak.conversation import CHARS_PER_TOKEN


@dataclass(frozen=True)
class Material:
    """``conversations``: the requests that each had sent when the fault came, the one that faulted first.
    ``turns``: of all of them together. ``signature``: of the fault; ``status``: of an HTTP answer that was the fault.
    ``fixed_tokens`` and ``per_token``: prompt tokens of everything but the messages, and message bytes per token, as
    the engine counted in that run (``estimated`` where it did not)."""

    signature: str
    conversations: tuple[tuple[StoredRequest, ...], ...]
    fixed_tokens: float
    per_token: float
    estimated: bool
    status: int | None = None

    @property
    def turns(self) -> int:
        return sum(len(requests) for requests in self.conversations)

    @property
    def last(self) -> StoredRequest:
        """The request that faulted."""
        return self.conversations[0][-1]

    def facts(self) -> dict[str, Any]:
        """For the record; with the requests ``from_facts`` makes it again."""
        return {
            "signature": self.signature,
            "fixed_tokens": self.fixed_tokens,
            "per_token": self.per_token,
            "estimated": self.estimated,
            "status": self.status,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], requests: Sequence[Sequence[StoredRequest]]) -> Self:
        """What ``facts`` told, with its requests in the same order."""
        return cls(conversations=tuple(tuple(one) for one in requests), **facts)


def read_material(run: Path) -> Material:
    """The material of a run folder. Raises ``RecordError`` where it is none or its text was not kept, ``UsageError``
    where it has no fault, or one that its requests alone cannot bring about."""
    reader = RunReader(run)
    judge, events = Judge(reader.manifest), list(reader.events())
    for event in events:
        judge.feed(event)
    result = judge.result()
    signature = signature_of(result, CONTENT) or signature_of(result)  # what a model wrote names it only alone
    if signature is None:
        raise UsageError(
            f"{run} has no fault: its verdict is {result.verdict}",
            remedy="Give a run that failed by a fault. What never faulted cannot be made smaller.",
        )
    if signature.startswith(finding_signature("")):
        raise UsageError(
            f"{run} failed by {signature}, which {reader.manifest.reproducer} finds by questions beside the load",
            remedy="Only faults that a request brings about can be made smaller.",
        )
    by_number: dict[int, list[StoredRequest]] = {}
    for request in read_requests(run):
        by_number.setdefault(request.conversation, []).append(request)
    done = [event for event in events if isinstance(event, TurnDone)]
    first, turn = _faulting(result, signature, done, by_number)
    sent = _sent_until(events, first, turn)
    by_number = {number: [one for one in all_ if (number, one.turn) in sent] for number, all_ in by_number.items()}
    order = sorted((number for number, some in by_number.items() if some), key=lambda n: (n != first, n))
    bad = next((one for one in done if (one.conversation, one.turn) == (first, turn)), None)
    fixed, per_token, estimated = _sizes(by_number[first], {(one.conversation, one.turn): one for one in done})
    return Material(
        signature,
        tuple(tuple(by_number[number]) for number in order),
        fixed,
        per_token,
        estimated,
        bad.status if bad is not None and bad.outcome == "http_error" else None,
    )


def _faulting(
    result: Result, signature: str, done: Sequence[TurnDone], known: Mapping[int, Sequence[StoredRequest]]
) -> tuple[int, int]:
    """Conversation and turn that showed the fault; else those of a watcher's word; else the last that was over."""
    told = [(one.conversation, one.turn) for one in result.faults]
    named = [(one.conversation, one.turn) for one in done if turn_signature(one.outcome) == signature]
    bad = [(result.first_bad.conversation, result.first_bad.turn)] if result.first_bad else []
    for conversation, turn in [*named[:1], *told, *bad, *((one.conversation, one.turn) for one in reversed(done))]:
        if (
            conversation is not None
            and turn is not None
            and any(one.turn == turn for one in known.get(conversation, ()))
        ):
            return conversation, turn
    number = min(known)
    return number, known[number][-1].turn


def _sent_until(events: Sequence[Event], conversation: int, turn: int) -> set[tuple[int, int]]:
    """Turns of all conversations that had left when that one was over."""
    sent: set[tuple[int, int]] = set()
    for event in events:
        if isinstance(event, TurnSent):
            sent.add((event.conversation, event.turn))
        elif isinstance(event, TurnDone) and (event.conversation, event.turn) == (conversation, turn):
            return sent
    return {one for one in sent if one[0] != conversation or one[1] <= turn}


def _sizes(requests: Sequence[StoredRequest], done: Mapping[tuple[int, int], TurnDone]) -> tuple[float, float, bool]:
    """Tokens of all but the messages, and bytes of messages a token: a straight line through the measured prompts."""
    points = [
        (float(_message_bytes(one)), float(event.prompt_tokens))
        for one in requests
        if (event := done.get((one.conversation, one.turn))) is not None and event.prompt_tokens
    ]
    head = len(requests[-1].head)
    if not points:
        return head / CHARS_PER_TOKEN, CHARS_PER_TOKEN, True
    (low, low_tokens), (high, high_tokens) = min(points), max(points)
    if high > 1.2 * low and high_tokens > low_tokens:
        slope = (high_tokens - low_tokens) / (high - low)
        fixed = high_tokens - slope * high
        if fixed >= 0.0:
            return fixed, 1.0 / slope, False
    per_token = (high + head) / high_tokens
    return head / per_token, per_token, False


def _message_bytes(request: StoredRequest) -> int:
    return sum(len(message) + 1 for message in request.messages)
