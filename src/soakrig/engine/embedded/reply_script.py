"""What the engine answers, as a script: some reasoning, then a tool call or text, each of a seeded length.

Random weights say nothing; the script gives a reply the shape that a client has to handle, and the model fills it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from .actions import Choice, Forced, OneToken, Option, Script, Span, Special
from .grammar import Grammar

CALL_PROBABILITY = 0.75
REASONING_TOKENS = (6, 28)
TEXT_TOKENS = (24, 80)


@dataclass(slots=True)
class ReplySpec:
    """What a request asks of the reply.

    ``tools`` holds ``{"name", "parameters"}`` of the functions that may be called; ``call`` is None for the seeded
    choice between a call and text. ``text_tokens`` fixes the length of the text (completions; ``ignore_eos``).
    """

    thinking: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    call: bool | None = False
    text_tokens: int | None = None
    min_tokens: int = 0
    one_token: int | None = None


class ReplyScript:
    """One reply. ``called`` is set once a tool call has been written to its end."""

    def __init__(self, spec: ReplySpec, rng: random.Random) -> None:
        self._spec = spec
        self._rng = rng
        self.called = False

    def script(self) -> Script:
        spec, rng = self._spec, self._rng
        if spec.one_token is not None:
            yield OneToken(spec.one_token)
            return
        if spec.thinking:
            yield Span("reasoning", "text", rng.randint(*REASONING_TOKENS))
            yield Special("end_think")
        calls = bool(spec.tools) and (rng.random() < CALL_PROBABILITY if spec.call is None else spec.call)
        if calls:
            yield from self._tool_call()
        else:
            length = spec.text_tokens or max(rng.randint(*TEXT_TOKENS), spec.min_tokens)
            yield Span("content", "text", length)
        yield Special("end")

    def _tool_call(self) -> Script:
        tools = {str(tool["name"]): tool["parameters"] for tool in self._spec.tools}
        yield Special("tool_call")
        yield Forced("hidden", '{"name": "')
        name = yield Choice("name", tuple(Option(name, f'{name}", "arguments": ') for name in tools))
        yield from Grammar({"type": "object", **tools[name]}, self._rng).script()
        yield Forced("hidden", "}")
        yield Special("end_tool_call")
        self.called = True
