"""Evidence: what was in flight when something went wrong, frozen beside the events before it is gone."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from soakrig.record.events import Event, SampleTaken, dump
from soakrig.record.request_log import body_digest
from soakrig.record.store import RunStore, write_private
from soakrig.soak.conversation import Turn
from soakrig.soak.reply import Reply

MOST = 20
"""Cases kept per run; a fault that repeats all night must not fill the disk."""
SAMPLES_S = 60.0
LOG_TAIL = 64 << 10


@dataclass
class Evidence:
    """Writes ``evidence/NN-name/``: request and response bytes, the last 60 s of samples, the engine log's tail.

    ``keep_text`` off leaves request and response out and keeps their sizes and digests. Failing to write evidence
    does not end a run: the store's own state does that.
    """

    store: RunStore
    keep_text: bool = True
    engine_log: Path | None = None
    cases: int = 0
    samples: deque[SampleTaken] = field(default_factory=deque[SampleTaken])

    def sample(self, event: SampleTaken) -> None:
        """Remember a sample for the next 60 s."""
        self.samples.append(event)
        while self.samples and event.mono - self.samples[0].mono > SAMPLES_S:
            self.samples.popleft()

    def freeze(self, name: str, cause: Event, turns: list[tuple[Turn, Reply]]) -> Path | None:
        """Freeze one case; the folder, or None when it was not kept."""
        if self.cases >= MOST:
            return None
        self.cases += 1
        folder = self.store.folder / "evidence" / f"{self.cases:02}-{name}"
        try:
            folder.mkdir(mode=0o700, parents=True)
            write_private(folder / "cause.json", dump(cause))
            write_private(folder / "samples.jsonl", b"".join(dump(sample) for sample in self.samples))
            for turn, reply in turns:
                self._turn(folder, turn, reply)
            if self.engine_log is not None:
                write_private(folder / "engine-log-tail.txt", tail(self.engine_log))
        except OSError:
            return None
        return folder

    def _turn(self, folder: Path, turn: Turn, reply: Reply) -> None:
        stem = f"c{turn.conversation:04}-t{turn.turn:05}"
        facts = {
            "conversation": turn.conversation,
            "turn": turn.turn,
            "context_tokens": turn.context_tokens,
            "request_bytes": len(turn.body),
            "request_sha256_16": body_digest(turn.body),
            "response_bytes": reply.size,
            "response_status": reply.status,
            "events": reply.events,
        }
        write_private(folder / f"{stem}.json", orjson.dumps(facts, option=orjson.OPT_INDENT_2))
        if self.keep_text:
            write_private(folder / f"{stem}-request.json", turn.body)
            write_private(folder / f"{stem}-response.sse", b"".join(reply.raw) or reply.body)


def tail(path: Path, size: int = LOG_TAIL) -> bytes:
    """The last ``size`` bytes of a file; empty when it cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - size))
            return stream.read()
    except OSError:
        return b""
