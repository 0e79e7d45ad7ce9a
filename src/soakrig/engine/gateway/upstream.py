"""An engine behind the gateway, and which one a model's name means."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from soakrig.engine.gateway import errors
from soakrig.engine.gateway.body import glance, objects
from soakrig.engine.gateway.errors import GatewayError, unknown_model
from soakrig.engine.gateway.place import Found, Place
from soakrig.engine.gateway.policies import Policies, Preset
from soakrig.engine.gateway.reasoning_memory import ReasoningMemory
from soakrig.errors import UsageError

Ask = Callable[["Upstream", str], Awaitable[bytes | None]]
"""GETs a path of an engine: the body of a 200, None for anything else."""


@dataclass(eq=False)
class Upstream:
    """An engine at ``url`` (no slash at its end; empty while nobody knows). ``name``: what the gateway calls it.
    ``model``: the engine's own name for its model, where that is known beforehand. ``context``: tokens, where the
    engine's own list does not say. ``place``: for an engine that comes and goes. ``api_key``: for the engine itself."""

    name: str
    url: str = ""
    policies: Policies = field(default_factory=Policies)
    model: str = ""
    context: int | None = None
    place: Place | None = None
    api_key: str = ""
    memory: ReasoningMemory = field(default_factory=ReasoningMemory)
    served: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The engine's own list of models, as it was when last asked; empty while nobody knows it."""
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def served_names(self) -> list[str]:
        return [one["id"] for one in self.served if isinstance(one.get("id"), str)]

    def context_of(self, model: str | None) -> int | None:
        """Tokens that prompt and answer may have together, where it is known."""
        rows = [one for one in self.served if one.get("id") == model] or self.served[:1]
        limit = rows[0].get("max_model_len") if rows else None
        return limit if type(limit) is int else self.context

    async def settle(self) -> None:
        """Bring ``url`` up to date. Raises GatewayError where the engine is not there: 503 while it loads, else 502."""
        place = self.place
        if place is None or (self.url and place.still()):
            return
        async with self._looking:
            if self.url and place.still():
                return
            self._take(await asyncio.to_thread(place.look))

    async def absent(self, why: str) -> GatewayError:
        """What to say of an engine that takes no connection."""
        refused = errors.refused(self.name, self.url, why)
        if self.place is None:
            return refused
        try:
            self._take(await asyncio.to_thread(self.place.look))
        except GatewayError as error:
            return error
        return refused

    def _take(self, found: Found) -> None:
        self.url, self.served = found.url, []  # another launch may have another list
        if found.loading:
            raise errors.loading(self.name, found.why)
        if not found.url:
            raise errors.not_there(self.name, found.why)


@dataclass(frozen=True)
class Route:
    """Where a request goes. ``model``: the name to ask for in place of the client's, None where that stays."""

    upstream: Upstream
    model: str | None = None
    preset: Preset | None = None


class Catalogue:
    """Every name that a client can ask for: those that the engines list themselves, ``named`` ones and aliases.

    A name is known once the engine has listed it; an unknown one makes the gateway look again before it refuses it.
    An engine without a list takes every name, and says itself what it thinks of it.
    """

    def __init__(self, default: Upstream | None, named: Mapping[str, Upstream], ask: Ask) -> None:
        self.default, self.named, self._ask = default, dict(named), ask
        self.upstreams = _unique(default, named)
        self.aliases: dict[str, tuple[Upstream, Preset]] = {}
        for upstream in self.upstreams:
            for alias, preset in upstream.policies.presets.items():
                if alias in self.aliases or alias in self.named:
                    raise UsageError(f"the alias {alias!r} stands for two models", remedy="Give one of them another.")
                self.aliases[alias] = (upstream, preset)

    @property
    def only(self) -> Upstream | None:
        """The one engine that gets what names no model; None where there are several and no default."""
        return self.default or (self.upstreams[0] if len(self.upstreams) == 1 else None)

    async def find(self, model: str | None) -> Route:
        """Raises GatewayError: 404 with the known names, 400 where a name is needed."""
        if model in self.aliases:
            upstream, preset = self.aliases[model]
            return Route(upstream, await self._own_name(upstream, model), preset)
        if model in self.named:
            return Route(self.named[model], await self._own_name(self.named[model], model))
        if model is None and self.only is not None:
            return Route(self.only)
        if model is None:
            raise GatewayError(400, "no_model", f"no model is named; there are: {', '.join(self.known())}")
        for again in (False, True):
            route = self._listed(model)
            if route is not None:
                return route
            await asyncio.gather(*(self.look(one, again=again) for one in self.upstreams))
            if self.default is not None and not self.default.served:
                return self._listed(model) or Route(self.default)
        route = self._listed(model)
        if route is None:
            raise unknown_model(model, self.known())
        return route

    def known(self) -> list[str]:
        """All names, each once."""
        served = [name for upstream in self.upstreams for name in upstream.served_names]
        return list(dict.fromkeys([*served, *self.named, *self.aliases]))

    async def look(self, upstream: Upstream, *, again: bool = False) -> None:
        """Ask an engine for its models, where nobody knows them yet."""
        if upstream.served and not again:
            return
        body = await self._ask(upstream, "/v1/models")
        rows = objects((glance(body) or {}).get("data")) if body is not None else []
        upstream.served = rows or upstream.served

    async def listing(self) -> list[dict[str, Any]]:
        """The rows of ``/v1/models``: of engines that answer now, and the names that stand for their models."""
        answers = await asyncio.gather(*(self._ask(one, "/v1/models") for one in self.upstreams))
        rows: list[dict[str, Any]] = []
        for upstream, body in zip(self.upstreams, answers, strict=True):
            if body is None:
                continue
            upstream.served = objects((glance(body) or {}).get("data")) or upstream.served
            first: dict[str, Any] = upstream.served[0] if upstream.served else {"object": "model"}
            names = [name for name, one in self.named.items() if one is upstream]
            names += [name for name, (one, _) in self.aliases.items() if one is upstream]
            rows += upstream.served
            rows += [{**first, "id": name, "parent": first.get("id")} for name in names
                     if name not in upstream.served_names]  # fmt: skip
        return rows

    def _listed(self, model: str) -> Route | None:
        upstream = next((one for one in self.upstreams if model in one.served_names), None)
        return Route(upstream) if upstream is not None else None

    async def _own_name(self, upstream: Upstream, asked: str) -> str | None:
        """The engine's own name for what a client calls ``asked``; None where that is its name, or nobody knows."""
        if upstream.model:
            return upstream.model if asked != upstream.model else None
        await self.look(upstream)
        names = upstream.served_names
        return names[0] if names and asked not in names else None


def _unique(default: Upstream | None, named: Mapping[str, Upstream]) -> list[Upstream]:
    found: list[Upstream] = [default] if default is not None else []
    for upstream in named.values():
        if not any(upstream is one for one in found):
            found.append(upstream)
    return found
