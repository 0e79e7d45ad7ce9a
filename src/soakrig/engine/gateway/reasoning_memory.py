"""The reasoning of the gateway's own answers, kept so that a client's history can have it back.

An answer is found again by its place (how many messages were before it, what the last of them was, and its own text and
call ids), else by the id of one of its tool calls. Some engines give the same ids again and again; an id that has
stood for two different thoughts finds neither.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from soakrig.engine.gateway.body import Json, inner, objects, text_of

MAX_ENTRIES = 8192
MAX_BYTES = 64 << 20
ENTRY_BYTES = 160
"""What an entry costs beside its text: key, links, string head."""
NAMES = ("reasoning", "reasoning_content")
"""vLLM's name and the older one; templates read either."""
_SYSTEM = frozenset({"system", "developer"})


@dataclass(slots=True)
class Said:
    """One answer as its parts came."""

    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    call_ids: list[str] = field(default_factory=list[str])

    def take(self, message: Json) -> None:
        """Add a message, or a delta of one."""
        if isinstance(content := message.get("content"), str):
            self.content.append(content)
        for name in NAMES:
            if isinstance(thought := message.get(name), str) and thought:
                self.reasoning.append(thought)
                break
        for call in objects(message.get("tool_calls")):
            if isinstance(call_id := call.get("id"), str) and call_id and call_id not in self.call_ids:
                self.call_ids.append(call_id)


def place(before: Sequence[Json]) -> bytes:
    """Where an answer stands: the number of messages before it (system messages aside), and the last one."""
    counted = [message for message in before if message.get("role") not in _SYSTEM]
    last = counted[-1] if counted else {}
    parts = [str(len(counted)), str(last.get("role")), str(last.get("tool_call_id")), text_of(last.get("content"))]
    return _digest(*parts)


class ReasoningMemory:
    """A bounded ring: the entry that was used longest ago goes first. One for each model."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[bytes, str | None] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes, at most: a thought that has two keys is counted twice."""
        return self._bytes

    def remember(self, where: bytes, said: Said) -> None:
        """Keep an answer's reasoning; nothing where it has none."""
        thought = "".join(said.reasoning)
        if not thought:
            return
        self._put(_at(where, "".join(said.content), said.call_ids), thought)
        for call_id in said.call_ids:
            key = _digest("id", call_id)
            ambiguous = self._entries.get(key, thought) != thought
            self._put(key, None if ambiguous else thought)

    def restore(self, messages: Sequence[Json]) -> int:
        """Put reasoning into the assistant's messages of a history, under both names where they are missing; what a
        client sent stays, an empty text included. Returns how many messages were changed."""
        changed = 0
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            missing = [name for name in NAMES if message.get(name) is None]
            if not missing:
                continue
            sent = next((message[name] for name in NAMES if isinstance(message.get(name), str)), None)
            thought = self._find(messages[:number], message) if sent is None else sent
            if thought:
                message.update(dict.fromkeys(missing, thought))
                changed += 1
        return changed

    def _find(self, before: Sequence[Json], message: Json) -> str | None:
        ids = [call["id"] for call in objects(message.get("tool_calls")) if isinstance(call.get("id"), str)]
        keys = [_at(place(before), text_of(message.get("content")), ids), *(_digest("id", one) for one in ids)]
        for key in keys:
            thought = self._entries.get(key)
            if thought is not None:
                self._entries.move_to_end(key)
                return thought
        return None

    def _put(self, key: bytes, thought: str | None) -> None:
        if key in self._entries:
            self._bytes -= _size(self._entries.pop(key))
        self._entries[key] = thought
        self._bytes += _size(thought)
        while self._entries and (len(self._entries) > self._max_entries or self._bytes > self._max_bytes):
            _, old = self._entries.popitem(last=False)
            self._bytes -= _size(old)


def of_choice(data: Json, part: str) -> list[tuple[int, Json]]:
    """The messages (``part``: message) or deltas (delta) of an answer's choices, with their indexes."""
    found: list[tuple[int, Json]] = []
    for number, choice in enumerate(objects(data.get("choices"))):
        index = choice.get("index")
        found.append((index if type(index) is int else number, inner(choice, part)))
    return found


def _at(where: bytes, content: str, ids: Sequence[str]) -> bytes:
    return _digest("at", where.hex(), content.strip(), *ids)


def _digest(*parts: str) -> bytes:
    """Lengths go in as well, so that no two lists of parts run together."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(b"%d:" % len(data) + data)
    return state.digest()


def _size(thought: str | None) -> int:
    return ENTRY_BYTES + len((thought or "").encode("utf-8", "surrogatepass"))
