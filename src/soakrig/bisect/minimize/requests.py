"""The requests of a shape, made from those of the run: fewer, with fewer tools, shorter or longer messages.

Tools and context are independent of each other: where tools go, text comes in their place, so that a fault that needs
a long prompt is not lost with its tools. Text to fill up with is the conversation's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from soakrig.bisect.minimize.material import Material
from soakrig.bisect.minimize.shape import Shape
from soakrig.record.request_log import StoredRequest

LIMITS = ("max_tokens", "max_completion_tokens")
"""Fields of a request that say how long its answer may be."""
Message = dict[str, Any]


def whole_shape(material: Material) -> Shape:
    """The shape of the run itself. Its arm is sent byte for byte."""
    fields = _fields(material.last)
    limit = next((fields[name] for name in LIMITS if isinstance(fields.get(name), int)), 0)
    return Shape(
        conversations=len(material.conversations),
        requests=max(len(requests) for requests in material.conversations),
        stream=int(bool(fields.get("stream"))),
        max_tokens=limit,
        tools=len(fields.get("tools") or ()),
        context=max(1, round(_tokens(material, len(_head(material, 1 << 30)), _size(material.last.messages)))),
    )


def shaped(material: Material, shape: Shape) -> list[list[StoredRequest]]:
    """The requests of each conversation."""
    if shape == whole_shape(material):
        return [list(requests) for requests in material.conversations]
    return [
        _conversation(material, requests[-shape.requests :], shape)
        for requests in material.conversations[: shape.conversations]
    ]


def least_context(material: Material, tools: int) -> int:
    """Tokens of the smallest prompt with so many tools that this module can make: nothing but the opening."""
    messages = [orjson.loads(message) for message in material.last.messages]
    opening = _fitted(messages[: _opening(messages)], "", -(1 << 30))
    size = _size([orjson.dumps(one) for one in opening])
    return max(1, round(_tokens(material, len(_head(material, tools)), size)))


def _conversation(material: Material, requests: Sequence[StoredRequest], shape: Shape) -> list[StoredRequest]:
    """What is dropped and filled up is the same in all of them: one request stays the beginning of the next."""
    room = _message_room(material, shape)
    lists = [[orjson.loads(message) for message in one.messages] for one in requests]
    opening = _opening(lists[-1])
    drop = _dropped(lists[-1], opening, room)
    made: list[StoredRequest] = []
    change = room - _size([orjson.dumps(one) for one in _kept(lists[-1], opening, drop)])
    filling = _filling(lists[-1], change)
    for request, messages in zip(requests, lists, strict=True):
        kept = _fitted(_kept(messages, opening, drop), filling, change)
        head = _head_of(request, shape)
        made.append(
            StoredRequest(request.conversation, request.turn, head, tuple(map(orjson.dumps, kept)), request.extra)
        )
    return made


def _opening(messages: Sequence[Message]) -> int:
    """Messages before the first answer: system text and task. At least the first."""
    return max(1, next((place for place, one in enumerate(messages) if one["role"] == "assistant"), len(messages)))


def _dropped(messages: Sequence[Message], opening: int, room: int) -> int:
    """Messages after the opening to leave out, whole rounds of answer and result, the oldest first: the fewest with
    which the rest fits ``room`` bytes."""
    sizes = [len(orjson.dumps(one)) + 1 for one in messages]
    rounds = [place for place in range(opening, len(messages)) if messages[place]["role"] == "assistant"]
    starts = [opening, *rounds, len(messages)]
    fits = (start for start in starts if sum(sizes[:opening]) + sum(sizes[start:]) <= room)
    return next(fits, len(messages)) - opening


def _kept(messages: Sequence[Message], opening: int, drop: int) -> list[Message]:
    return [*messages[:opening], *messages[opening + drop :]]


def _filling(messages: Sequence[Message], change: int) -> str:
    """Text of the conversation, as much as is missing."""
    own = " ".join(one["content"] for one in messages if isinstance(one.get("content"), str) and one["content"])
    own = "".join(char if char.isprintable() and char.isascii() and char not in '"\\' else " " for char in own)
    return (own * (change // max(1, len(own)) + 1))[: max(0, change)] if own.strip() else "word " * (change // 5)


def _fitted(messages: list[Message], filling: str, change: int) -> list[Message]:
    """``change`` bytes more or less in the first text of a user, where there is one."""
    place = next(
        (n for n, one in enumerate(messages) if one["role"] == "user" and isinstance(one.get("content"), str)), None
    )
    if place is None or change == 0:
        return messages
    text: str = messages[place]["content"]
    text = f"{text} {filling}" if change > 0 else text[: max(1, len(text) + change)]
    return [*messages[:place], {**messages[place], "content": text}, *messages[place + 1 :]]


def _fields(request: StoredRequest) -> dict[str, Any]:
    return orjson.loads(request.head + b"}")


def _head_of(request: StoredRequest, shape: Shape) -> bytes:
    fields = _fields(request)
    tools = (fields.get("tools") or [])[: shape.tools]
    if tools:
        fields["tools"] = tools
    else:
        fields.pop("tools", None)
        fields.pop("tool_choice", None)  # a choice among no tools is refused
    for name in LIMITS:
        if isinstance(fields.get(name), int):
            fields[name] = min(fields[name], shape.max_tokens)
    if not shape.stream:
        fields["stream"] = False
        fields.pop("stream_options", None)
    return orjson.dumps(fields)[:-1]


def _head(material: Material, tools: int) -> bytes:
    return orjson.dumps((_fields(material.last).get("tools") or [])[:tools])


def _tokens(material: Material, head: int, messages: int) -> float:
    """Prompt tokens, from bytes of tool definitions and of messages."""
    whole = len(_head(material, 1 << 30))
    return material.fixed_tokens * (head / whole) + messages / material.per_token


def _message_room(material: Material, shape: Shape) -> int:
    """Bytes of messages that make a prompt of the shape's tokens with the shape's tools."""
    tools = _tokens(material, len(_head(material, shape.tools)), 0)
    return max(0, round((shape.context - tools) * material.per_token))


def _size(messages: Sequence[bytes]) -> int:
    return sum(len(message) + 1 for message in messages)
