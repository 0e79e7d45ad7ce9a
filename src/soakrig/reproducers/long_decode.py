"""``long-decode``: one reply that goes on and on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from soakrig.errors import UsageError
from soakrig.record.finding import Finding
from soakrig.reproducers.fresh import Ask, FreshConversation, user
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene
from soakrig.soak.agent import results
from soakrig.soak.classify import Outcome
from soakrig.soak.conversation import Conversation, Turn
from soakrig.soak.probe import Probe
from soakrig.soak.reply import Reply

IGNORE_EOS = Parameter("ignore_eos", True, "whether to send ignore_eos (vLLM, the embedded engine), so that no reply "
                       "ends early")  # fmt: skip
REACH = Parameter("reach", 0.5, "the longest reply has to be so much of --max-tokens, or the run is inconclusive",
                  low=0.0, high=1.0)  # fmt: skip


@dataclass
class Writer(FreshConversation):
    """Remembers the longest reply in tokens."""

    longest: int = 0

    def __post_init__(self) -> None:
        self.seen = self._seen

    def _seen(self, turn: Turn, reply: Reply, outcome: Outcome) -> None:
        if outcome.name == "ok":
            self.longest = max(self.longest, reply.output_tokens)


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """Raises ``UsageError`` where the reply does not fit the context."""
    limit = options.context_limit or probe.context_limit
    if limit is not None and options.max_tokens + 256 > limit:
        raise UsageError(
            f"a reply of {options.max_tokens} tokens does not fit the engine's context of {limit}",
            remedy=f"Use --max-tokens {limit - 256} or less.",
        )

    def ask(turn: int, rng: Random, chars: float) -> Ask:
        fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
        if IGNORE_EOS.of(options):
            fields["ignore_eos"] = True
        return Ask([user(f"{results.task(rng)} Write all of the code, file after file, with tests.")], fields)

    return [Writer(n, probe.model, options.seed, ask) for n in range(options.conversations)]


async def procedure(scene: Scene) -> None:
    """The replies, then whether any of them was long."""
    await scene.stage.run()
    longest = max(one.longest for one in scene.stage.conversations if isinstance(one, Writer))
    wanted = REACH.of(scene.options) * scene.options.max_tokens
    short = longest < wanted and not scene.stage.over
    scene.stage.find(
        Finding(
            "longest-reply",
            f"the longest whole reply has {longest} tokens"
            + (": none was long, so that a long generation was not tried" if short else ""),
            float(longest),
            "tokens",
            bound=f">= {wanted:.0f} tokens",
            says="unknown" if short else "note",
        )
    )


LONG_DECODE = Reproducer(
    name="long-decode",
    summary="short prompts with replies of thousands of tokens",
    provokes="illegal accesses that come late in one generation, after much correct text",
    seen="speculative decoding at depth 1 on GLM-5.3-Flash: right words at first, then an illegal memory access on the "
    "way through a longer reply",
    costs="8 replies of 4,096 tokens are 33k tokens of decode: 35 minutes at 16 a second",
    clean_means="replies of the length that the report names were written whole; a fault per token is bounded by the "
    "output tokens, not by the few turns",
    signature=("engine death", "Xid", "engine log", "turn truncated", "turn error_frame"),
    load=load,
    cap=8,
    parameters=(IGNORE_EOS, REACH),
    uses=("conversations", "seed", "max_tokens", "temperature", "context_limit"),
    usual=LoadOptions(tools=0, max_tokens=4096),
    procedure=procedure,
)
