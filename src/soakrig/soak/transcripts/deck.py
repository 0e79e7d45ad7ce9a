"""Sessions dealt to the places of a load: whoever is through with one takes the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from soakrig.soak.classify import Outcome
from soakrig.soak.conversation import CHARS_PER_TOKEN, Turn
from soakrig.soak.reply import Reply
from soakrig.soak.transcripts.line import Line


@dataclass
class Deck:
    """``count`` sessions, made by ``session(index)``; from the first again where ``over_again``."""

    count: int
    session: Callable[[int], Sequence[Line]]
    over_again: bool = False
    dealt: int = 0

    def next(self) -> Sequence[Line] | None:
        """The next session, None when all are dealt."""
        if self.dealt >= self.count and not self.over_again:
            return None
        self.dealt += 1
        return self.session((self.dealt - 1) % self.count)


@dataclass
class DealtConversation:
    """A place of the load: sends the sessions that it gets from the deck, turn after turn. Each begins a new part."""

    number: int
    deck: Deck
    turn: int = 0
    part: int = -1
    _left: list[Line] = field(default_factory=list[Line])

    def next_turn(self) -> Turn | None:
        if not self._left:
            session = self.deck.next()
            if not session:
                return None
            self._left = list(session)
            self.part += 1
        line = self._left.pop(0)
        self.turn += 1
        body = line.body
        return Turn(
            self.number, self.turn, self.part, body, int(len(body) / CHARS_PER_TOKEN), line.tools, line.head,
            line.messages, line.extra, line.due_s,
        )  # fmt: skip

    def answered(self, reply: Reply, outcome: Outcome) -> None:
        """What is sent does not depend on answers."""
