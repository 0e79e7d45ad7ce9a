"""Where an engine is that comes and goes: a model that is started, stopped and switched under the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Found:
    """What a look found. ``url``: where it listens, no slash at its end; empty where it does not, and ``why`` says why
    not. ``loading``: it will."""

    url: str = ""
    loading: bool = False
    why: str = ""


class Place(Protocol):
    """Finds one engine again and again."""

    def still(self) -> bool:
        """Whether what the last look found is still the engine that it was: asked before every request, so cheap."""
        ...

    def look(self) -> Found:
        """Look for it. May take a while; called in a thread."""
        ...
