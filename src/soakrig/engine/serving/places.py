"""Where the registry's models listen now, for a gateway that stands in front of them while they come and go."""

from __future__ import annotations

import threading
from pathlib import Path

from soakrig.clock import Clock, RealClock
from soakrig.engine import keeper
from soakrig.engine.gateway.place import Found
from soakrig.engine.serving.folder import EngineFolder
from soakrig.engine.serving.processes import STOPPING, Launch, find_launches, port_of
from soakrig.engine.serving.state import last_words

FRESH_S = 0.5
"""How long one look at every process holds for all models: many clients may wait for one that loads."""


class Places:
    """Looks at the process table for all models at once. ``root``: where their folders are."""

    def __init__(self, root: Path, clock: Clock | None = None) -> None:
        self.root, self._clock = root, clock or RealClock()
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._launches: list[Launch] = []

    def place(self, name: str) -> ServedPlace:
        """That of one model."""
        return ServedPlace(name, self)

    def launch(self, name: str) -> Launch | None:
        """The model's newest launch, seen within the last ``FRESH_S`` seconds."""
        with self._lock:
            now = self._clock.monotonic()
            if now - self._looked_at > FRESH_S:
                self._launches = find_launches(self.root)
                self._looked_at = self._clock.monotonic()
            found = [one for one in self._launches if one.name == name]
        return max(found, key=lambda one: max(stat.ticks for stat in one.stats)) if found else None


class ServedPlace:
    """A model that ``soak engine serve`` started, or will (``engine.gateway.place.Place``)."""

    def __init__(self, name: str, places: Places) -> None:
        self._name, self._places = name, places
        self._engine: keeper.Stat | None = None

    def still(self) -> bool:
        """Whether the engine's first process is the one that the last look found."""
        was = self._engine
        now = keeper.read_stat(was.pid) if was is not None else None
        return was is not None and now is not None and now.ticks == was.ticks and keeper.is_running(now)

    def look(self) -> Found:
        """Its state by its processes, without asking the engine anything."""
        self._engine = None
        launch = self._places.launch(self._name)
        if launch is None:
            why = last_words(EngineFolder(self._name, self._places.root))
            return Found(why=f"stopped, {why}. `soak engine serve {self._name}` starts it")
        if launch.supervisor is not None and launch.supervisor.name == STOPPING.decode():
            return Found(why="it is being stopped")
        port, listens = port_of(launch)
        if listens and launch.root is not None:
            self._engine = launch.root
            return Found(url=f"http://127.0.0.1:{port}")
        if launch.supervisor is not None:
            who = f"pid {launch.root.pid} does not listen yet" if launch.root else "its engine is not there yet"
            return Found(loading=True, why=f"it starts, {who}")
        return Found(why=f"{len(launch.stats)} processes of a launch without a supervisor are left")
