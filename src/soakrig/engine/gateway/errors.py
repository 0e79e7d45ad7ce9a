"""What the gateway says when it has no answer to pass on: OpenAI's error object, whole or as a frame of a stream."""

from __future__ import annotations

import orjson

RETRY_AFTER_S = 5
"""What ``Retry-After`` says where the engine said nothing itself."""


class GatewayError(Exception):
    """No answer: ``status`` and ``kind`` (the error object's ``type``) say which way. ``retry_after``: seconds."""

    def __init__(self, status: int, kind: str, message: str, *, retry_after: int = 0, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.retry_after, self.param = status, kind, message, retry_after, param

    @property
    def object(self) -> dict[str, object]:
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}

    @property
    def body(self) -> bytes:
        """The error object as a body."""
        return orjson.dumps({"error": self.object})

    def frame(self, path: str) -> bytes:
        """One event that ends a stream without its terminator. The Responses API has an event type for it."""
        if path == "/v1/responses":
            event = {"type": "error", "error": self.object, **self.object, "code": self.kind}
            return b"event: error\ndata: " + orjson.dumps({**event, "type": "error"}) + b"\n\n"
        return b"data: " + self.body + b"\n\n"


def refused(name: str, url: str, why: str) -> GatewayError:
    """502: nothing listens there, or it does not take connections."""
    return GatewayError(502, "engine_unreachable", f"the engine {name} at {url} cannot be reached: {why}")


def died(name: str, url: str, why: str, *, begun: bool = False) -> GatewayError:
    """502: it took the request and broke off; ``begun``: in the middle of the answer."""
    when = "in the middle of its answer" if begun else "before the first byte of its answer"
    return GatewayError(502, "engine_died", f"the engine {name} at {url} broke off {when}: {why}")


def stalled(name: str, url: str, why: str) -> GatewayError:
    """504: the connection is open and nothing comes."""
    return GatewayError(504, "engine_stalled", f"the engine {name} at {url} is silent: {why}")


def empty(name: str, url: str, what: str) -> GatewayError:
    """502: it said 200 and nothing else."""
    return GatewayError(502, "engine_empty", f"the engine {name} at {url} answered 200 with nothing behind it: {what}")


def not_there(name: str, why: str) -> GatewayError:
    """502: no process of it is there, or none that listens."""
    return GatewayError(502, "engine_unreachable", f"the engine {name} is not there: {why}")


def loading(name: str, what: str) -> GatewayError:
    """503: it will be there."""
    text = f"the engine {name} is not ready: {what}"
    return GatewayError(503, "engine_loading", text, retry_after=RETRY_AFTER_S)


def unknown_model(model: str, known: list[str]) -> GatewayError:
    """404 with the names that there are."""
    text = f"there is no model {model!r} here; there are: {', '.join(known) or 'none'}"
    return GatewayError(404, "unknown_model", text, param="model")
