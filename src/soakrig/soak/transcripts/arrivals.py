"""A trace as requests: the text that stands for its blocks, made when it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from soakrig.soak.transcripts.filler import Filler
from soakrig.soak.transcripts.request import Request, TraceEntry
from soakrig.soak.transcripts.token_counts import NO_THINKING


@dataclass(frozen=True)
class TraceText:
    """Makes each arrival's request. Prompts that begin with the same block ids begin with the same text.

    ``block_tokens``: of one id. ``speed``: trace time over real time, 0 sends without waiting. Where the engine knows
    ``ignore_eos``, answers have the trace's length and not at most that; and no reasoning, which would eat short ones.
    """

    filler: Filler
    block_tokens: int
    speed: float = 1.0

    def request(self, entry: TraceEntry) -> Request:
        """One user's message of ``entry.input_tokens`` tokens, the chat template included where it is known."""
        fields: dict[str, Any] = {"max_tokens": entry.output_tokens}
        if self.filler.counts.extended:
            fields |= {"ignore_eos": True, "chat_template_kwargs": NO_THINKING}
        message = {"role": "user", "content": " ".join(self._words(entry))}
        due = entry.due_s / self.speed if self.speed else None
        return Request(entry.where, [message], [], fields, due)

    def _words(self, entry: TraceEntry) -> list[str]:
        length = max(1, entry.input_tokens - self.filler.counts.overhead())
        words: list[str] = []
        for block in entry.blocks:
            words += self.filler.block(block, self.block_tokens)
        if len(words) < length:  # no ids, or none for the last, cut block: text that nobody shares
            words += self.filler.pick(length - len(words), f"arrival {entry.number}")
        return words[:length]
