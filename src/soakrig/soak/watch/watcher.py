"""What a watcher is, and the threads that watchers run in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from soakrig.clock import Clock
from soakrig.record.signal import Signal, SourceName, SourceState

Sample = dict[str, float]
"""Named figures of one moment, ``{"rss_mib": 812.0}``: what sparklines are drawn from."""


@dataclass(slots=True)
class Seen:
    """What one poll of a watcher brought: signals, one sample, and the source's state where it changed."""

    signals: Sequence[Signal] = ()
    sample: Sample | None = None
    state: SourceState | None = None


class Watcher(Protocol):
    """One source, polled in a thread of its own. Methods may block up to about ``interval`` seconds, never for ever.

    ``open`` returns the first state; it raises ``WatcherError`` when the source cannot be read at all (the run goes on
    with the source absent). ``poll`` returns what is new. Any other exception is a crash: the source becomes absent,
    the crash is its detail, and the run inconclusive. A watcher that reads figures while it opens may leave them in an
    attribute ``opening``: the first sample, from before the load.
    """

    source: SourceName
    interval: float

    def open(self) -> SourceState: ...

    def poll(self) -> Seen: ...

    def close(self) -> None: ...


class Sink(Protocol):
    """Where a watcher's findings go; called from the watcher's thread."""

    def signal(self, signal: Signal) -> None: ...

    def sample(self, source: SourceName, sample: Sample) -> None: ...

    def state(self, state: SourceState) -> None: ...


@dataclass
class WatchGroup:
    """Runs each watcher in its own thread until ``stop``; one that crashes stops alone and is named."""

    watchers: Sequence[Watcher]
    sink: Sink
    clock: Clock
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])

    def start(self) -> None:
        """Open every source (so that nothing after this call is missed), then start the threads."""
        for watcher in self.watchers:
            if self._guard(watcher, lambda w=watcher: self._open(w)):
                name = f"watch-{watcher.source}"
                thread = threading.Thread(target=self._loop, args=(watcher,), name=name, daemon=True)
                self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def stop(self, grace: float = 5.0) -> None:
        """Stop: each watcher polls once more, so that what is already there is not lost, then closes."""
        self._stop.set()
        for thread in self._threads:
            thread.join(grace)
            if thread.is_alive():
                name: SourceName = next(w.source for w in self.watchers if f"watch-{w.source}" == thread.name)
                self.sink.state(
                    SourceState(name, "partial", f"the {name} watcher did not stop within {grace:g} s", untrusted=True)
                )

    def _open(self, watcher: Watcher) -> None:
        self.sink.state(watcher.open())
        opening: Sample | None = getattr(watcher, "opening", None)
        if opening is not None:
            self.sink.sample(watcher.source, opening)

    def _loop(self, watcher: Watcher) -> None:
        def one() -> None:
            seen = watcher.poll()
            for signal in seen.signals:
                self.sink.signal(signal)
            if seen.sample is not None:
                self.sink.sample(watcher.source, seen.sample)
            if seen.state is not None:
                self.sink.state(seen.state)

        alive = True
        while alive and not self.clock.wait(self._stop, watcher.interval):
            alive = self._guard(watcher, one)
        if alive:
            self._guard(watcher, one)
        self._guard(watcher, watcher.close)

    def _guard(self, watcher: Watcher, act: Callable[[], None]) -> bool:
        from soakrig.errors import WatcherError

        try:
            act()
        except WatcherError as error:
            self.sink.state(SourceState(watcher.source, "absent", str(error)))
        except Exception as error:
            detail = f"the {watcher.source} watcher crashed: {type(error).__name__}: {error}"
            self.sink.state(SourceState(watcher.source, "absent", detail, untrusted=True))
        else:
            return True
        return False
