"""Output budgets: a small one is raised, so that thinking does not eat the answer, and thinking gets a share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from soakrig.engine.gateway.body import Json
from soakrig.engine.gateway.policies import ThinkingBudget

CHAT_NAMES = ("max_completion_tokens", "max_tokens")
RESPONSES_NAMES = ("max_output_tokens",)
TEMPLATE_TOKENS = 1024
"""Room left for what a chat template writes around the messages, where tokens are bounded by bytes."""
BYTES_PER_TOKEN = 3
"""Modelled: what an engine without /tokenize is taken to need, on the side of too many tokens."""


def budget_names(path: str) -> tuple[str, ...]:
    """The fields that hold the output budget of a request to ``path``; none where it is not for us."""
    return {"/v1/chat/completions": CHAT_NAMES, "/v1/responses": RESPONSES_NAMES}.get(path, ())


def stated_budget(fields: Json, path: str) -> int | None:
    """The output budget that a request states, in tokens: the first of its names wins, as engines have it."""
    return next((fields[name] for name in budget_names(path) if _is_count(fields.get(name))), None)


async def raise_small(
    fields: Json,
    path: str,
    least: int,
    context: int | None,
    size: int,
    count: Callable[[], Awaitable[int | None]],
) -> bool:
    """Raise every stated budget below ``least`` to it, so far as prompt and budget fit ``context`` (tokens; None: not
    known). ``size``: bytes of the request; ``count``: asks the engine for the prompt's tokens, only where the bytes do
    not settle it. Never lowers one, and leaves a request without a budget alone. Returns whether one was raised."""
    small = [name for name in budget_names(path) if _is_count(fields.get(name)) and fields[name] < least]
    if not small:
        return False
    room = least
    if context is not None and size + TEMPLATE_TOKENS + least > context:
        prompt = await count()
        room = min(least, context - (size // BYTES_PER_TOKEN if prompt is None else prompt))
    raised = [name for name in small if fields[name] < room]
    fields.update(dict.fromkeys(raised, room))
    return bool(raised)


def add_thinking_budget(fields: Json, path: str, policy: ThinkingBudget) -> bool:
    """Give a chat request that states none a ``thinking_token_budget``; whether it was given."""
    if path != "/v1/chat/completions" or fields.get("thinking_token_budget") is not None:
        return False
    budget = stated_budget(fields, path)
    share = policy.fixed if budget is None else max(1, int(policy.share * budget))
    fields["thinking_token_budget"] = min(policy.fixed, share)
    return True


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0
