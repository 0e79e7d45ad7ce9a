"""The first questions to a target: is it an OpenAI-compatible server, which model, how much context, which settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from soakrig.errors import PreflightRefusedError, TargetError
from soakrig.soak.client import ChatClient


@dataclass(slots=True)
class Probe:
    """What the target said of itself. ``health``: the status of GET /health at the start (None: no answer); only a
    server that once answered 200 there can be called sick by it. ``settings``: the engine's own effective settings,
    where it has ``/soakrig/settings``. ``ping``: it has ``/soakrig/ping``, a round trip through the engine itself."""

    model: str
    context_limit: int | None = None
    health: int | None = None
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    version: str = ""
    ping: bool = False

    @property
    def simulated(self) -> bool:
        """Whether a planted fault is in force."""
        return bool(self.settings.get("simulated"))


async def probe(client: ChatClient, model: str = "") -> Probe:
    """Ask. Raises ``PreflightRefusedError`` when nothing answers, and ``TargetError`` with what was answered when this
    is no OpenAI-compatible server or the named model is not among its models."""
    url = client.target.base_url
    response = await client.get("/v1/models", timeout=15.0)
    if response is None:
        raise PreflightRefusedError(
            f"nothing answered GET {url}/v1/models", remedy="Is the engine running and ready? See --url."
        )
    listed = _models(response.content) if response.status_code == 200 else None
    if listed is None:
        if not model:
            said = response.text[:200].strip() or "an empty body"
            raise TargetError(
                f"{url} does not answer as an OpenAI-compatible server: GET /v1/models gave "
                f"{response.status_code} and {said!r}",
                remedy="Give the server's base URL, or --model NAME when it has no /v1/models.",
            )
        listed = []
    names = [str(entry.get("id")) for entry in listed]
    if model and names and model not in names:
        raise TargetError(f"--model {model!r} is not served at {url}", remedy=f"It serves: {', '.join(names)}.")
    chosen = model or names[0]
    limit = next((e.get("max_model_len") for e in listed if e.get("id") == chosen), None)
    health = await client.get("/health")
    settings = await client.get("/soakrig/settings")
    version = await client.get("/version")
    ping = await client.get("/soakrig/ping")
    return Probe(
        chosen,
        context_limit=limit if isinstance(limit, int) and limit > 0 else None,
        health=health.status_code if health is not None else None,
        settings=_object(settings.content) if settings is not None and settings.status_code == 200 else {},
        version=str(_object(version.content).get("version", "")) if version and version.status_code == 200 else "",
        ping=ping is not None and ping.status_code == 200 and _object(ping.content).get("alive") is True,
    )


def _models(body: bytes) -> list[dict[str, Any]] | None:
    data = _object(body).get("data")
    if not isinstance(data, list) or not data or not all(isinstance(e, dict) and "id" in e for e in data):
        return None
    return data


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}
