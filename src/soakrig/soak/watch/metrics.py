"""The metrics watcher: scrapes the engine's own counters, and tells counters that move from counters that stand still.

A frozen engine keeps ``/health`` at 200 and answers ``/metrics`` from the memory of its HTTP process: the page is there
and its token counters stand still while requests are in flight. That is why ``progress`` is the part that matters.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from soakrig.clock import Clock
from soakrig.errors import WatcherError
from soakrig.record.offload import COUNTERS, PATHS, STEPS, sample_name
from soakrig.record.signal import Severity, Signal, SourceName, SourceState
from soakrig.soak.watch.watcher import Sample, Seen

FAMILIES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "generation_tokens": (
        "vllm:generation_tokens_total", "sglang:generation_tokens_total", "llamacpp:tokens_predicted_total",
    ),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "llamacpp:prompt_tokens_total"),
    "iteration_tokens_count": ("vllm:iteration_tokens_total_count",),
    "preemptions": ("vllm:num_preemptions_total",),
    "prefix_cache_hits": ("vllm:prefix_cache_hits_total",),
    "prefix_cache_queries": ("vllm:prefix_cache_queries_total",),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "corrupted_requests": ("vllm:corrupted_requests_total",),
}  # fmt: skip
"""Our name of a figure -> the families that carry it: vLLM, SGLang, llama.cpp. Sums over labels, but the largest of
``kv_cache_usage`` (a share from 0 to 1). ``iteration_tokens_count`` counts engine steps."""

PROGRESS = ("generation_tokens", "prompt_tokens", "iteration_tokens_count")
"""Counters that move whenever the engine works on anything."""
_LARGEST = frozenset({"kv_cache_usage"})
_OURS = {family: name for name, families in FAMILIES.items() for family in families}
OFFLOAD = {f"soakrig:moe_{counter}_total": {path: sample_name(path, counter) for path in PATHS} for counter in COUNTERS}
"""Family -> label ``path`` -> our name of the offload core's counters, summed over layers; the two paths stay apart."""
_OURS["soakrig:moe_engine_steps_total"] = STEPS
_PREFIXES = tuple(sorted({family.partition(":")[0] + ":" for family in (*_OURS, *OFFLOAD)}))


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress counters of the last good scrape, when (monotonic clock) it was, and when one last changed.

    ``changed_at_monotonic`` is the scrape that first showed the present figures; before any change it is the first
    scrape. All None and empty before the first scrape.
    """

    counters: dict[str, float] = field(default_factory=dict[str, float])
    changed_at_monotonic: float | None = None
    scraped_at_monotonic: float | None = None


def parse_page(text: str) -> Sample:
    """Our figures of a Prometheus text page; a family that the page lacks is left out, as is NaN.

    Lines of other families are dropped before parsing (a vLLM page is some 100 kB, nearly all of it histogram
    buckets). Raises ValueError for a line of ours that is not in the exposition format.
    """
    lines = [line for line in text.splitlines() if line.startswith(_PREFIXES) and _known(_family(line))]
    found: Sample = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            name = _OURS.get(sample.name) or OFFLOAD.get(sample.name, {}).get(sample.labels.get("path", ""))
            if name is None or not math.isfinite(sample.value):
                continue
            if name in _LARGEST:
                found[name] = max(found.get(name, 0.0), sample.value)
            else:
                found[name] = found.get(name, 0.0) + sample.value
    return found


def _known(family: str) -> bool:
    return family in _OURS or family in OFFLOAD


def _family(line: str) -> str:
    return line.partition("{")[0].partition(" ")[0]


def default_client() -> httpx.Client:
    """A client of its own for scraping: short timeout, no proxies from the environment."""
    return httpx.Client(timeout=httpx.Timeout(2.0), trust_env=False)


class MetricsWatcher:
    """Scrapes ``GET /metrics`` of the server at ``base_url`` (with or without ``/v1``).

    Samples: the names of ``FAMILIES`` and ``OFFLOAD``; ``opening`` is the first, of ``open``. Signals:
    ``metrics_stalled`` (no answer in time) and ``metrics_lost`` (refused, or not a metrics page any more), both
    warnings, once an episode; ``corrupted_requests`` (the counter rose: NaN in the logits) and ``engine_restarted`` (a
    token counter fell: another process answers now), faults.
    """

    source: SourceName = "metrics"

    def __init__(
        self,
        base_url: str,
        clock: Clock,
        client: Callable[[], httpx.Client] = default_client,
        *,
        interval: float = 1.0,
    ) -> None:
        self.interval = interval
        base = base_url.rstrip("/")
        self._url = f"{base.removesuffix('/v1')}/metrics"
        self._clock, self._make_client = clock, client
        self._client: httpx.Client | None = None
        self._lock = threading.Lock()
        self._progress = Progress()
        self._last: Sample = {}
        self.opening: Sample | None = None
        self._trouble: str | None = None
        self._missed = 0

    def progress(self) -> Progress:
        """What the last scrape knew; from any thread."""
        with self._lock:
            return self._progress

    def open(self) -> SourceState:
        """First scrape. Raises WatcherError when there is no such page or it holds nothing that we know."""
        self._client = self._make_client()
        try:
            kind, text, sample = self._scrape()
        except BaseException:
            self.close()
            raise
        if kind is not None:
            self.close()
            raise WatcherError(text, remedy="the engine may need a flag to serve /metrics (llama.cpp: --metrics)")
        self._keep(sample)
        self.opening = sample
        blind = [name for name in ("generation_tokens", "prompt_tokens") if name not in sample]
        detail = f"{self._url}: {', '.join(sorted(sample))}"
        if blind:
            return SourceState(
                "metrics", "partial", f"{detail}; without {' and '.join(blind)}, so progress is not seen"
            )
        return SourceState("metrics", "live", detail)

    def poll(self) -> Seen:
        """One scrape; blocks for at most the client's timeout."""
        kind, text, sample = self._scrape()
        if kind is not None:
            self._missed += 1
            if self._trouble == kind:
                return Seen()
            self._trouble = kind
            state = SourceState("metrics", "partial", text, lost=self._missed)
            return Seen([self._signal(kind, "warning", text)], None, state)
        state = None
        if self._trouble is not None:
            self._trouble = None
            text = f"{self._url} answers again; {self._missed} scrapes failed"
            state = SourceState("metrics", "partial", text, lost=self._missed)
        signals = self._compare(sample)
        self._keep(sample)
        return Seen(signals, sample, state)

    def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _scrape(self) -> tuple[str | None, str, Sample]:
        """(None, "", figures), or (kind of trouble, text, nothing)."""
        assert self._client is not None
        try:
            answer = self._client.get(self._url)
        except httpx.TimeoutException:
            return "metrics_stalled", f"GET {self._url} was not answered in time", {}
        except httpx.HTTPError as error:
            return "metrics_lost", f"GET {self._url} failed: {type(error).__name__}: {error}", {}
        if answer.status_code != 200:
            return "metrics_lost", f"GET {self._url} answered {answer.status_code}, a metrics page was expected", {}
        try:
            sample = parse_page(answer.text)
        except ValueError as error:
            return "metrics_lost", f"GET {self._url} is not in the Prometheus text format: {error}", {}
        if not sample:
            text = f"GET {self._url} has none of the families of vLLM, SGLang or llama.cpp that soakrig knows"
            return "metrics_lost", text, {}
        return None, "", sample

    def _compare(self, sample: Sample) -> list[Signal]:
        signals: list[Signal] = []
        old, new = self._last.get("corrupted_requests", 0.0), sample.get("corrupted_requests", 0.0)
        if new > old:
            text = f"the engine counts {new:g} corrupted requests (NaN in the logits), {old:g} before"
            signals.append(self._signal("corrupted_requests", "fault", text, before=old, now=new))
        fell = {n: (self._last[n], sample[n]) for n in PROGRESS if n in sample and sample[n] < self._last.get(n, 0.0)}
        if fell:
            shown = ", ".join(f"{name} {a:g} -> {b:g}" for name, (a, b) in fell.items())
            text = f"token counters fell ({shown}): the engine was restarted, or several engines share this address"
            signals.append(self._signal("engine_restarted", "fault", text, fell={n: list(v) for n, v in fell.items()}))
        return signals

    def _keep(self, sample: Sample) -> None:
        now = self._clock.monotonic()
        counters = {name: sample[name] for name in PROGRESS if name in sample}
        with self._lock:
            changed = self._progress.changed_at_monotonic
            if changed is None or counters != self._progress.counters:
                changed = now
            self._progress = Progress(counters, changed, now)
        self._last = sample

    def _signal(self, kind: str, severity: Severity, text: str, **detail: object) -> Signal:
        return Signal(
            kind, "metrics", severity, text, time=self._clock.time(), mono=self._clock.monotonic(),
            error_s=self.interval, detail=dict(detail),
        )  # fmt: skip
