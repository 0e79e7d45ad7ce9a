"""The engine's offload counters over a run: what its expert cache did, and whether a bad expert id was routed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from soakrig.record.events import SampleTaken
from soakrig.record.result import HitRate, Offload, OffloadPath

PathName = Literal["small", "large"]
PATHS: tuple[PathName, PathName] = ("small", "large")
"""A layer's steps of few rows (decode; the cache policy acts) and of many (prefill chunks); never added up."""
COUNTERS = (
    "steps", "accesses", "hits", "unique", "unique_hits", "clean_steps", "fills", "evictions", "staged", "in_place",
    "groups", "sentinels", "bad_ids", "bytes_moved",
)  # fmt: skip
"""The engine's counters of one path, summed over layers; a sample names them ``moe_small_hits`` and so on."""
STEPS = "moe_engine_steps"
WARM_STEPS = 100
"""Engine steps after which a window no longer holds the cold start."""


def sample_name(path: str, counter: str) -> str:
    """The name under which a metrics sample carries one counter of one path."""
    return f"moe_{path}_{counter}"


NAMES = (STEPS, *(sample_name(path, counter) for path in PATHS for counter in COUNTERS))


@dataclass
class OffloadCount:
    """Takes the metrics samples of a run in and tells what the counters did between the first and the last.

    Counters that appear in mid-run began at 0 (an engine with all experts resident shows them from its first bad id
    on); counters that fall belong to another process, whose own began at 0 as well.
    """

    _first: dict[str, float] | None = None
    _last: dict[str, float] = field(default_factory=dict[str, float])
    _before: dict[str, float] = field(default_factory=dict[str, float])
    _scraped: bool = False

    def sample(self, event: SampleTaken) -> None:
        if event.source != "metrics":
            return
        values = {name: event.values[name] for name in NAMES if name in event.values}
        if values:
            if self._first is None:
                self._first = {} if self._scraped else values
            elif any(value < self._last.get(name, 0.0) for name, value in values.items()):
                self._before = {name: self._over_window(name) for name in NAMES}
                self._first = {}
            self._last = values
        self._scraped = True

    def figures(self) -> Offload | None:
        """The run's window; None where the engine has no such counters."""
        if self._first is None:
            return None
        counters = {
            path: {counter: int(self._over_window(sample_name(path, counter))) for counter in COUNTERS}
            for path in PATHS
        }
        first, last = int(self._first.get(STEPS, 0.0)), int(self._last.get(STEPS, 0.0))
        small, large = (_path(counters[path]) for path in PATHS)
        return Offload(
            kind="uncontrolled" if first < WARM_STEPS else "measured",
            first_step=first,
            last_step=last,
            hit_rate=small.hit_rate,
            misses_per_step_per_layer=small.misses_per_step_per_layer,
            large=large,
            bytes_moved=sum(counters[path]["bytes_moved"] for path in PATHS),
            bad_ids=sum(counters[path]["bad_ids"] for path in PATHS),
            counters={path: counters[path] for path in PATHS},
        )

    def _over_window(self, name: str) -> float:
        return self._before.get(name, 0.0) + self._last.get(name, 0.0) - (self._first or {}).get(name, 0.0)


def _path(counters: Mapping[str, int]) -> OffloadPath:
    return OffloadPath(
        hit_rate=HitRate(
            per_access=_share(counters["hits"], counters["accesses"]),
            per_unique=_share(counters["unique_hits"], counters["unique"]),
            per_step=_share(counters["clean_steps"], counters["steps"]),
        ),
        misses_per_step_per_layer=_share(counters["unique"] - counters["unique_hits"], counters["steps"]),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
