"""The load: conversations in parallel against one engine, until the plan is done or something ends it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from soakrig.clock import Clock
from soakrig.record.events import EndReason, EngineChecked, Event, TurnDone, TurnSent
from soakrig.record.manifest import Plan
from soakrig.record.outcome import OutcomeName
from soakrig.record.request_log import RequestLog
from soakrig.record.store import RunStore
from soakrig.soak.classify import Outcome, classify
from soakrig.soak.client import ChatClient
from soakrig.soak.conversation import Conversation, Turn
from soakrig.soak.evidence import Evidence
from soakrig.soak.liveness import Life, Liveness
from soakrig.soak.pool import run_all
from soakrig.soak.reply import Reply, token_count

DRAIN_S = 2.0
"""How long turns in flight may still run once the engine was found dead."""
WAIT_S = 0.25
"""Longest sleep while a turn waits for its time: an ended load is noticed."""
RECENT = 8
"""Turns kept with their bytes, for evidence of a fault that is read a moment late."""
NO_QUESTION: frozenset[OutcomeName] = frozenset({"ok", "aborted", "post_mortem"})
"""Outcomes after which nobody has to ask whether the engine lives."""


@dataclass
class Load:
    """Drives conversations and names every turn's outcome. ``tell`` takes each event (judge, views); turns are
    committed to disk before the next one of their conversation leaves. ``tolerated``: outcomes that do not count
    towards ``max_bad``. ``late``: by how many seconds each turn with a time of its own left after it.
    """

    client: ChatClient
    liveness: Liveness
    store: RunStore
    requests: RequestLog
    evidence: Evidence
    clock: Clock
    plan: Plan
    tell: Callable[[Event], None]
    accept: Collection[str] = ()
    max_bad: int = 10
    tolerated: Collection[OutcomeName] = ()
    ended: EndReason | None = None
    detail: str = ""
    dead: bool = False
    bad: int = 0
    counted: int = 0
    current: dict[int, tuple[Turn, Reply]] = field(default_factory=dict[int, tuple[Turn, Reply]])
    recent: deque[tuple[Turn, Reply]] = field(default_factory=lambda: deque[tuple[Turn, Reply]](maxlen=RECENT))
    first_sent: float | None = None
    last_end: float = 0.0
    began: float | None = None
    late: list[float] = field(default_factory=list[float])

    async def run(self, conversations: Sequence[Conversation]) -> None:
        """Returns when the plan is done or ``end`` was called and every turn in flight is over. Raises ``StoreError``
        when events cannot be kept, and passes cancellation on after all conversations have ended."""
        await self.drive(conversations)
        if self.ended is None:
            self.end("completed")

    async def drive(self, conversations: Sequence[Conversation]) -> None:
        """The same for a part of the plan: more may follow. Does nothing once something has ended the load."""
        await run_all([partial(self._converse, c) for c in conversations], size=self.plan.conversations)

    def end(self, reason: EndReason, detail: str = "") -> None:
        """No new turn from here on; the first reason stays, except that a dead engine outranks being asked to stop."""
        if self.ended is None or (reason in ("engine_dead", "fault") and self.ended in ("interrupted", "stopped")):
            self.ended, self.detail = reason, detail

    def in_flight(self, mono: float) -> list[tuple[Turn, Reply]]:
        """Turns that were in flight at a moment, with what has come of their answers; where there were none, those in
        flight now, or the last one."""
        known = [*self.recent, *self.current.values()]
        then = [(t, r) for t, r in known if r.sent_at <= mono and (not r.ended_at or r.ended_at >= mono)]
        return then or list(self.current.values()) or known[-1:]

    def _may_go_on(self, turns_done: int) -> bool:
        if self.ended is not None:
            return False
        if self.plan.turns is not None:
            return turns_done < self.plan.turns
        # By the ends of turns, as the judge counts, not by the clock: questions between turns are no load.
        return self.first_sent is None or self.last_end - self.first_sent < (self.plan.seconds or 0.0)

    async def _converse(self, conversation: Conversation) -> None:
        done = 0
        while self._may_go_on(done):
            turn = conversation.next_turn()
            if turn is None or not await self._due(turn):
                return
            reply, outcome = await self._one(turn)
            conversation.answered(reply, outcome)
            done += 1

    async def _due(self, turn: Turn) -> bool:
        """Wait until a turn with a time of its own may leave; False when the load has ended meanwhile."""
        if turn.due_s is None:
            return True
        now = self.clock.monotonic()
        self.began = now if self.began is None else self.began
        while self.ended is None and (left := self.began + turn.due_s - self.clock.monotonic()) > 0:
            await self.clock.sleep(min(left, WAIT_S))
        self.late.append(self.clock.monotonic() - self.began - turn.due_s)
        return self.ended is None

    async def _one(self, turn: Turn) -> tuple[Reply, Outcome]:
        self.requests.sent(
            turn.conversation, turn.turn, turn.part, turn.head, turn.messages, turn.extra, turn.body, turn.due_s
        )
        now = self.clock.monotonic()
        self.first_sent = now if self.first_sent is None else self.first_sent
        self._append(
            TurnSent(self.clock.time(), now, turn.conversation, turn.turn, turn.context_tokens, len(turn.body))
        )
        reply = Reply(sent_at=now, whole=turn.whole)
        self.current[turn.conversation] = (turn, reply)
        try:
            await self.client.send(turn.body, reply)
        except asyncio.CancelledError:
            self._append(self._done(turn, reply, Outcome("aborted", "this tool was told to stop at once")))
            raise
        finally:
            self.current.pop(turn.conversation, None)
            self.recent.append((turn, reply))
            self.last_end = max(self.last_end, reply.ended_at)
        outcome = classify(reply, accept=self.accept, tools=turn.tools, engine_dead=self.dead)
        if outcome.name == "ok":
            life = await self.liveness.quick()
            if life.alive is False:
                self._found_dead(turn, life)
            if self.dead:  # found by this question, or by another conversation meanwhile
                outcome = Outcome("post_mortem", f"a whole answer, but the engine was dead by then: {self.detail}")
        event = self._done(turn, reply, outcome)
        self.tell(event)
        await self.store.commit(event)
        if outcome.name not in NO_QUESTION:
            await self._not_ok(turn, reply, outcome, event)
        return reply, outcome

    async def _not_ok(self, turn: Turn, reply: Reply, outcome: Outcome, event: TurnDone) -> None:
        self.evidence.freeze(outcome.name, event, [(turn, reply)])
        self.bad += 1
        if not self.dead:
            life = await self.liveness.thorough()
            if life.alive is False:
                self._found_dead(turn, life)
                return
        self.counted += outcome.name not in self.tolerated
        if self.max_bad and self.counted >= self.max_bad:
            self.end("too_many_bad", f"{self.counted} turns were not ok (--max-bad)")

    def _found_dead(self, turn: Turn, life: Life) -> None:
        if self.dead:
            return
        self.dead = True
        where = f"at turn {turn.turn} of conversation {turn.conversation}"
        self.end("engine_dead", f"found dead {where}: {life.how}")
        self._append(
            EngineChecked(
                self.clock.time(),
                self.clock.monotonic(),
                False,
                life.how,
                conversation=turn.conversation,
                turn=turn.turn,
            )
        )
        asyncio.get_running_loop().call_later(DRAIN_S, self._cut_in_flight)

    def _cut_in_flight(self) -> None:
        now = asyncio.get_running_loop().time()
        for flight in self.client.flights.values():
            if not flight.timeout.expired():
                flight.timeout.reschedule(now)

    def _append(self, event: Event) -> None:
        self.tell(event)
        self.store.append(event)

    def _done(self, turn: Turn, reply: Reply, outcome: Outcome) -> TurnDone:
        sent = reply.sent_at
        usage = reply.usage or {}
        details = usage.get("prompt_tokens_details") or {}

        def since(moment: float | None) -> float | None:
            return None if moment is None else round(moment - sent, 6)

        return TurnDone(
            time=self.clock.time(),
            mono=reply.ended_at or self.clock.monotonic(),
            conversation=turn.conversation,
            turn=turn.turn,
            outcome=outcome.name,
            why=outcome.why[:500],
            status=reply.status,
            finish_reason=reply.finish_reason,
            duration_s=round((reply.ended_at or self.clock.monotonic()) - sent, 6),
            ttft_s=since(reply.first_token_at),
            first_answer_s=since(reply.first_answer_at),
            last_token_s=since(reply.last_token_at),
            gap_max_s=round(reply.gap_max, 6) if reply.deltas > 1 else None,
            prompt_tokens=reply.prompt_tokens,
            cached_tokens=token_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
            output_tokens=reply.output_tokens,
            counted="usage" if token_count(usage.get("completion_tokens")) is not None else "deltas",
            deltas=reply.deltas,
            response_bytes=reply.size,
            tool_calls=len(reply.calls),
            context_tokens=reply.prompt_tokens or turn.context_tokens,
            accepted=outcome.accepted,
        )
