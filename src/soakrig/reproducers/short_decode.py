"""``short-decode``: a handful of short requests, of which the first is the one that counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from soakrig.engine.bundled import Order
from soakrig.reproducers.fresh import Ask, FreshConversation, user
from soakrig.reproducers.reproducer import LoadOptions, Reproducer
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe

_SHORT = ("Say hello.", "Name a colour.", "What is two and two?", "Name a month.", "Yes or no: is ice cold?")


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """Every turn is new and of some ten tokens."""

    def ask(turn: int, rng: Random, chars: float) -> Ask:
        fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
        return Ask([user(f"{_SHORT[(turn - 1) % len(_SHORT)]} ({rng.randint(100, 999)})")], fields)

    return [FreshConversation(n, probe.model, options.seed, ask) for n in range(options.conversations)]


def order(options: LoadOptions, wanted: Order) -> Order:
    """Without the launcher's canary, which would be the first short request and die in the load's place."""
    return replace(wanted, canary=False)


SHORT_DECODE = Reproducer(
    name="short-decode",
    summary="ten short questions with short answers, the smallest load there is",
    provokes="an engine that dies of the first short request where --max-num-batched-tokens is small",
    seen="GLM-5.3-Flash at 4096 and at 2048: HTTP 500 on the first short decode, then a dead engine; 8192 is well. A "
    "defect apart from the Xid faults",
    costs="seconds beside the start. Try a value with --arg=--max-num-batched-tokens=4096; the launcher sends no "
    "canary here, so that the first request is this load's",
    clean_means="a defect that strikes at the first request is not there at these settings; a rarer one is not "
    "excluded by ten turns",
    signature=("engine death", "Xid", "turn http_error"),
    load=load,
    cap=10,
    uses=("conversations", "seed", "max_tokens", "temperature"),
    usual=LoadOptions(tools=0, max_tokens=32, temperature=0.0),
    order=order,
)
