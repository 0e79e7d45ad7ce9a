"""Stop strings over streamed text: what may still become one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text piece by piece; the text up to the first stop string comes back, the stop string itself does not."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that may be sent now, and whether a stop string was met."""
        if not self._stops:
            return text, False
        text = self._held + text
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self._held, self.hit = "", True
            return text[: min(places)], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
