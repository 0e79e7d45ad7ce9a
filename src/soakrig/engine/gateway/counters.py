"""The gateway's own metrics, in a registry of their own: ``soakrig_gateway_*``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Counters:
    """``model`` is the name of an engine as the gateway knows it, never what a client wrote."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "soakrig_gateway_requests",
            "Requests by what became of them.",
            ["model", "path", "outcome"],
            registry=self.registry,
        )
        self.policy = Counter(
            "soakrig_gateway_policy",
            "Requests or answers that a policy changed, by what it did.",
            ["model", "policy", "effect"],
            registry=self.registry,
        )
        self.effort = Counter(
            "soakrig_gateway_effort",
            "Reasoning efforts as the engine was asked for them; - is none.",
            ["model", "effort"],
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "soakrig_gateway_first_byte_seconds",
            "From a generating request's last byte to the first byte of the engine's answer.",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "soakrig_gateway_in_flight", "Requests that are being answered.", ["model"], registry=self.registry
        )
        self.remembered = Gauge(
            "soakrig_gateway_remembered", "Entries of the reasoning memory.", ["model"], registry=self.registry
        )

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)
