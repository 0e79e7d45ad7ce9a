"""Mooncake's trace format: when requests came, how long they were, and which began alike; one JSON object a line.

``{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}``: the arrival in
milliseconds, lengths in tokens, and one id for each block of 512 prompt tokens, the last of which may be cut. As
published with https://github.com/kvcache-ai/Mooncake (FAST25-release/README.md and traces/).
"""

from __future__ import annotations

import math
from typing import Any

from soakrig.errors import UsageError
from soakrig.soak.transcripts.request import TraceEntry, check_keys

BLOCK_TOKENS = 512
FIELDS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})
_OTHERS = {
    "chat_id": "this is a Bailian trace (seconds, blocks of 16 tokens), which is not read",
    "text_input": "an arrival with a text of its own is no request of this format",
    "messages": "an arrival with a text of its own is no request of this format",
    "delay": "an arrival after another's end is not read; give timestamps",
    "session_id": "sessions of a trace show in its hash_ids",
}


def fits(data: Any) -> bool:
    """Whether a line's JSON value begins a trace of this format."""
    return isinstance(data, dict) and "input_length" in data


def read_entry(data: Any, where: str, number: int, block_tokens: int = BLOCK_TOKENS) -> TraceEntry:
    """The arrival of a line. Raises ``UsageError`` naming what does not fit."""
    if not isinstance(data, dict):
        raise UsageError(f"{where} is {type(data).__name__}, expected an object with {', '.join(sorted(FIELDS))}")
    check_keys(data, FIELDS, where, _OTHERS)
    for name in ("timestamp", "input_length", "output_length"):
        value = data.get(name)
        kinds = int | float if name == "timestamp" else int
        least = 0 if name == "timestamp" else 1
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < 1 << 40:
            unit = "milliseconds" if name == "timestamp" else "tokens"
            raise UsageError(f"{where}: {name} is {value!r:.80}, expected {unit}, a number from {least} up")
    blocks = data.get("hash_ids") or []
    if not isinstance(blocks, list) or not all(type(one) is int and one >= 0 for one in blocks):
        raise UsageError(f"{where}: hash_ids is {blocks!r:.80}, expected a list of numbers from 0 up")
    length = data["input_length"]
    # Published traces give the last, cut block an id; some generators leave it out.
    if blocks and len(blocks) not in (math.ceil(length / block_tokens), length // block_tokens):
        raise UsageError(
            f"{where}: {len(blocks)} hash_ids for {length} tokens, expected {math.ceil(length / block_tokens)} at "
            f"{block_tokens} tokens a block",
            remedy="Say how long this trace's blocks are with --trace-block.",
        )
    return TraceEntry(where, number, data["timestamp"] / 1000, length, data["output_length"], tuple(blocks))
