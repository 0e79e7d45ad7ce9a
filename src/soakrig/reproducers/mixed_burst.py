"""``mixed-burst``: long prompts that are read in pieces beside replies that are being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from soakrig.errors import UsageError
from soakrig.reproducers.fresh import Ask, FreshConversation, passage, user
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe

PROMPT = Parameter("prompt_tokens", 18_000, "length of a long prompt, in tokens", low=16, high=1 << 24)
WRITERS = Parameter("writers", 4, "conversations with a short prompt and a long reply", low=0, high=1024)


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """Writers first. Raises ``UsageError`` where a long prompt does not fit, or where all would be writers."""
    limit = options.context_limit or probe.context_limit
    tokens, writers = PROMPT.of(options), WRITERS.of(options)
    if limit is not None and tokens + options.max_tokens > limit:
        raise UsageError(
            f"a prompt of {tokens} tokens and {options.max_tokens} of answer do not fit the context of {limit}",
            remedy=f"Use --param prompt_tokens={max(16, (limit - options.max_tokens) * 9 // 10)}.",
        )
    if writers >= options.conversations:
        raise UsageError(
            f"{writers} of {options.conversations} conversations are writers: none is left for long prompts",
            remedy="Use more --conversations, or a smaller --param writers.",
        )

    def asking(size: int) -> Callable[[int, Random, float], Ask]:
        def ask(turn: int, rng: Random, chars: float) -> Ask:
            wish = "Summarise this." if size > 64 else "Tell a long story about this, and do not stop early."
            text = passage(rng, size * chars * 0.95)
            fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
            return Ask([user(f"{text}\n\n{wish}")], fields)

        return ask

    return [
        FreshConversation(n, probe.model, options.seed, asking(64 if n < writers else tokens))
        for n in range(options.conversations)
    ]


MIXED_BURST = Reproducer(
    name="mixed-burst",
    summary="16 conversations at once: long fresh prompts, read in pieces, beside replies that are being written",
    provokes="MMU faults and engine deaths in steps that hold prefill pieces and decodes together",
    seen="the shape next to agent-loop in the same operator's search: prefill of one request while others decode",
    costs="64 turns of 18k tokens are 1.1 million tokens of prefill: 12 minutes at 1,500 a second",
    clean_means="64 clean turns exclude a fault rate above 4.6 % a turn at 95 %; how often steps were mixed depends on "
    "the engine's scheduler, which this does not see",
    signature=("Xid", "engine death"),
    load=load,
    cap=4,
    parameters=(PROMPT, WRITERS),
    uses=("conversations", "seed", "max_tokens", "temperature", "context_limit"),
    usual=LoadOptions(conversations=16, tools=0, max_tokens=256),
)
