"""``agent-loop``: a growing conversation with tools, re-sent whole every turn."""

from __future__ import annotations

from collections.abc import Sequence

from soakrig.errors import UsageError
from soakrig.reproducers.reproducer import LoadOptions, Reproducer
from soakrig.soak.agent.loop import AgentConversation, AgentOptions
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """One conversation for each place of the load.

    Raises ``UsageError`` when the first prompt alone would not fit the engine's context.
    """
    limit = options.context_limit or probe.context_limit
    shape = AgentOptions(
        model=probe.model,
        seed=options.seed,
        tool_count=options.tools,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        context_limit=limit,
        at_limit=options.at_limit,
        result_scale=options.result_scale,
    )
    conversations = [AgentConversation(shape, number) for number in range(options.conversations)]
    first = conversations[0].first_estimate()
    if limit is not None and first + options.max_tokens > limit:
        raise UsageError(
            f"the first prompt of about {first} tokens ({options.tools} tools) and {options.max_tokens} tokens of "
            f"answer do not fit the engine's context of {limit}",
            remedy="Use fewer --tools or a smaller --max-tokens.",
        )
    return conversations


AGENT_LOOP = Reproducer(
    name="agent-loop",
    summary="a coding agent's conversation: grows by a reply and a tool result a turn, re-sent whole, streamed",
    provokes="MMU faults (Xid 31) and engine deaths where prefix cache and prefill meet on a growing prefix",
    seen="GLM-5.3-Flash on one 95.6 GiB card with staged experts: Xid 31 at turn ~33 with ~13k tokens of context, in "
    "one process, no second client; single long prompts did not provoke it",
    costs="about 10 minutes for 60 turns on that stack; 7.5 MB of requests; context grows to some 20k tokens",
    clean_means="60 clean turns exclude a fault rate above 4.9 % a turn at 95 %; a fault of one in thirty turns is "
    "missed by 60 turns in 13 of 100 runs",
    signature=("Xid 31", "engine death"),
    load=load,
)
