"""The reasoning of the gateway's own answers, kept so that a client's history can have it back.

An answer is found again by the whole conversation before it and its own text and call ids; where a client has rewritten
the conversation, by how many messages were before it and what the last of them was; else by the id of one of its tool
calls. Conversations look alike in the last two, and some engines give the same ids again and again: what has stood for
two different thoughts finds neither.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Where(NamedTuple):
    """Where an answer stands, system messages aside. ``exact``: all messages before it; ``loose``: their number, and
    the last one."""

    exact: bytes = b""
    loose: bytes = b""


def places(messages: Iterable[Json]) -> Iterator[Where]:
    """Where each message stands, and at last where the answer to all of them will."""
    before, number, last = b"", 0, _digest()
    for message in messages:
        yield Where(before, _digest(str(number), last.hex()))
        if message.get("role") in _SYSTEM:
            continue
        number += 1
        last = _digest(str(message.get("role")), str(message.get("tool_call_id")), text_of(message.get("content")))
        before = _digest(before.hex(), last.hex(), *_call_ids(message))
    yield Where(before, _digest(str(number), last.hex()))


def place(before: Iterable[Json]) -> Where:
    """Where the answer to these messages stands."""
    *_, last = places(before)
    return last


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
        """Bytes, at most: a thought is counted once for each of its keys."""
        return self._bytes

    def remember(self, where: Where, said: Said) -> None:
        """Keep an answer's reasoning; nothing where it has none."""
        thought, content = "".join(said.reasoning), "".join(said.content)
        if not thought:
            return
        self._put(_at(where.exact, content, said.call_ids), thought)
        for key in (_at(where.loose, content, said.call_ids), *(_digest("id", one) for one in said.call_ids)):
            ambiguous = self._entries.get(key, thought) != thought
            self._put(key, None if ambiguous else thought)

    def restore(self, messages: Sequence[Json]) -> int:
        """Put reasoning into the assistant's messages of a history, under both names where they are missing; what a
        client sent stays, an empty text included. Returns how many messages were changed."""
        changed = 0
        for where, message in zip(places(messages), messages, strict=False):
            if message.get("role") != "assistant":
                continue
            missing = [name for name in NAMES if message.get(name) is None]
            if not missing:
                continue
            sent = next((message[name] for name in NAMES if isinstance(message.get(name), str)), None)
            thought = self._find(where, message) if sent is None else sent
            if thought:
                message.update(dict.fromkeys(missing, thought))
                changed += 1
        return changed

    def _find(self, where: Where, message: Json) -> str | None:
        ids, content = _call_ids(message), text_of(message.get("content"))
        keys = (_at(one, content, ids) for one in where)
        for key in (*keys, *(_digest("id", one) for one in ids)):
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


def _call_ids(message: Json) -> list[str]:
    return [call["id"] for call in objects(message.get("tool_calls")) if isinstance(call.get("id"), str)]


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
