"""Runs a reply's script against the model: appends forced tokens, samples free ones, and keeps what to send."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .actions import Action, Channel, Choice, Forced, OneToken, Script, Span, Special
from .reply_script import ReplyScript
from .sampling import Floats, Sampler, log_softmax, token_logprobs
from .stop_strings import StopStrings
from .tokenizer import Tokenizer


@dataclass(slots=True)
class _Forthcoming:
    """A token that is already decided, with the text that it adds."""

    token: int
    channel: Channel
    text: str


class ReplyWriter:
    """One reply in the making.

    ``advance`` takes the logits behind the last token and decides at least one token; ``finish_reason`` is set by the
    call that ends the reply. Texts wait in ``drain``. With ``logprobs`` (None for none, else how many alternatives)
    forced tokens go one by one too, since each needs the logits before it.
    """

    def __init__(
        self,
        script: ReplyScript,
        sampler: Sampler,
        tokenizer: Tokenizer,
        rng: random.Random,
        *,
        max_tokens: int,
        logprobs: int | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self._reply = script
        self._script: Script = script.script()
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._rng = rng
        self._max_tokens = max_tokens
        self._logprobs = logprobs
        self._stop = StopStrings(stop)
        self._pieces = {
            "text": np.asarray(tokenizer.text_ids, dtype=np.int64),
            "string": np.asarray(tokenizer.string_ids, dtype=np.int64),
        }
        self._queue: deque[_Forthcoming] = deque()
        self._action: Action | None = None
        self._started = False
        self._span_text = ""
        self._span_tokens = 0
        self._candidates: list[tuple[list[int], str]] = []
        self._chosen: list[int] = []
        self._events: list[dict[str, Any]] = []
        self.tokens = 0
        self.finish_reason: str | None = None

    def advance(self, logits: Floats) -> list[int]:
        """``logits`` [vocabulary] behind the last token. Returns the tokens that follow, all decided."""
        new: list[int] = []
        row = log_softmax(logits) if self._logprobs is not None else None
        while self.finish_reason is None:
            if self._queue:
                if new and row is not None:
                    break
                self._append(self._queue.popleft(), new, row)
            elif self._action is None:
                self._pull("")
            elif isinstance(self._action, Span | Choice | OneToken):
                if new:
                    break
                self._decide(logits, new, row)
        return new

    def drain(self) -> list[dict[str, Any]]:
        """What there is to send since the last call: ``{"c": channel, "t": text, "n": tokens, "lp": rows}``."""
        events, self._events = self._events, []
        return events

    def _pull(self, answer: str) -> None:
        """Take the script's next actions up to one that needs logits; forced text is queued, neighbours joined."""
        joined: Forced | None = None
        while True:
            try:
                action = self._script.send(answer) if self._started else next(self._script)
            except StopIteration:
                action = None
            self._started = True
            answer = ""
            if isinstance(action, Forced) and joined is not None and action.channel == joined.channel:
                joined = Forced(joined.channel, joined.text + action.text)
                continue
            if joined is not None:
                self._enqueue(joined.channel, self._tokenizer.encode(joined.text))
            joined = action if isinstance(action, Forced) else None
            if isinstance(action, Special):
                self._queue.append(_Forthcoming(self._tokenizer.special[action.name], "hidden", ""))
            elif not isinstance(action, Forced):
                self._begin(action)
                return

    def _begin(self, action: Action | None) -> None:
        self._action = action
        self._span_text, self._span_tokens, self._chosen = "", 0, []
        if isinstance(action, Choice):
            self._candidates = [(self._tokenizer.encode(o.written), o.shown) for o in action.options]
        elif action is None and not self._queue:
            self._finish("tool_calls" if self._reply.called else "stop")

    def _enqueue(self, channel: Channel, ids: Sequence[int]) -> None:
        texts = self._tokenizer.split_text(ids)
        self._queue.extend(_Forthcoming(i, channel, text) for i, text in zip(ids, texts, strict=True))

    def _decide(self, logits: Floats, new: list[int], row: Floats | None) -> None:
        action = self._action
        if isinstance(action, OneToken):
            self._append(_Forthcoming(action.token, "content", self._tokenizer.text_of[action.token]), new, row)
        elif isinstance(action, Span):
            self._decide_span(action, logits, new, row)
        elif isinstance(action, Choice):
            self._decide_choice(action, logits, new, row)

    def _decide_span(self, span: Span, logits: Floats, new: list[int], row: Floats | None) -> None:
        token = self._sampler.pick(logits, self._pieces[span.pieces])
        text = self._tokenizer.text_of[token]
        if span.max_chars is not None and len(self._span_text) + len(text) > span.max_chars:
            self._pull(self._span_text)
            return
        self._span_text += text
        self._span_tokens += 1
        self._append(_Forthcoming(token, span.channel, text), new, row)
        if self._span_tokens >= span.tokens and len(self._span_text) >= span.min_chars and self.finish_reason is None:
            self._pull(self._span_text)

    def _decide_choice(self, choice: Choice, logits: Floats, new: list[int], row: Floats | None) -> None:
        place = len(self._chosen)
        ended = [one for one in self._candidates if len(one[0]) == place]
        longer = [one for one in self._candidates if len(one[0]) > place]
        if ended and longer:
            # One option is the beginning of others ("1" and "10"): whether it ends here is drawn, not computed.
            longer = [] if self._rng.random() < 1.0 / len(self._candidates) else longer
        self._candidates = longer or ended
        if len({one[1] for one in self._candidates}) > 1:
            allowed = np.asarray(sorted({ids[place] for ids, _ in self._candidates}), dtype=np.int64)
            token = self._sampler.pick(logits, allowed)
            self._chosen.append(token)
            self._append(_Forthcoming(token, "hidden", ""), new, row)
            self._candidates = [one for one in self._candidates if one[0][place] == token]
        if self.finish_reason is None and len(self._candidates) == 1:
            ids, shown = self._candidates[0]
            rest = ids[len(self._chosen) :]
            self._queue.extend(_Forthcoming(token, "hidden", "") for token in rest[:-1])
            if rest:
                self._queue.append(_Forthcoming(rest[-1], choice.channel, shown))
            else:
                self._event(choice.channel, shown, 0, None)
            self._pull(shown)
        elif self.finish_reason == "length" and choice.channel == "arguments":
            self._event("arguments", self._tokenizer.decode(self._chosen), 0, None)

    def _append(self, one: _Forthcoming, new: list[int], row: Floats | None) -> None:
        new.append(one.token)
        self.tokens += 1
        rows = token_logprobs(row, one.token, self._logprobs or 0) if row is not None else None
        stopped = False
        text = one.text
        if one.channel == "content":
            text, stopped = self._stop.feed(text)
        self._event(one.channel, text, 1, rows)
        if stopped:
            self._finish("stop")
        elif not self._queue and self._action is None and self._started:
            self._finish("tool_calls" if self._reply.called else "stop")
        elif self.tokens >= self._max_tokens:
            self._finish("length")

    def _finish(self, reason: str) -> None:
        if reason != "stop" or not self._stop.hit:
            self._event("content", self._stop.flush(), 0, None)
        self.finish_reason = reason
        self._script.close()

    def _event(self, channel: Channel, text: str, tokens: int, rows: list[list[Any]] | None) -> None:
        if not text and not tokens:
            return
        last = self._events[-1] if self._events else None
        if rows is None and last is not None and last["c"] == channel and channel != "name" and "lp" not in last:
            last["t"] += text
            last["n"] += tokens
            return
        event: dict[str, Any] = {"c": channel, "t": text, "n": tokens}
        if rows is not None:
            event["lp"] = [rows]
        self._events.append(event)
