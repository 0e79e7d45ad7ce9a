"""What a load may do beyond conversations: ask beside them, judge what it sees, let the engine go and take another up.

A run is watched throughout: the kernel log and the GPUs while an engine is being ended and started, and the engine's
own process, log and counters as long as there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from soakrig.clock import Clock
from soakrig.record.events import EngineChecked, EngineSwitched, Event, FindingMade
from soakrig.record.finding import Finding
from soakrig.soak.client import ChatClient
from soakrig.soak.conversation import Conversation
from soakrig.soak.liveness import CANARY_S, RETRY_S, Liveness
from soakrig.soak.load import Load
from soakrig.soak.probe import Probe, probe
from soakrig.soak.target import Target
from soakrig.soak.watch.all_watchers import Watchers, engine_watchers
from soakrig.soak.watch.watcher import Sink, WatchGroup

TICK_S = 0.25


@dataclass
class Stage:
    """One run as its load sees it. ``conversations``: those of the plain load. ``take`` keeps and judges an event.

    ``gone``: the load has ended the engine and started no other: nothing is asked of it any more.
    """

    client: ChatClient
    load: Load
    clock: Clock
    take: Callable[[Event], None]
    sink: Sink
    probe: Probe
    conversations: Sequence[Conversation]
    watchers: Watchers
    group: WatchGroup
    accept: Collection[str] = ()
    retry_s: float = RETRY_S
    gone: bool = False

    @property
    def target(self) -> Target:
        """The engine that is attached now."""
        return self.client.target

    @property
    def over(self) -> bool:
        """Whether the load has ended: a fault, a dead engine, Ctrl-C. Nothing more is to be sent then."""
        return self.load.ended is not None

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits for an answer: nothing ended the load, or turns that were not ok did."""
        return self.load.ended in (None, "completed", "too_many_bad") and not self.load.dead

    async def run(self, conversations: Sequence[Conversation] | None = None) -> None:
        """Drive conversations, the plain load's where none are given, until they or the plan are through."""
        await self.load.drive(self.conversations if conversations is None else conversations)

    def find(self, finding: Finding) -> None:
        """Keep and judge a finding."""
        self.take(FindingMade(self.clock.time(), self.clock.monotonic(), finding))

    async def post(self, path: str, data: Any) -> httpx.Response | None:
        """A question beside the load; no turn, no exposure. None where nothing answered."""
        return await self.client.post(path, data)

    async def wait(self, seconds: float) -> None:
        """Let time pass; returns early once the load is over."""
        end = self.clock.monotonic() + seconds
        while not self.over and (left := end - self.clock.monotonic()) > 0:
            await self.clock.sleep(min(TICK_S, left))

    async def let_go(self, how: str) -> bool:
        """Before the load ends the engine: ask whether it lives, then stop watching it. False, and the load is over,
        where it is dead already."""
        life = await self.load.liveness.thorough()
        status = self.watchers.exit_status()
        self.take(EngineChecked(self.clock.time(), self.clock.monotonic(), life.alive, life.how, status))
        if life.alive is False:
            self.load.dead = True
            self.load.end("engine_dead", life.how)
            return False
        await asyncio.to_thread(self.group.stop)
        await asyncio.sleep(0)  # what the watchers' last polls brought
        self.gone = True
        self.take(EngineSwitched(self.clock.time(), self.clock.monotonic(), "ended", how))
        return True

    async def take_up(self, target: Target, how: str) -> None:
        """Attach the engine that the load has started. Raises as ``probe``."""
        self.client.target = target
        self.probe = await probe(self.client, self.probe.model)
        self.watchers = engine_watchers(target, self.clock)
        self.client.progressing = self.watchers.progressing
        self.load.liveness = self.make_liveness()
        self.group = WatchGroup(self.watchers.watchers, self.sink, self.clock)
        self.take(EngineSwitched(self.clock.time(), self.clock.monotonic(), "started", how, target.pid))
        self.gone = False
        await asyncio.to_thread(self.group.start)

    def make_liveness(self) -> Liveness:
        """Who asks whether the attached engine lives."""
        return make_liveness(self.client, self.probe, self.watchers, self.accept, self.retry_s)


def make_liveness(
    client: ChatClient, probed: Probe, watchers: Watchers, accept: Collection[str], retry_s: float
) -> Liveness:
    """Who asks whether an engine lives, by what it offers for that."""
    return Liveness(
        client,
        probed.model,
        watchers.process_alive,
        probed.health == 200,
        probed.ping,
        accept,
        canary_s=min(CANARY_S, client.timeouts.stall),
        retry_s=retry_s,
    )
