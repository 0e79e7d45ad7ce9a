"""A request on its way to the engine: the policies that touch it, and what its answer has to go through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from soakrig.engine.gateway.answer import AnswerEditor, clean_history
from soakrig.engine.gateway.body import Json, glance, objects, read_object, write
from soakrig.engine.gateway.budgets import add_thinking_budget, budget_names, raise_small
from soakrig.engine.gateway.counters import Counters
from soakrig.engine.gateway.effort import asked_effort, fill_preset, map_words
from soakrig.engine.gateway.reasoning_memory import place
from soakrig.engine.gateway.upstream import Route, Upstream

CHAT = "/v1/chat/completions"
GENERATING = frozenset({CHAT, "/v1/completions", "/v1/responses"})
"""Paths whose answer is never empty."""

CountTokens = Callable[[Upstream, Json], Awaitable[int | None]]
"""Asks an engine how many tokens a chat request's prompt has; None where it cannot say."""


@dataclass
class Outgoing:
    """A request as the engine gets it. ``body`` is the client's own, byte for byte, where no policy changed anything.
    ``unraised``: the body to send where the engine refuses the raised budget."""

    upstream: Upstream
    method: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    editor: AnswerEditor | None = None
    unraised: bytes | None = None
    changed: bool = False
    effects: list[str] = field(default_factory=list[str])

    @property
    def generates(self) -> bool:
        """Whether an empty 200 is a failure."""
        return self.method == "POST" and self.path in GENERATING


async def apply_policies(out: Outgoing, route: Route, counters: Counters, count_tokens: CountTokens) -> None:
    """Change ``out`` as the model's policies say; no policy, or none that applies: its body stays as it is."""
    policies = route.upstream.policies
    name = route.upstream.name
    if not (policies.edits_requests or policies.edits_answers or route.model):
        return
    fields = read_object(out.body)
    if fields is None:
        return  # the engine says what it thinks of it

    def note(policy: str, effect: str = "request") -> None:
        counters.policy.labels(name, policy, effect).inc()
        out.effects.append(policy)

    if route.model is not None:
        fields["model"] = route.model
        out.changed = True
    if route.preset is not None and fill_preset(fields, route.preset, out.path):
        note("presets")
    if policies.effort_words and map_words(fields, policies.effort_words):
        note("effort_words")
    chat = out.path in (CHAT, "/tokenize")
    messages = objects(fields.get("messages")) if chat else []
    where = place(messages)
    if messages and policies.sanitize_tool_tags and clean_history(messages):
        note("sanitize_tool_tags")
    if messages and policies.restore_reasoning and route.upstream.memory.restore(messages):
        note("restore_reasoning")
    before = {key: fields[key] for key in budget_names(out.path) if key in fields}
    least = policies.min_output_tokens
    if least is not None and before:
        context = route.upstream.context_of(fields.get("model"))
        raised = await raise_small(
            fields, out.path, least, context, len(out.body), lambda: count_tokens(route.upstream, fields)
        )
        if raised:
            note("min_output_tokens")
    budget = policies.thinking_token_budget
    if budget is not None and add_thinking_budget(fields, out.path, budget):
        note("thinking_token_budget")
    out.changed = out.changed or bool(out.effects)
    if policies.presets or policies.effort_words:
        counters.effort.labels(name, asked_effort(fields)).inc()
    if out.changed:
        out.body = write(fields)
        if "min_output_tokens" in out.effects:
            out.unraised = write({**fields, **before})
    if out.path == CHAT and policies.edits_answers:
        out.editor = AnswerEditor(policies, route.upstream.memory, where, lambda policy: note(policy, "answer"))


def asked_model(body: bytes) -> str | None:
    """The model that a body names."""
    model = (glance(body) or {}).get("model")
    return model if isinstance(model, str) and model else None
