"""A run that goes on, read as it grows: each look costs what was added since the last."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

from soakrig.errors import RecordError
from soakrig.record.events import TurnDone, parse
from soakrig.record.judge import Judge
from soakrig.record.store import EVENTS, RESULT, RunReader
from soakrig.reports.campaign_text import inert

NEWEST = 15
MOST_FAULTS = 10
MOST_BYTES = 8 << 20
"""Read at one look; a run that is further behind is caught up with over the next ones."""


class FollowedRun:
    """Follows one run folder. Raises ``RecordError`` where it is none, or where a whole line is no event."""

    def __init__(self, folder: Path) -> None:
        self.reader = RunReader(folder)
        self._judge = Judge(self.reader.manifest)
        self._newest: deque[TurnDone] = deque(maxlen=NEWEST)
        self._at = 0
        self._lock = threading.Lock()

    def look(self) -> dict[str, Any]:
        """How it is now: ``running``, turns done and ``planned`` (None: by time), outcomes, exposure, faults, the bound
        so far (derived) and the newest turns, newest first."""
        with self._lock:
            running = not (self.reader.folder / RESULT).exists() and self.reader.running()
            self._read()
            result = self._judge.result()
            return {
                "run_id": self.reader.manifest.run_id,
                "running": running,
                "turns": sum(count for name, count in result.outcomes.items() if name != "aborted"),
                "planned": self.reader.manifest.plan.total_turns or None,
                "outcomes": {name: count for name, count in result.outcomes.items() if name != "aborted"},
                "prompt_tokens": result.exposure.prompt_tokens,
                "output_tokens": result.exposure.output_tokens,
                "faults": [inert(fault.signature) for fault in result.faults[:MOST_FAULTS]],
                "upper_95": result.hazard.upper_95,
                "newest": [
                    {
                        "turn": turn.turn,
                        "conversation": turn.conversation,
                        "outcome": turn.outcome,
                        "ttft_s": turn.ttft_s,
                        "duration_s": turn.duration_s,
                        "context_tokens": turn.context_tokens,
                    }
                    for turn in reversed(self._newest)
                ],
            }

    def _read(self) -> None:
        """Whole lines that were added; one that is being written is read at the next look."""
        path = self.reader.folder / EVENTS
        try:
            with path.open("rb") as stream:
                stream.seek(self._at)
                added = stream.read(MOST_BYTES)
        except OSError as error:
            raise RecordError(f"{path} cannot be read ({error.strerror or error})") from error
        whole = added[: added.rfind(b"\n") + 1]
        for line in whole.splitlines(keepends=True):
            event = parse(line, where=f"{path.name}, after byte {self._at}")
            self._judge.feed(event)
            if isinstance(event, TurnDone):
                self._newest.append(event)
        self._at += len(whole)
