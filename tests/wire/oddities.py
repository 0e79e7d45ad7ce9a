"""Odd but legal streams of real servers, and illegal ones that look nearly right."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from wire.loopback import DONE, ROLE, Exchange, Handler, delta, event, usage, words


def stream(*parts: bytes) -> Handler:
    """A handler that answers with these chunks and a clean end."""

    async def handler(x: Exchange) -> None:
        await x.whole(*parts)

    return handler


def chunk(**choice: Any) -> bytes:
    return event({"choices": [{"index": 0, **choice}]})


def calls(*parts: dict[str, Any]) -> list[bytes]:
    return [delta(tool_calls=[part]) for part in parts]


def call(name: str, arguments: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


END = [delta(finish="stop"), usage(), DONE]
CALLED = [delta(finish="tool_calls"), usage(), DONE]
PATH = '{"path": "/srv"}'


async def stays_open_after_done(x: Exchange) -> None:
    await x.head()
    for part in [ROLE, *words(), *END]:
        await x.chunk(part)
    await asyncio.Event().wait()


async def breaks_after_done(x: Exchange) -> None:
    await x.head()
    for part in [ROLE, *words(), *END]:
        await x.chunk(part)
    await asyncio.sleep(0.05)
    await x.reset()


async def keep_alives_only(x: Exchange) -> None:
    await x.head()
    await x.chunk(ROLE)
    while True:
        await x.chunk(b": keep-alive\n\n" + delta())
        await asyncio.sleep(0.02)


async def content_length(x: Exchange) -> None:
    body = b"".join([ROLE, *words(), *END])
    x.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body))
    x.writer.write(body)
    await x.writer.drain()


async def until_closed(x: Exchange) -> None:
    x.writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + b"".join([ROLE, *words(), *END]))
    await x.writer.drain()


GOOD: dict[str, Handler] = {
    "byte order mark": stream(b"\xef\xbb\xbf" + ROLE, *words(), *END),
    "CRLF": stream(b"".join([ROLE, *words(), *END]).replace(b"\n", b"\r\n")),
    "blank after DONE": stream(ROLE, *words(), delta(finish="stop"), b"data: [DONE] \n\n"),
    "no blank line after DONE": stream(ROLE, *words(), delta(finish="stop"), b"data: [DONE]\n"),
    "no newline after DONE": stream(ROLE, *words(), delta(finish="stop"), b"data: [DONE]"),
    "empty heartbeats": stream(ROLE, b"data:\n\n", b"data: {}\n\n", b": ping\n\n", *words(), *END),
    "usage null on every chunk": stream(event({"choices": [], "usage": None}), ROLE, *words(), *END),
    "error null": stream(event({"choices": [], "error": None}), ROLE, *words(), *END),
    "finish with the last words": stream(ROLE, *words(7), delta(content="last", finish="stop"), usage(), DONE),
    "empty finish on every chunk": stream(
        *[chunk(delta={"content": f"w{n} "}, finish_reason="") for n in range(4)], *END
    ),
    "eos": stream(ROLE, *words(), delta(finish="eos_token"), DONE),
    "message in place of delta": stream(chunk(message={"content": "all at once"}, finish_reason="stop"), DONE),
    "reasoning_content": stream(ROLE, delta(reasoning_content="hm"), *words(), *END),
    "open after DONE": stays_open_after_done,
    "broken after DONE": breaks_after_done,
    "content length": content_length,
    "HTTP/1.0": until_closed,
    "calls in parallel": stream(
        *calls(call("list_dir", PATH, index=0, id="a"), call("read_file", PATH, index=1, id="b")), *CALLED
    ),
    "calls without index": stream(*calls(call("list_dir", PATH, id="a"), call("read_file", PATH, id="b")), *CALLED),
    "calls that all have index 0": stream(
        *calls(
            call("list_dir", PATH[:5], index=0, id="a"),
            {"index": 0, "function": {"arguments": PATH[5:]}},
            call("read_file", PATH[:5], index=0, id="b"),
            {"index": 0, "function": {"arguments": PATH[5:]}},
        ),
        *CALLED,
    ),
    "calls without ids that all have index 0": stream(
        *calls(call("list_dir", PATH, index=0), call("read_file", PATH, index=0)), *CALLED
    ),
    "a ruler and an indentation as arguments": stream(
        *calls(call("list_dir", json.dumps({"path": "=" * 24, "text": " " * 40}), index=0, id="a")), *CALLED
    ),
    "a tag quoted in an argument": stream(
        *calls(call("list_dir", '{"path": "grep <think> in src"}', index=0, id="a")), *CALLED
    ),
    "name in every fragment": stream(
        *calls(call("list_dir", PATH[:5], index=0, id="a"), call("list_dir", PATH[5:], index=0, id="a")), *CALLED
    ),
    "no arguments": stream(*calls(call("list_dir", "", index=0, id="a")), *CALLED),
}

BAD: dict[str, tuple[str, Handler]] = {
    "aborted": ("error_frame", stream(ROLE, *words(3), delta(finish="abort"), usage(), DONE)),
    "error as finish": ("error_frame", stream(ROLE, *words(3), delta(finish="error"), usage(), DONE)),
    "abort and then stop": ("error_frame", stream(ROLE, *words(3), delta(finish="abort"), delta(finish="stop"), DONE)),
    "a broken call between others": (
        "tool_malformed",
        stream(
            *calls(
                call("list_dir", "{}", index=0, id="x"),
                call("read_file", '{"broken', index=2, id="q"),
                call("list_dir", "{}", index=0, id="y"),
            ),
            *CALLED,
        ),
    ),
    "unknown finish": ("truncated", stream(ROLE, *words(3), delta(finish="paused"), usage(), DONE)),
    "finish that is no text": ("malformed", stream(ROLE, *words(3), chunk(delta={}, finish_reason=False), DONE)),
    "empty finish and a cut": (
        "truncated",
        stream(*[chunk(delta={"content": f"w{n} "}, finish_reason="") for n in range(4)]),
    ),
    "finish null as text": ("truncated", stream(ROLE, *words(3), delta(finish="null"), DONE)),
    "error in a choice": ("error_frame", stream(ROLE, *words(), chunk(delta={}, error={"message": "x"}), *END)),
    "error after DONE": ("error_frame", stream(ROLE, *words(), *END, event({"error": {"message": "late"}}))),
    "error field": ("error_frame", stream(ROLE, *words(3), b'error: {"message": "slot"}\n\n')),
    "error event": ("error_frame", stream(ROLE, *words(3), b'event: error\ndata: {"message": "x"}\n\n')),
    "few NULs": ("answerless", stream(ROLE, delta(content="\0" * 8), *END)),
    "zero width": ("answerless", stream(ROLE, delta(content="\u200b\u200b"), *END)),
    "32 marks": ("degenerate", stream(ROLE, delta(content="!" * 32), delta(finish="length"), DONE)),
    "loop in an argument": (
        "tool_malformed",
        stream(*calls(call("list_dir", '{"path": "' + "!" * 400 + '"}', index=0, id="a")), *CALLED),
    ),
    "cut before the arguments": (
        "tool_malformed",
        stream(*calls(call("list_dir", "", index=0, id="a")), delta(finish="length"), DONE),
    ),
    "keep-alives only": ("hung", keep_alives_only),
    "content that is a list": ("malformed", stream(ROLE, delta(content=[{"type": "text", "text": "x"}]), *END)),
    "reasoning that is a number": ("malformed", stream(ROLE, delta(reasoning=7), *words(), *END)),
    "arguments that are an object": (
        "malformed",
        stream(ROLE, *calls({"index": 0, "id": "a", "function": {"name": "list_dir", "arguments": {"a": 1}}}), *CALLED),
    ),
    "usage that is a text": ("malformed", stream(ROLE, *words(), event({"choices": [], "usage": "many"}), *END)),
    "a list of events": ("malformed", stream(b'data: [{"choices": []}]\n\n', *END)),
    "choices that are a text": ("malformed", stream(event({"choices": "none"}), *END)),
}
