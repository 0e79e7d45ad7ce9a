"""The engine's counters for Prometheus, under vLLM's names where the meaning is vLLM's.

They move only with what the worker reports, so a frozen worker's counters stand still.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.registry import Collector

FINISH_REASONS = ("stop", "length", "abort", "error")
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """One registry of its own; ``report`` takes a worker's message, ``exposition`` gives the text."""

    def __init__(self, model: str) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self._registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ("model_name",), registry=self._registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("model_name",), registry=self._registry, buckets=buckets).labels(model)

        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens done, cached ones included.").labels(model)
        self._generated = counter("vllm:generation_tokens", "Tokens generated.").labels(model)
        self._preemptions = counter("vllm:num_preemptions", "Requests that gave their blocks up.").labels(model)
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.").labels(
            model
        )
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.").labels(model)
        success = counter("vllm:request_success", "Requests ended, by reason.", "finished_reason")
        self._finished = {reason: success.labels(model, reason) for reason in FINISH_REASONS}
        self._running = gauge("vllm:num_requests_running", "Requests in the running batch.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests waiting for a place.")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV cache's blocks in use, 0 to 1.")
        self._iteration = histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _TOKENS)
        self._first = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _SECONDS)
        self._totals = {"preemptions": 0, "prefix_queries": 0, "prefix_hits": 0}

    def report(self, message: dict[str, Any]) -> None:
        """One step or heartbeat of the worker."""
        if message["computed"]:
            self._prompt.inc(message["prompt"])
            self._generated.inc(message["generated"])
            self._iteration.observe(message["computed"])
        for name, counter in (
            ("preemptions", self._preemptions),
            ("prefix_queries", self._queries),
            ("prefix_hits", self._hits),
        ):
            counter.inc(message[name] - self._totals[name])
            self._totals[name] = message[name]
        self._running.set(message["running"])
        self._waiting.set(message["waiting"])
        self._usage.set(message["kv_usage"])

    def add(self, collector: Collector) -> None:
        """Show what ``collector`` has, too."""
        self._registry.register(collector)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        """vLLM has no reason of its own for tool calls: they end with "stop"."""
        self._finished["stop" if reason == "tool_calls" else reason].inc()
        if reason in ("stop", "tool_calls", "length"):
            self._whole.observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
