"""The offload core's counters for Prometheus, and their figures over a window of steps for ``/soakrig/offload``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from soakrig.errors import UsageError

from .counters import COUNTERS, PATHS, History, Window, bytes_moved, report
from .plan import OffloadPlan

RESIDENT = frozenset({"sentinels", "bad_ids"})
"""What a layer shows whose experts are all on the device: it has no cache, and its accesses would dilute the rates."""
QUERY = ("first_step", "last_step")


class OffloadMetrics(Collector):
    """``soakrig:moe_<counter>_total`` by layer and path; ``newest`` gives the whole life at each scrape.

    Nothing at all while no layer is offloaded and no step was reported.
    """

    def __init__(self, model: str, plan: OffloadPlan, newest: Callable[[], Window]) -> None:
        self._model = model
        self._numbers = [str(shape.layer) for shape in plan.model.layers]
        self._row_bytes = [plan.row_bytes.get(shape.layer) for shape in plan.model.layers]
        self._newest = newest
        self._shown = bool(plan.layers)

    def collect(self) -> Iterator[CounterMetricFamily]:
        window = self._newest()
        if not (self._shown or window.last_step):
            return
        steps = CounterMetricFamily("soakrig:moe_engine_steps", "Steps of the engine.", labels=("model_name",))
        steps.add_metric((self._model,), window.last_step)
        yield steps
        labels = ("model_name", "layer", "path")
        moved = CounterMetricFamily("soakrig:moe_bytes_moved", "Bytes of experts fetched from the bank.", labels=labels)
        for index, name in enumerate(COUNTERS):
            family = CounterMetricFamily(
                f"soakrig:moe_{name}", f"The offload core's {name}, see docs/offload.md.", labels=labels
            )
            for number, row_bytes, layer in zip(self._numbers, self._row_bytes, window.counters, strict=True):
                if row_bytes is None and name not in RESIDENT:
                    continue
                for path, counts in zip(PATHS, layer, strict=True):
                    family.add_metric((self._model, number, path), counts[index])
                    if row_bytes is not None and index == 0:
                        moved.add_metric((self._model, number, path), bytes_moved(counts, row_bytes))
            yield family
        yield moved


def window_report(plan: OffloadPlan, history: History, query: Mapping[str, str]) -> dict[str, Any]:
    """The figures between two steps, or of the whole life where none are named.

    Raises UsageError for anything but both of ``first_step`` and ``last_step``, or neither; for a step that is no
    whole number; and for one at which no counters were kept.
    """
    stranger = next((name for name in query if name not in QUERY), None)
    if stranger is not None or len(query) == 1:
        raise UsageError(
            f"the query has {stranger or next(iter(query))!r}"
            + (", which is no parameter" if stranger is not None else " alone"),
            remedy="give both first_step and last_step, or neither for the whole life",
        )
    window = history.window(*(_step(name, query[name]) for name in QUERY)) if query else history.whole()
    return report([shape.layer for shape in plan.model.layers], plan.row_bytes, window)


def _step(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise UsageError(f"{name}={text!r} is no engine step; a whole number of 0 or more was expected")
    return int(text)
