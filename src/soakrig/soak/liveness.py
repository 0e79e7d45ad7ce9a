"""Whether the engine lives: asked cheaply after every turn, and thoroughly after one that was not ok."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from soakrig.soak.client import ChatClient
from soakrig.soak.reply import Reply

CANARY_S = 30.0


@dataclass(frozen=True)
class Life:
    """``how`` names the evidence, for the record."""

    alive: bool
    how: str


@dataclass
class Liveness:
    """``process``: asks whether the engine's process lives (None where it is not known). ``has_health``: the target
    answered 200 on /health before the load began; a server without that endpoint is not dead for lack of it.
    """

    client: ChatClient
    model: str
    process: Callable[[], tuple[bool, str]] | None = None
    has_health: bool = False
    stall_s: float = CANARY_S

    def __post_init__(self) -> None:
        self._asking = asyncio.Lock()

    async def quick(self) -> Life:
        """One look, cheap enough for every turn: the process, and /health where the target has it."""
        gone = self._process_gone()
        if gone is not None:
            return gone
        if self.has_health:
            response = await self.client.get("/health")
            if response is not None and response.status_code >= 500:
                return Life(False, f"/health answered {response.status_code}: {response.text[:120].strip()}")
            if response is None:  # slow or gone: the canary decides
                return await self.thorough()
        return Life(True, "process and /health" if self.process else "the turn itself")

    async def thorough(self) -> Life:
        """Process, /health, and one small generation that has to bring a token. /health alone proves nothing: a
        frozen engine keeps it green (and some servers have none)."""
        async with self._asking:
            gone = self._process_gone()
            if gone is not None:
                return gone
            health = await self.client.get("/health") if self.has_health else None
            said = f"; /health {health.status_code}" if health is not None else ""
            reply = await self._canary()
            gone = self._process_gone()
            if gone is not None:
                return gone
            if reply is not None and _generated(reply):
                return Life(True, f"a canary request was answered{said}")
            if reply is not None and reply.status is not None and 400 <= reply.status < 500:
                return Life(True, f"a canary request was refused with status {reply.status}{said}")
            return Life(False, f"a canary request brought no token ({_what(reply)}){said}")

    def _process_gone(self) -> Life | None:
        if self.process is None:
            return None
        alive, detail = self.process()
        return None if alive else Life(False, detail)

    async def _canary(self) -> Reply | None:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Answer with one word: ready."}],
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with asyncio.timeout(min(self.stall_s, CANARY_S)):
                return await self.client.send(orjson.dumps(body))
        except TimeoutError:
            return None


def _generated(reply: Reply) -> bool:
    return reply.status == 200 and reply.deltas > 0 and not reply.error and reply.ending == "eof"


def _what(reply: Reply | None) -> str:
    if reply is None or reply.ending in ("stalled", "cut_by_tool"):
        return "no answer in time"
    if reply.status is None:
        return reply.ending_detail or reply.ending
    if reply.status != 200:
        return f"status {reply.status}"
    return reply.error or ("an empty stream" if not reply.events else f"{reply.events} events, none with a token")
