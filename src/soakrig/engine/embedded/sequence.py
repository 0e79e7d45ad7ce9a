"""One request inside the worker: its tokens, its blocks, and how far the model has come with it."""

from __future__ import annotations

import hashlib
import random
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .blocks import Digest
from .reply_script import ReplyScript, ReplySpec
from .reply_writer import ReplyWriter
from .sampling import Sampler, SamplingParams
from .tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class Sequence:
    """``tokens`` holds the prompt and what was generated; the model has computed the first ``computed`` of them."""

    id: str
    serial: int
    tokens: list[int]
    prompt_tokens: int
    writer: ReplyWriter
    prompt_logprobs: int | None = None
    computed: int = 0
    cached: int = 0
    """Prompt tokens that the prefix cache gave when the request was first admitted."""
    counted: int = 0
    """Prompt tokens already reported as done; preemption computes tokens again, but does not count them again."""
    admitted: bool = False
    blocks: list[int] = field(default_factory=list[int])
    digests: list[Digest] = field(default_factory=list[Digest])
    published: int = 0
    prompt_rows: list[Any] = field(default_factory=lambda: [None])
    planted: bool = False
    """A planted fault: in every step its first row is routed to an expert that does not exist."""

    @property
    def pending(self) -> int:
        """Tokens that are known but not computed."""
        return len(self.tokens) - self.computed

    @property
    def in_prompt(self) -> bool:
        return self.computed < self.prompt_tokens


def from_request(message: dict[str, Any], serial: int, tokenizer: Tokenizer) -> Sequence:
    """A sequence for the server's ``add`` message.

    The reply depends on the prompt and the seed alone: with a seed, or greedy, the same prompt gets the same reply.
    """
    prompt: list[int] = message["prompt"]
    params = SamplingParams(**message["sampling"])
    if params.seed is not None or params.temperature <= 0.0:
        entropy = hashlib.blake2b(
            array("I", prompt).tobytes() + (params.seed or 0).to_bytes(16, "big", signed=True), digest_size=16
        ).digest()
        seed = int.from_bytes(entropy, "big")
    else:
        seed = random.SystemRandom().getrandbits(128)
    rng = random.Random(seed)
    writer = ReplyWriter(
        ReplyScript(ReplySpec(**message["reply"]), rng),
        Sampler(params, np.random.default_rng(seed)),
        tokenizer,
        rng,
        max_tokens=message["max_tokens"],
        logprobs=message["logprobs"],
        stop=message["stop"],
    )
    return Sequence(
        id=message["id"],
        serial=serial,
        tokens=list(prompt),
        prompt_tokens=len(prompt),
        writer=writer,
        prompt_logprobs=message["prompt_logprobs"],
        planted=message["planted"],
    )
