"""``long-prefill``: a ladder of fresh prompts up to the advertised context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from soakrig.errors import UsageError
from soakrig.record.finding import Finding
from soakrig.reproducers.fresh import Ask, FreshConversation, passage, user
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene
from soakrig.soak.classify import Outcome
from soakrig.soak.conversation import Conversation, Turn
from soakrig.soak.probe import Probe
from soakrig.soak.reply import Reply

FROM = Parameter("from_tokens", 1024, "the first rung, in tokens", low=16, high=1 << 24)
RUNGS = Parameter("rungs", 8, "rungs of the ladder, in equal ratios", low=2, high=64)
TOP = Parameter("to_share", 0.98, "the last rung, as a share of context less answer", low=0.01, high=1.0)


@dataclass
class Ladder(FreshConversation):
    """Remembers the longest prompt that was answered, by the engine's own count (``measured``) or by estimate."""

    longest: int = 0
    measured: bool = True
    limit: int = 0

    def __post_init__(self) -> None:
        self.seen = self._seen

    def _seen(self, turn: Turn, reply: Reply, outcome: Outcome) -> None:
        tokens = reply.prompt_tokens or turn.context_tokens
        if outcome.name == "ok" and tokens > self.longest:
            self.longest, self.measured = tokens, reply.prompt_tokens is not None


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """Raises ``UsageError`` where nobody says how much context there is, or it cannot hold the first rung."""
    limit = options.context_limit or probe.context_limit
    if limit is None:
        raise UsageError("the engine does not say its context limit", remedy="Give --context-limit TOKENS.")
    top = int((limit - options.max_tokens) * TOP.of(options))
    first, rungs = FROM.of(options), RUNGS.of(options)
    if top <= first:
        raise UsageError(
            f"the last rung of {top} tokens ({TOP.of(options):g} of a context of {limit} less {options.max_tokens} of "
            f"answer) is not above the first of {first}",
            remedy="Use a smaller --param from_tokens.",
        )

    def ask(turn: int, rng: Random, chars: float) -> Ask:
        tokens = first * (top / first) ** (((turn - 1) % rungs) / (rungs - 1))
        text = passage(rng, tokens * chars - 60)
        fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
        return Ask([user(f"{text}\n\nWhat is this about? One sentence.")], fields)

    return [Ladder(n, probe.model, options.seed, ask, limit=limit) for n in range(options.conversations)]


async def procedure(scene: Scene) -> None:
    """The ladder, then what its highest step was."""
    await scene.stage.run()
    ladders = [one for one in scene.stage.conversations if isinstance(one, Ladder)]
    best = max(ladders, key=lambda one: one.longest)
    share = best.longest / best.limit
    scene.stage.find(
        Finding(
            "longest-prefill",
            f"the longest prompt that was prefilled and answered has {best.longest} tokens, {100 * share:.0f} % of the "
            f"{best.limit} that are advertised",
            float(best.longest),
            "tokens",
            "measured" if best.measured else "derived",
        )
    )


LONG_PREFILL = Reproducer(
    name="long-prefill",
    summary="a ladder of prompts that were never sent before, up to the advertised context",
    provokes="out of memory in mid-serving: buffers that were allocated after the engine measured what is free leave a "
    "long prompt no room, long after a start that looked well",
    seen="three crashes of GLM-5.3-Flash with staged experts in one day, at 124 MiB that were not there; context that "
    "had been advertised and never tried near its limit",
    costs="one prefill of the whole context and the rungs below it, about twice the top rung: 300k tokens at 1,500 a "
    "second are 7 minutes",
    clean_means="a prompt of the length that the report names was prefilled here, alone; nothing above it was tried, "
    "and nothing beside other requests",
    signature=("engine death", "engine log", "Xid", "turn http_error", "turn error_frame", "turn truncated"),
    load=load,
    cap=8,
    parameters=(FROM, RUNGS, TOP),
    uses=("conversations", "seed", "max_tokens", "temperature", "context_limit"),
    usual=LoadOptions(tools=0, max_tokens=32, temperature=0.0),
    procedure=procedure,
)
