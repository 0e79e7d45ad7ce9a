"""The outcome of a turn: one pure function over what came back. ``ok`` only on evidence."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import orjson

from soakrig.record.outcome import OutcomeName
from soakrig.soak.degenerate import MIN_TAIL, why_degenerate
from soakrig.soak.reply import TERMINAL, Reply

LENIENCIES: dict[str, str] = {
    "null-finish": "the finish reason stays null, but the terminator came",
    "no-terminator": "a finish reason came, but the stream ends without [DONE]",
    "usage-tail": "the last chunk carries usage and has no choices at all",
}
"""What ``--accept`` can name: parts of the protocol that some engines are known to leave out."""

FAILED = frozenset({"abort", "aborted", "error", "cancelled", "canceled"})
"""Finish reasons by which an engine says that it gave up."""

_BLANK = re.compile(r"[\s\0\ufffd\u200b-\u200f\u2060\ufeff]*")
BLANKS = " \t\r\n"
_NAME = re.compile(r"^[A-Za-z0-9_.:-]{1,128}$")
_MARKUP = re.compile(r"</?(?:arg_key|arg_value|tool_call|tool_calls)\b[^>]{0,40}>|<\|[a-z_\u2581]{2,40}\|>|<\uff5c")


@dataclass(frozen=True)
class Outcome:
    """``why`` is empty for ok; ``accepted`` names the leniencies that it took."""

    name: OutcomeName
    why: str = ""
    accepted: list[str] = field(default_factory=list[str])


def classify(
    reply: Reply,
    *,
    accept: Collection[str] = (),
    tools: Collection[str] | None = None,
    engine_dead: bool = False,
) -> Outcome:
    """Name what became of a turn.

    ``accept``: leniencies that the operator named. ``tools``: names that were offered (None: not checked).
    ``engine_dead``: the engine was found dead before this turn was sent or before it finished; nothing makes such a
    turn ok. The first rule that applies wins; the order is from the wire upwards.
    """
    if engine_dead:
        return Outcome("post_mortem", "sent or finished after the engine was found dead")
    wire = _wire(reply)
    if wire is not None:
        return wire
    stream, accepted = _stream(reply, accept)
    if stream is not None:
        return stream
    answer = _answer(reply, tools)
    return answer if answer is not None else Outcome("ok", accepted=accepted)


def _wire(reply: Reply) -> Outcome | None:
    """Connection and status."""
    if reply.ending == "cut_by_tool":
        return Outcome("aborted", "this tool ended the turn")
    if reply.ending in ("refused", "no_response"):
        return Outcome("refused", reply.ending_detail or reply.ending)
    if reply.status is not None and reply.status != 200:
        text = reply.body[:300].decode("utf-8", "replace").strip()
        return Outcome("http_error", f"status {reply.status}: {text or 'empty body'}")
    if reply.ending == "stalled":
        seen = f"after {reply.events} events" if reply.events else "before any data"
        return Outcome("hung", f"{reply.ending_detail} ({seen})")
    return None


def _stream(reply: Reply, accept: Collection[str]) -> tuple[Outcome | None, list[str]]:
    """A 200: was it a whole stream of the protocol?"""
    accepted: list[str] = []
    if reply.error:
        return Outcome("error_frame", reply.error), accepted
    if reply.malformed:
        return Outcome("malformed", reply.malformed), accepted
    if reply.ending == "runaway":
        return Outcome("degenerate", reply.ending_detail), accepted
    if reply.events == 0:
        what = "only the terminator" if reply.terminated else f"no data event ({reply.size} bytes)"
        return Outcome("empty_200", what), accepted
    reason = reply.finish_reason
    if reason in FAILED:
        return Outcome("error_frame", f"finish reason {reason!r}: the engine gave up"), accepted
    if reason is not None and reason not in TERMINAL:
        return Outcome("truncated", f"finish reason {reason!r} is none that ends an answer"), accepted
    if reply.ending == "reset" and not (reason is not None and reply.terminated):
        why = f"the connection broke after {reply.deltas} deltas: {reply.ending_detail}"
        return Outcome("truncated", why), accepted
    if reply.finish_reason is None and not (reply.terminated and "null-finish" in accept):
        end = "a terminator but no finish reason" if reply.terminated else "neither finish reason nor terminator"
        return Outcome("truncated", f"{end} after {reply.deltas} deltas"), accepted
    if not reply.terminated and "no-terminator" not in accept:
        return Outcome("truncated", f"finish reason {reply.finish_reason!r} but no terminator"), accepted
    if reply.usage_tail and "usage-tail" not in accept:
        return Outcome("malformed", "a chunk with usage and without choices (see --accept usage-tail)"), accepted
    if reply.finish_reason is None:
        accepted.append("null-finish")
    if not reply.terminated:
        accepted.append("no-terminator")
    if reply.usage_tail:
        accepted.append("usage-tail")
    return None, accepted


def _answer(reply: Reply, tools: Collection[str] | None) -> Outcome | None:
    """A whole stream: did it say anything?"""
    for number, call in sorted(reply.calls.items()):
        why = _bad_call(call.name, call.argument_text, tools, cut=reply.finish_reason == "length")
        if why:
            return Outcome("tool_malformed", f"call {number}: {why}")
    if reply.finish_reason == "tool_calls" and not reply.calls:
        return Outcome("tool_malformed", "finish reason 'tool_calls' and no call")
    text = reply.text
    for name, part in (("content", text), ("reasoning", reply.reasoning_text)):
        why = why_degenerate(part)
        if why:
            return Outcome("degenerate", f"{name}: {why}")
    if not reply.calls and _BLANK.fullmatch(text):
        thought = sum(map(len, reply.reasoning))
        what = f"{thought} characters of reasoning only" if thought else "no content and no call"
        return Outcome("answerless", f"{what}, finish reason {reply.finish_reason!r}")
    return None


def _bad_call(name: str, arguments: str, tools: Collection[str] | None, *, cut: bool) -> str:
    """Why a call cannot be carried out, or an empty string."""
    if not _NAME.match(name):
        return f"name {name[:80]!r} is no function name"
    if tools is not None and name not in tools:
        return f"{name!r} is none of the {len(tools)} tools offered"
    if cut and not arguments.strip():
        return f"the call of {name} was cut before its arguments"
    try:
        parsed = orjson.loads(arguments.strip() or "{}")
    except orjson.JSONDecodeError:
        loop = why_degenerate(arguments)
        return f"arguments of {name} are no JSON: {arguments[-80:]!r}" + (f"; {loop}" if loop else "")
    if not isinstance(parsed, dict):
        return f"arguments of {name} are no object: {arguments[:80]!r}"
    leak = _MARKUP.search(arguments)
    if leak or any("<" in key or ">" in key for key in parsed):
        return f"markup in the arguments of {name}: {(leak.group() if leak else arguments[:80])!r}"
    # A ruler or an indentation is an argument like any other: only a long text can be a loop here.
    texts = (text for text in _strings(parsed) if len(text) >= MIN_TAIL and text.strip(BLANKS))
    loop = next((why for text in texts if (why := why_degenerate(text))), "")
    return f"an argument of {name} carries no information: {loop}" if loop else ""


def _strings(data: object) -> Iterator[str]:
    """Every text in parsed JSON."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from _strings(value)
    elif isinstance(data, list):
        for value in data:
            yield from _strings(value)
