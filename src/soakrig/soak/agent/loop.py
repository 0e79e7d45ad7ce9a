"""The agent loop: a conversation of a coding agent that grows by a reply and a tool result every turn and is re-sent
whole, streamed, with its tools. The shape in which the seed's fault came once in thirty turns.

Same seed, same bytes, given the same replies. A reply that is no tool call gets a scripted call, so that the shape
never collapses; a turn that failed is answered as if the script had been the reply.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import orjson

from soakrig.soak.agent import results
from soakrig.soak.agent.tools import ToolDefinition, tools
from soakrig.soak.classify import Outcome
from soakrig.soak.conversation import CHARS_PER_TOKEN, AtLimit, Turn
from soakrig.soak.reply import Reply
from soakrig.soak.request import Head, Message, Prompt, fragment

SYSTEM = (
    "You are a coding agent in an editor. You work on the user's task with the tools that you are given, one step at "
    "a time: look before you change, change one thing, check it, and say in a sentence what you did. Paths are "
    "relative to the workspace root. Never invent file contents, and never ask for what a tool can tell."
)
USER_CHANCE = 0.3
"""Share of plain-text replies that the user answers; the others get a scripted tool call."""


@dataclass
class AgentOptions:
    """The shape of the load. ``result_scale`` stretches tool results; 1 puts turn 33 near 13k tokens.
    ``send_reasoning``: send a reply's reasoning back with it, which few clients do."""

    model: str
    seed: int = 0
    tool_count: int = 50
    max_tokens: int = 512
    temperature: float = 0.7
    context_limit: int | None = None
    at_limit: AtLimit = "restart"
    result_scale: float = 1.0
    send_reasoning: bool = False


@dataclass
class AgentConversation:
    """One conversation of the load; ``number`` tells it from its neighbours and seeds it."""

    options: AgentOptions
    number: int
    turn: int = 0
    part: int = 0
    measured_tokens: int = 0
    measured_size: int = 0
    definitions: list[ToolDefinition] = field(default_factory=list[ToolDefinition])

    def __post_init__(self) -> None:
        self.definitions = tools(self.options.tool_count)
        self.names = frozenset(str(t["function"]["name"]) for t in self.definitions)
        fields: dict[str, object] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.options.max_tokens,
            "temperature": self.options.temperature,
        }
        if self.definitions:
            fields["tool_choice"] = "auto"
        self.head = Head(self.options.model, self.definitions, fields)
        self._begin()

    def next_turn(self) -> Turn:
        self.turn += 1
        estimate = self._estimate()
        limit = self.options.context_limit
        full = limit is not None and estimate + self.options.max_tokens > limit
        if full and self.options.at_limit == "restart" and len(self.prompt.messages) > 2:
            self.part += 1
            self._begin()
            estimate = self._estimate()
        extra: dict[str, object] = {"seed": self._rng("sampling").getrandbits(31)}
        body = self.prompt.body(self.head, extra)
        return Turn(
            self.number, self.turn, self.part, body, estimate, self.names, self.head.data, self.prompt.messages, extra
        )

    def answered(self, reply: Reply, outcome: Outcome) -> None:
        if reply.prompt_tokens:
            self.measured_tokens, self.measured_size = reply.prompt_tokens, self.prompt.size
        rng = self._rng("answer")
        added = self._reply_messages(reply, outcome, rng)
        if self._would_overflow(added):
            return  # stop growing: the same prefix is sent again
        for message in added:
            self.prompt.add(message)

    # -- growth --------------------------------------------------------------------------------------------------

    def _reply_messages(self, reply: Reply, outcome: Outcome, rng: Random) -> list[Message]:
        """The assistant's own reply as a client would store it, then what answers it. Content is an empty text beside
        calls, never null: llama-cpp-python's server answers 500 to null."""
        ok = outcome.name == "ok"
        text = reply.text if ok else ""
        thought = reply.reasoning_text if ok and self.options.send_reasoning else ""
        thinking: Message = {"reasoning_content": thought} if thought else {}
        if ok and reply.calls:
            calls: list[Message] = []
            answers: list[Message] = []
            for index, call in sorted(reply.calls.items()):
                name = call.id or f"call_{self.turn}_{index}"
                calls.append(_call(name, call.name, call.argument_text or "{}"))
                answers.append(self._result(name, call.name, rng))
            return [{"role": "assistant", "content": text, **thinking, "tool_calls": calls}, *answers]
        if (ok and text and rng.random() < USER_CHANCE) or not self.definitions:
            said: Message = {"role": "assistant", "content": text or f"Done with step {self.turn}.", **thinking}
            return [said, {"role": "user", "content": results.follow_up(rng)}]
        name = f"call_{self.turn}_s"
        tool = str(rng.choice(self.definitions)["function"]["name"])
        scripted = _call(name, tool, orjson.dumps(self._arguments(tool, rng)).decode())
        asked: Message = {"role": "assistant", "content": text, **thinking, "tool_calls": [scripted]}
        return [asked, self._result(name, tool, rng)]

    def _result(self, call_id: str, tool: str, rng: Random) -> Message:
        content = results.result_of(tool, rng, scale=self.options.result_scale)
        return {"role": "tool", "tool_call_id": call_id, "content": content}

    def _arguments(self, tool: str, rng: Random) -> dict[str, object]:
        """Arguments that satisfy the tool's required properties."""
        schema = next(t["function"]["parameters"] for t in self.definitions if t["function"]["name"] == tool)
        made: dict[str, object] = {}
        for name in schema["required"]:
            kind = schema["properties"][name]
            if "enum" in kind:
                made[name] = rng.choice(kind["enum"])
            elif kind["type"] == "integer":
                made[name] = rng.randint(1, 400)
            elif kind["type"] == "boolean":
                made[name] = rng.random() < 0.5
            elif kind["type"] == "array":
                made[name] = [results.path(rng)]
            else:
                made[name] = results.path(rng)
        return made

    def first_estimate(self) -> int:
        """Expected tokens of the first prompt: tools, system text and task."""
        return self._estimate()

    # -- size ----------------------------------------------------------------------------------------------------

    def _estimate(self) -> int:
        if self.measured_tokens:
            return self.measured_tokens + int((self.prompt.size - self.measured_size) / CHARS_PER_TOKEN) + 8
        return int((len(self.head.data) + self.prompt.size) / CHARS_PER_TOKEN)

    def _would_overflow(self, added: list[Message]) -> bool:
        limit = self.options.context_limit
        if limit is None or self.options.at_limit != "stop-growing":
            return False
        more = int(sum(len(fragment(message)) for message in added) / CHARS_PER_TOKEN)
        return self._estimate() + more + self.options.max_tokens > limit

    def _begin(self) -> None:
        """Start over with a new task, as an agent does when its context is full."""
        rng = self._rng("task")
        self.prompt = Prompt()
        self.measured_tokens = self.measured_size = 0
        self.prompt.add({"role": "system", "content": SYSTEM})
        self.prompt.add({"role": "user", "content": results.task(rng)})

    def _rng(self, purpose: str) -> Random:
        return Random(f"{self.options.seed}/{self.number}/{self.part}/{self.turn}/{purpose}")


def _call(call_id: str, name: str, arguments: str) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
