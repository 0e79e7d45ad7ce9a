"""Whether the engine lives: asked cheaply after every turn, and thoroughly after one that was not ok."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import orjson

from soakrig.soak.classify import classify
from soakrig.soak.client import ChatClient
from soakrig.soak.reply import Reply, token_count

PING_S = 15.0
"""How long a round trip may take: longer than the endpoint's own deadline, and than one step of a busy engine."""
CANARY_S = 30.0
"""How long a canary waits while nothing moves at the engine at all."""
RETRY_S = 1.0
LOOK_S = 0.25
QUESTIONS = ("Answer with one word: ready.", "Count from one to five.")
"""The second one is asked where the first brought nothing: one prompt may happen to end at once."""


@dataclass(frozen=True)
class Life:
    """``how`` names the evidence, for the record. ``alive`` is None where it could not be found out."""

    alive: bool | None
    how: str


@dataclass
class Liveness:
    """``process``: asks whether the engine's process lives (None where it is not known). ``has_health``: the target
    answered 200 on /health before the load began; a server without that endpoint is not dead for lack of it.
    ``has_ping``: it has ``/soakrig/ping``, which goes through the engine and is asked in place of /health.

    Once found dead, an engine stays dead: later questions get the same answer at once.
    """

    client: ChatClient
    model: str
    process: Callable[[], tuple[bool, str]] | None = None
    has_health: bool = False
    has_ping: bool = False
    accept: Collection[str] = ()
    canary_s: float = CANARY_S
    retry_s: float = RETRY_S
    dead: Life | None = None
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def quick(self) -> Life:
        """One look, cheap enough for every turn: the process, and a round trip through the engine where the target
        offers one, else /health where it has that. An answer of 5xx or none may be a busy moment, so that the thorough
        question decides."""
        gone = self._process_gone()
        if gone is not None:
            return gone
        if self.has_ping:
            response = await self.client.get("/soakrig/ping", min(PING_S, self.canary_s))
            if response is None or response.status_code != 200:
                return await self.thorough()
            return Life(True, "a round trip through the engine")
        if self.has_health:
            response = await self.client.get("/health")
            if response is None or response.status_code >= 500:
                return await self.thorough()
        return Life(True, "process and /health" if self.process else "the turn itself")

    async def thorough(self) -> Life:
        """The process, and one small generation that has to bring a token; where it does not, a second one. /health
        alone proves nothing: a frozen engine keeps it green (and some servers have none)."""
        async with self._asking:
            if self.dead is None:
                life = await self._ask()
                if life.alive is False:
                    self.dead = life
                return life
            return self.dead

    async def _ask(self) -> Life:
        life = Life(None, "not asked")
        for number, question in enumerate(QUESTIONS):
            if number:
                await self.client.clock.sleep(self.retry_s)
            gone = self._process_gone()
            if gone is not None:
                return gone
            reply = await self._canary(question)
            gone = self._process_gone()
            if gone is not None:
                return gone
            life = self._life(reply)
            if life.alive:
                return life
        health = await self.client.get("/health") if self.has_health else None
        said = f"; /health answered {health.status_code}" if health is not None else ""
        return Life(life.alive, life.how + said)

    def _process_gone(self) -> Life | None:
        if self.process is None:
            return None
        alive, detail = self.process()
        return None if alive else Life(False, detail)

    def _life(self, reply: Reply) -> Life:
        """A whole answer with a token in it is life. A refusal (4xx) says that somebody reads requests, which may be a
        proxy: neither life nor death."""
        if reply.status is not None and 400 <= reply.status < 500:
            return Life(None, f"a canary request was refused with status {reply.status}: {_text(reply.body)}")
        outcome = classify(reply, accept=self.accept)
        whole = outcome.name in ("ok", "answerless", "degenerate", "tool_malformed")
        tokens = reply.deltas or token_count((reply.usage or {}).get("completion_tokens")) or 0
        if whole and tokens:
            return Life(True, "a canary request was answered")
        return Life(False, f"a canary request brought no whole answer ({outcome.name}: {outcome.why})")

    async def _canary(self, question: str) -> Reply:
        """Send it, and wait while anything moves: tokens of any stream in flight, or the engine's own counters. A busy
        engine may keep a canary waiting behind other work."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply = Reply()
        task = asyncio.ensure_future(self.client.send(orjson.dumps(body), reply))
        quiet, before = 0.0, self.client.received()
        try:
            while quiet < self.canary_s:
                done, _ = await asyncio.wait({task}, timeout=LOOK_S)
                if done:
                    return task.result()
                now = self.client.received()
                moving = now != before or bool(self.client.progressing(2.0))
                quiet, before = 0.0 if moving else quiet + LOOK_S, now
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        reply.finish("stalled", self.client.clock.monotonic(), f"nothing moved for {self.canary_s:g} s")
        return reply


def _text(body: bytes) -> str:
    return body[:120].decode("utf-8", "replace").strip() or "empty body"
