"""An answer on its way to the client, event by event or whole: cleaned, mirrored, remembered, else untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from soakrig.engine.gateway.body import Json, objects, read_object, write
from soakrig.engine.gateway.policies import Policies
from soakrig.engine.gateway.reasoning_memory import NAMES, ReasoningMemory, Said, Where, of_choice
from soakrig.engine.gateway.stream import Event, split_events
from soakrig.engine.gateway.tool_tags import StreamCleaner, clean_calls


class AnswerEditor:
    """The policies that touch one chat answer. ``where``: its place, as the memory has it; ``note``: told once of each
    policy that changed something. ``close`` keeps what was said, however the answer ended."""

    def __init__(self, policies: Policies, memory: ReasoningMemory, where: Where, note: Callable[[str], None]) -> None:
        self._policies, self._memory, self._where, self._note = policies, memory, where, note
        self._cleaner = StreamCleaner() if policies.sanitize_tool_tags else None
        self._said: dict[int, Said] = {}
        self._noted: set[str] = set()

    def feed(self, data: bytes) -> bytes:
        """Whole events; the bytes that may go on now."""
        return b"".join([self._pass(event) for raw in split_events(data) for event in self._cleaned(Event.parse(raw))])

    def end(self, rest: bytes = b"") -> bytes:
        """The stream is over: ``rest`` belongs to no whole event; returns all that is left."""
        last = self.feed(rest) if rest else b""
        return last + self._all(self._cleaner.end() if self._cleaner is not None else [])

    def whole(self, body: bytes) -> bytes:
        """An answer that was not streamed."""
        data = read_object(body)
        if data is None:
            return body
        changed = False
        for index, message in of_choice(data, "message"):
            if self._policies.sanitize_tool_tags and clean_calls(message):
                changed = True
                self._tell("sanitize_tool_tags")
            self._said.setdefault(index, Said()).take(message)
            if self._policies.mirror_content and mirror(message):
                changed = True
                self._tell("mirror_content")
        self.close()
        return write(data) if changed else body

    def close(self) -> None:
        """Remember the reasoning of what was said so far."""
        if self._policies.restore_reasoning:
            for said in self._said.values():
                self._memory.remember(self._where, said)

    def _cleaned(self, event: Event) -> list[Event]:
        if self._cleaner is None:
            return [event]
        free = self._cleaner.feed(event)
        if self._cleaner.cleaned:
            self._tell("sanitize_tool_tags")
        return free

    def _all(self, events: Iterable[Event]) -> bytes:
        if self._cleaner is not None and self._cleaner.cleaned:
            self._tell("sanitize_tool_tags")
        return b"".join([self._pass(event) for event in events])

    def _pass(self, event: Event) -> bytes:
        if event.data is not None and "choices" in event.data:
            for index, delta in of_choice(event.data, "delta"):
                self._said.setdefault(index, Said()).take(delta)
                if self._policies.mirror_content and mirror(delta):
                    event.changed = True
                    self._tell("mirror_content")
            if any(choice.get("finish_reason") for choice in objects(event.data["choices"])):
                self.close()  # before the client sees the end: it may send the next turn at once
        return event.encoded

    def _tell(self, policy: str) -> None:
        if policy not in self._noted:
            self._noted.add(policy)
            self._note(policy)


def mirror(message: Json) -> bool:
    """Give a message or delta its reasoning under the other name as well; whether it had none there."""
    thought = next((message[name] for name in NAMES if isinstance(message.get(name), str) and message[name]), None)
    missing = [name for name in NAMES if message.get(name) is None]
    if thought is None or not missing:
        return False
    message.update(dict.fromkeys(missing, thought))
    return True


def clean_history(messages: object) -> int:
    """Clean the calls of a history that a client sends back; in how many messages something was taken out."""
    return sum(clean_calls(message) for message in objects(messages))
