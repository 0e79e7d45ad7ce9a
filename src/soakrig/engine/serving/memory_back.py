"""Waiting until the memory of a stopped model is really back: a driver gives it back some time after the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from soakrig.clock import Clock
from soakrig.engine.preflight.finding import gib
from soakrig.engine.preflight.machine import GpuFacts

SHARE = 0.8
"""Of what was held; the rest may be page tables, caches, and what others took meanwhile."""
DEADLINE_S = 120.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Held:
    """What a model held before it was stopped. ``cards``: bytes by the card's UUID."""

    host: int = 0
    cards: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes available on the host, and in use by card; a card that does not tell is left out."""

    host: int
    cards: Mapping[str, int] = field(default_factory=dict[str, int])


def held_on_cards(gpu: GpuFacts, pids: frozenset[int]) -> dict[str, int]:
    """Bytes that ``pids`` hold, by the card's UUID."""
    found: dict[str, int] = {}
    for card in gpu.cards or ():
        held = sum(one.bytes or 0 for one in card.holders or () if one.pid in pids)
        if held:
            found[card.uuid] = held
    return found


def used_on_cards(gpu: GpuFacts) -> dict[str, int]:
    """Bytes in use by the card's UUID."""
    return {card.uuid: card.used for card in gpu.cards or () if card.used is not None}


def missing(held: Held, before: Level, now: Level, *, share: float = SHARE) -> list[str]:
    """What is not back yet, in words with both numbers; empty once it is."""
    found: list[str] = []
    back, due = now.host - before.host, int(share * held.host)
    if back < due:
        found.append(f"{gib(max(back, 0))} of host memory are back, {gib(due)} were expected")
    for uuid, bytes_held in held.cards.items():
        if uuid not in before.cards or uuid not in now.cards:
            continue
        back, due = before.cards[uuid] - now.cards[uuid], int(share * bytes_held)
        if back < due:
            found.append(f"{gib(max(back, 0))} of {uuid} are back, {gib(due)} were expected")
    return found


def wait_back(
    held: Held,
    before: Level,
    read: Callable[[], Level],
    clock: Clock,
    *,
    deadline_s: float = DEADLINE_S,
    host_fits: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Wait until it is back; what is still missing after ``deadline_s`` seconds.

    ``host_fits``: whether the host has room enough for the next model already. Host memory is measured as a sum over
    everybody, so others may take what came back; where it fits all the same, it is not waited for.
    """
    never, end = threading.Event(), clock.monotonic() + deadline_s
    while True:
        now = read()
        left = missing(held, before, now)
        if left and not missing(Held(0, held.cards), before, now) and host_fits():
            left = []
        if not left or clock.monotonic() >= end:
            return left
        clock.wait(never, POLL_S)
