"""OpenAI's answer objects, built from the worker's events: chat and plain completions, whole and in chunks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from .link import Event
from .service import Reply
from .tokenizer import Tokenizer

Json = dict[str, Any]
MIN_LOGPROB = -9999.0
"""JSON has no infinity; vLLM writes this in its place."""


def usage_object(prompt: int, completion: int, cached: int) -> Json:
    """The ``usage`` object of OpenAI's API, in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def prompt_logprobs_object(rows: list[Any], tokenizer: Tokenizer) -> list[Json | None]:
    """vLLM's shape: one entry a prompt token, the first null, then token id -> logprob, rank, decoded_token."""
    return [
        None
        if row is None
        else {
            str(token): {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": tokenizer.text_of[token]}
            for token, logprob, rank in row
        }
        for row in rows
    ]


@dataclass(slots=True)
class Answer:
    """What all answers share: id, model, and what the events have told so far."""

    reply: Reply
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    tokens: int = 0
    cached: int = 0
    finish_reason: str | None = None
    prompt_rows: list[Any] | None = None

    def take(self, event: Event) -> None:
        """Note what an event says besides its text."""
        self.tokens += event.get("n", 0)
        if "prompt_logprobs" in event:
            self.prompt_rows = event["prompt_logprobs"]
        if "finish" in event:
            self.finish_reason = event["finish"]
            self.cached = event.get("cached_tokens", 0)
            self.tokens = event.get("completion_tokens", self.tokens)

    @property
    def usage(self) -> Json:
        return usage_object(len(self.reply.prompt), self.tokens, self.cached)

    def envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.reply.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def prompt_logprobs(self) -> list[Json | None] | None:
        return None if self.prompt_rows is None else prompt_logprobs_object(self.prompt_rows, self.tokenizer)


@dataclass(slots=True)
class ChatAnswer(Answer):
    """A chat completion. ``deltas`` turns an event into the deltas of the chunks to send."""

    wants_logprobs: bool = False
    top_logprobs: int = 0
    role_sent: bool = False
    calls: list[Json] = field(default_factory=list[Json])
    content: str = ""
    reasoning: str = ""
    rows: list[Json] = field(default_factory=list[Json])
    unsent: int = 0
    """Rows of ``rows`` that no chunk has carried yet start here."""

    def deltas(self, event: Event) -> list[Json]:
        self.take(event)
        found: list[Json] = []
        if event.get("n") and not self.role_sent:
            self.role_sent = True
            found.append({"role": "assistant", "content": ""})
        self.rows += [self._row(rows) for rows in event.get("lp") or ()]
        text = event.get("t", "")
        match event.get("c"):
            case "reasoning" if text:
                self.reasoning += text
                found.append({"reasoning": text})
            case "content" if text:
                self.content += text
                found.append({"content": text})
            case "name":
                call: Json = {"id": self._call_id(), "type": "function", "function": {"name": text, "arguments": ""}}
                self.calls.append(call)
                found.append({"tool_calls": [{"index": len(self.calls) - 1, **call, "function": {**call["function"]}}]})
            case "arguments" if text and self.calls:
                self.calls[-1]["function"]["arguments"] += text
                found.append({"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": text}}]})
            case _:
                pass
        return found

    def chunk(self, delta: Json, finish_reason: str | None = None) -> Json:
        choice: Json = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if self.wants_logprobs and self.unsent < len(self.rows):
            choice["logprobs"] = {"content": self.rows[self.unsent :]}
            self.unsent = len(self.rows)
        return self.envelope("chat.completion.chunk", [choice])

    def whole(self) -> Json:
        message: Json = {
            "role": "assistant",
            "content": self.content or None,
            "reasoning": self.reasoning or None,
            "tool_calls": self.calls,
            "refusal": None,
        }
        logprobs = {"content": self.rows} if self.wants_logprobs else None
        choice: Json = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}
        whole = self.envelope("chat.completion", [choice])
        return {**whole, "usage": self.usage, "prompt_logprobs": self.prompt_logprobs()}

    def _call_id(self) -> str:
        return f"call_{self.reply.id.rpartition('-')[2][:24]}{len(self.calls)}"

    def _row(self, rows: list[Any]) -> Json:
        # The token itself comes first, then the likeliest others: it is a top one only where its rank says so.
        top = sorted((row for row in rows if row[2] <= self.top_logprobs), key=lambda row: row[2])
        return {**self._entry(rows[0]), "top_logprobs": [self._entry(row) for row in top]}

    def _entry(self, row: list[Any]) -> Json:
        token, logprob, _ = row
        text = self.tokenizer.text_of[token]
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(self.tokenizer.bytes_of[token])}


@dataclass(slots=True)
class CompletionAnswer(Answer):
    """A plain completion."""

    wants_logprobs: bool = False
    text: str = ""
    rows: list[Any] = field(default_factory=list[Any])
    unsent: int = 0

    def piece(self, event: Event) -> str | None:
        """The event's text, None when there is nothing to send for it."""
        self.take(event)
        self.rows += event.get("lp") or ()
        text = event.get("t", "")
        self.text += text
        return text if text and event.get("c") == "content" else None

    def chunk(self, text: str, finish_reason: str | None = None) -> Json:
        rows, self.unsent = self.rows[self.unsent :], len(self.rows)
        choice: Json = {"index": 0, "text": text, "logprobs": self._logprobs(rows), "finish_reason": finish_reason}
        return self.envelope("text_completion", [choice])

    def whole(self) -> Json:
        choice: Json = {
            "index": 0,
            "text": self.text,
            "logprobs": self._logprobs(self.rows),
            "finish_reason": self.finish_reason,
            "prompt_logprobs": self.prompt_logprobs(),
        }
        return {**self.envelope("text_completion", [choice]), "usage": self.usage}

    def _logprobs(self, rows: list[Any]) -> Json | None:
        if not self.wants_logprobs:
            return None
        text_of = self.tokenizer.text_of
        tokens = [text_of[row[0][0]] for row in rows]
        offsets: list[int] = []
        at = 0
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(row[0][1], MIN_LOGPROB) for row in rows],
            "top_logprobs": [{text_of[one[0]]: max(one[1], MIN_LOGPROB) for one in row} for row in rows],
            "text_offset": offsets,
        }
