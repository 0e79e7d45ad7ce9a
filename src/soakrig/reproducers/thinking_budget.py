"""``thinking-budget``: hard questions under a small ``max_tokens``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import orjson

from soakrig.record.finding import Finding
from soakrig.reproducers.fresh import Ask, FreshConversation, user
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene
from soakrig.soak.classify import Outcome, classify
from soakrig.soak.conversation import Conversation, Turn
from soakrig.soak.probe import Probe
from soakrig.soak.reply import Reply

CONTROL = Parameter("control_tokens", 8192, "budget under which the first empty turn is asked again; 0: is not",
                    low=0, high=1 << 24)  # fmt: skip
_QUESTIONS = (
    "A bat and a ball cost {a}.10 together and the bat costs {a} more than the ball. What does the ball cost?",
    "{a} people shake hands with one another, each pair once. How many handshakes, and why?",
    "Which is larger, {a} to the power of {b} or {b} to the power of {a}? Prove it.",
    "A snail climbs {a} m by day and slips {b} m by night. When is it at the top of a wall of {c} m?",
    "How many primes lie between {a} and {c}? Check each candidate.",
)


@dataclass
class Asker(FreshConversation):
    """Keeps what it asked and got no answer to: the turn, and whether its reasoning had come."""

    empty: list[tuple[Turn, bool]] = field(default_factory=list[tuple[Turn, bool]])
    answered_turns: int = 0

    def __post_init__(self) -> None:
        self.seen = self._seen

    def _seen(self, turn: Turn, reply: Reply, outcome: Outcome) -> None:
        self.answered_turns += outcome.name in ("ok", "answerless")
        if outcome.name == "answerless":
            self.empty.append((turn, bool(reply.reasoning)))


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """Every turn is a question of its own that takes some thought."""

    def ask(turn: int, rng: Random, chars: float) -> Ask:
        low, high = sorted((rng.randint(3, 40), rng.randint(41, 90)))
        text = rng.choice(_QUESTIONS).format(a=high, b=low, c=high + rng.randint(20, 300))
        fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
        return Ask([user(text)], fields)

    return [Asker(n, probe.model, options.seed, ask) for n in range(options.conversations)]


async def procedure(scene: Scene) -> None:
    """The questions; then how many came back empty, and whether the first of those has an answer under more budget."""
    stage = scene.stage
    await stage.run()
    askers = [one for one in stage.conversations if isinstance(one, Asker)]
    empty = [found for one in askers for found in one.empty]
    turns, thought = sum(one.answered_turns for one in askers), sum(with_reasoning for _, with_reasoning in empty)
    if turns:
        share = 100 * len(empty) / turns
        text = f"{len(empty)} of {turns} turns came back empty under max_tokens {scene.options.max_tokens}"
        text += f", {thought} of them with reasoning only" if empty else ""
        stage.find(Finding("empty-turns", text, share, "%", "derived", says="note" if empty else "clean"))
    if not empty or not CONTROL.of(scene.options) or not stage.wanted:
        return
    first = empty[0][0]
    budget = _fitting(CONTROL.of(scene.options), scene, first)
    body = orjson.loads(first.body) | {"max_tokens": budget}
    outcome = classify(await stage.client.send(orjson.dumps(body)), accept=stage.accept)
    eaten = outcome.name == "ok"
    what = "has an answer" if eaten else f"is {outcome.name}: {outcome.why}"
    stage.find(
        Finding(
            "more-budget",
            f"the first empty turn, asked again under max_tokens {budget}, {what}: it is "
            + ("the budget that thinking ate" if eaten else "not the budget alone"),
            float(budget),
            "tokens",
            conversation=first.conversation,
            turn=first.turn,
        )
    )


def _fitting(budget: int, scene: Scene, turn: Turn) -> int:
    limit = scene.options.context_limit or scene.stage.probe.context_limit
    return budget if limit is None else max(1, min(budget, limit - 2 * turn.context_tokens - 64))


THINKING_BUDGET = Reproducer(
    name="thinking-budget",
    summary="questions that take thought, under the small max_tokens that editors send for short turns",
    provokes="turns whose budget the reasoning eats: finish reason length (or stop), no content; the client keeps the "
    "empty turn and the thread reads as fresh",
    seen="a budget of 200 on GLM-5.3-Flash: finish reason length, nothing in content; its reasoning took 183 tokens "
    "at low effort, 484 to 713 at high, 1,812 at most",
    costs="20 turns of 200 tokens: 5 minutes at 16 a second; where one is empty, a turn of control_tokens more",
    clean_means="this budget left room for an answer to these questions at this effort; harder ones take more",
    signature=("turn answerless",),
    load=load,
    cap=20,
    parameters=(CONTROL,),
    uses=("conversations", "seed", "max_tokens", "temperature", "context_limit"),
    usual=LoadOptions(tools=0, max_tokens=200),
    procedure=procedure,
)
