"""``tool-tags``: calls of every kind, asked for by name, so that the parser of the engine has work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from soakrig.record.finding import Finding
from soakrig.reproducers.fresh import Ask, FreshConversation, user
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene
from soakrig.soak.agent import results
from soakrig.soak.agent.tools import tools
from soakrig.soak.classify import Outcome
from soakrig.soak.conversation import Conversation, Turn
from soakrig.soak.probe import Probe
from soakrig.soak.reply import Reply

_TEXTS = (
    "{path}", "src/{path} and tests/{path}", "a < b && c > d", "first line\nsecond line", 'say "hello"',
    "<div>{path}</div>", "{path}/", "key=value; other=value", "", "long: {long}",
)  # fmt: skip
"""Values that parsers trip over: tags of HTML, quotes, newlines, nothing at all, one that is cut into many tokens."""


@dataclass
class Caller(FreshConversation):
    """Counts the calls that came, and the turns in which one was broken."""

    calls: int = 0
    broken: int = 0

    def __post_init__(self) -> None:
        self.seen = self._seen

    def _seen(self, turn: Turn, reply: Reply, outcome: Outcome) -> None:
        self.calls += len(reply.calls)
        self.broken += outcome.name == "tool_malformed"


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """Each turn asks for one call, by name and with its arguments spelled out."""
    definitions = tools(options.tools)

    def ask(turn: int, rng: Random, chars: float) -> Ask:
        function = definitions[(turn - 1) % len(definitions)]["function"]
        wanted = {name: _value(kind, rng) for name, kind in function["parameters"]["properties"].items()}
        text = f"Call {function['name']} once, with exactly these arguments: {orjson.dumps(wanted).decode()}"
        fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
        return Ask([user(text)], fields, definitions)

    return [Caller(n, probe.model, options.seed, ask) for n in range(options.conversations)]


async def procedure(scene: Scene) -> None:
    """The turns, then how many calls there were to judge."""
    await scene.stage.run()
    callers = [one for one in scene.stage.conversations if isinstance(one, Caller)]
    calls, broken = sum(one.calls for one in callers), sum(one.broken for one in callers)
    text = f"{calls} tool calls came, and {broken} turns had a broken one"
    if not calls and not broken:
        text = "no tool call came at all, so that nothing was tried"
    says = "clean" if calls and not broken else "note" if broken else "unknown"
    scene.stage.find(Finding("tool-calls", text, float(calls), "calls", bound=">= 1 call", says=says))


def _value(kind: dict[str, Any], rng: Random) -> Any:
    if "enum" in kind:
        return rng.choice(kind["enum"])
    match kind["type"]:
        case "integer":
            return rng.randint(0, 10**9)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [results.path(rng) for _ in range(rng.randint(0, 3))]
        case _:
            text = rng.choice(_TEXTS)
            return text.replace("{path}", results.path(rng)).replace("{long}", results.result_of("read_file", rng))


TOOL_TAGS = Reproducer(
    name="tool-tags",
    summary="a tool call a turn, asked for by name, with arguments that parsers trip over",
    provokes="markup of the model's own call syntax in a tool's name or arguments: a closing tag that straddles two "
    "tokens slips through a streaming parser",
    seen='list_dir called with the key "path</arg_key>" in a real editor\'s turn; names that end in a tag; calls that '
    "are announced and never come",
    costs="40 turns of at most 512 tokens, some of them far shorter: 10 minutes at 16 tokens a second",
    clean_means="the calls that the report counts were whole, named a tool on offer and held no markup; a slip of one "
    "in a hundred is missed by 40 calls in 67 of 100 runs",
    signature=("turn tool_malformed",),
    load=load,
    cap=40,
    uses=("conversations", "tools", "seed", "max_tokens", "temperature"),
    usual=LoadOptions(tools=50, max_tokens=512),
    procedure=procedure,
)
