"""``amnesia``: histories without their reasoning, after which a model may greet as if nothing had been said."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from soakrig.record.finding import Finding
from soakrig.record.hazard import upper_95
from soakrig.reproducers.logprobs import NotOfferedError, next_token, rendered
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene
from soakrig.soak.agent import results
from soakrig.soak.agent.loop import SYSTEM, AgentConversation, AgentOptions
from soakrig.soak.agent.tools import tools
from soakrig.soak.classify import Outcome
from soakrig.soak.conversation import Conversation, Turn
from soakrig.soak.probe import Probe
from soakrig.soak.reply import Reply
from soakrig.soak.request import Message

STATES = Parameter("states", 12, "conversation states that the logprob probe looks at; 0: none", low=0, high=1000)
LEAD = Parameter("lead", "The user", "what the reply begins with, before the token that is probed")
MARKERS = Parameter("markers", "hasn,didn,gre,just,sent,started", "beginnings of that token that mean amnesia, with "
                    "commas; blanks and case do not count")  # fmt: skip
MASS = Parameter("max_mass", 0.5, "most mass on such a token in any state, in percent", low=0.0, high=100.0)
ALPHA = Parameter("alpha", 0.01, "level of the test on greetings", low=1e-9, high=0.5)
GREETING = re.compile(
    r"\W*(?:hello|hi|hey|greetings|welcome|good (?:morning|afternoon|evening)|how (?:can|may) i (?:help|assist)|"
    r"what (?:can|would you like|do you want) .{0,20}(?:do|help|today)|"
    r"(?:it looks like|i see) you (?:haven|have not|didn))\b",
    re.IGNORECASE,
)
"""How a reply begins that knows of no task."""


@dataclass
class Remembering(AgentConversation):
    """Counts the turns that end in a tool's result and were answered, and those of them that got a greeting."""

    asked: int = 0
    greeted: int = 0
    first_greeting: int | None = None
    _after_tool: bool = False

    def next_turn(self) -> Turn:
        turn = super().next_turn()
        self._after_tool = self.prompt.messages[-1].startswith(b'{"role":"tool"')
        return turn

    def answered(self, reply: Reply, outcome: Outcome) -> None:
        if outcome.name == "ok" and self._after_tool:
            self.asked += 1
            if GREETING.match(reply.text):
                self.greeted += 1
                self.first_greeting = self.first_greeting or self.turn
        super().answered(reply, outcome)


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """Agent loops. Every second one sends the reasoning back: the control."""

    def shape(number: int) -> AgentOptions:
        return AgentOptions(
            model=probe.model,
            seed=options.seed,
            tool_count=options.tools,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            context_limit=options.context_limit or probe.context_limit,
            at_limit=options.at_limit,
            result_scale=options.result_scale,
            send_reasoning=number % 2 == 1,
        )

    return [Remembering(shape(number), number) for number in range(options.conversations)]


async def procedure(scene: Scene) -> None:
    """The probe on made-up states, the loops, and the test on how many replies greeted."""
    stage = scene.stage
    if STATES.of(scene.options):
        for finding in await probed(scene):
            stage.find(finding)
    await stage.run()
    for finding in greetings([c for c in stage.conversations if isinstance(c, Remembering)], ALPHA.of(scene.options)):
        stage.find(finding)


async def probed(scene: Scene) -> list[Finding]:
    """The mass on an amnesia token at the beginning of the reply, without and with reasoning in the history."""
    options, stage = scene.options, scene.stage
    markers = tuple(one for one in (word.strip().lower() for word in MARKERS.of(options).split(",")) if one)
    definitions = tools(options.tools)
    without: list[float] = []
    restored: list[float] = []
    alike = 0
    try:
        for number in range(STATES.of(options)):
            bare, full = (state(number, options, reasoning=wanted) for wanted in (False, True))
            prompts = [await rendered(stage, messages, definitions, LEAD.of(options)) for messages in (bare, full)]
            alike += prompts[0] == prompts[1]
            for prompt, masses in zip(prompts, (without, restored), strict=True):
                masses.append(100 * mass((await next_token(stage, prompt)).row, markers))
    except NotOfferedError as error:
        text = f"the mass on an amnesia token was not measured: {error}"
        return [Finding("amnesia-mass", text, unit="%", says=error.says)]
    worst, control = max(without), max(restored)
    limit = MASS.of(options)
    text = (
        f"over {len(without)} states that end in a tool's result, an amnesia token has {_mean(without):.2g} % of the "
        f"mass on average and {worst:.2g} % at most; with the reasoning restored {_mean(restored):.2g} % "
        f"and {control:.2g} %"
    )
    if alike == len(without):
        text += ". The template renders both alike: it drops the reasoning that is sent"
    bad = not worst <= limit
    if bad and control > limit:
        text += ". Restoring it does not help"
    says = "fault" if bad else "clean"
    return [
        Finding("amnesia-mass", text, worst if math.isfinite(worst) else None, "%", "measured", f"<= {limit:g} %", says)
    ]


def greetings(conversations: Sequence[Remembering], alpha: float) -> list[Finding]:
    """How many answers to a tool's result were greetings; Fisher's exact test (one-sided) against the control."""
    arms = [[c for c in conversations if c.options.send_reasoning is wanted] for wanted in (False, True)]
    (greeted, asked), (control, control_asked) = (
        (sum(c.greeted for c in arm), sum(c.asked for c in arm)) for arm in arms
    )
    if not asked:
        return [Finding("greeting-rate", "no turn that ends in a tool's result was answered", unit="%", says="unknown")]
    rate = 100 * greeted / asked
    first = min((c.first_greeting, c.number) for c in arms[0] if c.first_greeting) if greeted else (None, None)
    text = f"{greeted} of {asked} answers to a tool's result greet the user as if nothing had been said"
    if not greeted:
        bound = 100 * (upper_95(0, asked) or 1.0)
        return [
            Finding("greeting-rate", f"{text}; at 95 % at most {bound:.2g} % do", rate, "%", "measured", says="clean")
        ]
    if not control_asked:
        return [
            Finding(
                "greeting-rate", f"{text}; there is no control", rate, "%", "measured", "", "fault", first[1], first[0]
            )
        ]
    from scipy.stats import fisher_exact  # slow to import

    table = [[greeted, asked - greeted], [control, control_asked - control]]
    outcome: Any = fisher_exact(table, alternative="greater")
    p = float(outcome.pvalue)
    text += f", and {control} of {control_asked} with the reasoning sent back (Fisher's exact test: p = {p:.2g})"
    sure = p <= alpha
    return [
        Finding("greeting-rate", text, rate, "%", "measured", says="note", conversation=first[1], turn=first[0]),
        Finding(
            "amnesia",
            "replies greet for lack of the reasoning"
            if sure
            else "replies greet, and too few turns were sent to tell whether the missing reasoning is why",
            p,
            "p",
            "derived",
            f"> {alpha:g}" if sure else f"<= {alpha:g} to tell",
            "fault" if sure else "unknown",
            first[1],
            first[0],
        ),
    ]


def state(number: int, options: LoadOptions, *, reasoning: bool) -> list[Message]:
    """A made-up history of an agent that ends in a tool's result, with or without the reasoning of its calls."""
    rng = Random(f"{options.seed}/amnesia/{number}")
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": results.task(rng)}]
    for turn in range(1 + number % 6):
        where = results.path(rng)
        thought = f"The user wants the fault in {where} found. I read the file first, then I look at its tests."
        call = {"name": "read_file", "arguments": orjson.dumps({"path": where}).decode()}
        called = {"id": f"call_{turn}", "type": "function", "function": call}
        thinking: Message = {"reasoning_content": thought} if reasoning else {}
        messages.append({"role": "assistant", "content": "", **thinking, "tool_calls": [called]})
        content = results.result_of("read_file", rng)
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": content})
    return messages


def mass(row: dict[str, float], markers: Sequence[str]) -> float:
    """The probability of all tokens of ``row`` that begin as one of ``markers``."""
    hit = [value for token, value in row.items() if token.strip().lower().startswith(tuple(markers))]
    return sum(map(math.exp, hit))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


AMNESIA = Reproducer(
    name="amnesia",
    summary="agent loops whose history lacks the reasoning, beside loops that send it back",
    provokes="a model that reads its own empty thinking, concludes that no task was ever given, and greets the user",
    seen="GLM-5.3-Flash: 3.3 % of the mass after a tool's result as an editor sends it, 0.00 % with the reasoning "
    "back; 5 greetings in 112 turns against none in 3,788 of another model (p = 2e-8); "
    "never where a user's message ends it",
    costs="24 one-token probes and 120 turns: 20 minutes; at 4 % a turn, 60 turns greet two or three times, and the "
    "test wants 7 of 60 against none",
    clean_means="no mass worth the name in these states, no greeting in these turns; the report bounds the rate",
    signature=("finding amnesia", "finding greeting-rate"),
    load=load,
    parameters=(STATES, LEAD, MARKERS, MASS, ALPHA),
    usual=LoadOptions(conversations=2),
    procedure=procedure,
    needs="for the probe, /tokenize and /v1/completions with logprobs (vLLM, the embedded engine); else nothing",
)
