"""The gateway's HTTP side: which paths there are, who may ask, and which engine gets a request."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Mapping

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from soakrig.engine.gateway.capture import Captures, Exchange
from soakrig.engine.gateway.counters import CONTENT_TYPE, Counters
from soakrig.engine.gateway.errors import GatewayError, refused
from soakrig.engine.gateway.outgoing import Outgoing, apply_policies, asked_model
from soakrig.engine.gateway.proxy import Proxy, Waits
from soakrig.engine.gateway.reply import Reply
from soakrig.engine.gateway.upstream import Catalogue, Route, Upstream

MAX_BODY = 32 << 20
"""Bytes of a request."""
POSTED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize")
ASKED = ("/health", "/version", "/soakrig/ping", "/soakrig/settings", "/soakrig/offload")
"""Paths that are passed on to the engine as they are, where there is one to ask."""
_KEY = b"authorization"


class ClientGoneError(Exception):
    """The client went away before its request was whole."""


Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class _Endpoint:
    """An ASGI endpoint over a handler: refuses who has no key, and says a GatewayError as JSON."""

    def __init__(self, handler: Handler, api_key: str) -> None:
        self._handler, self._key = handler, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._key:
                self._check(scope)
            await self._handler(scope, receive, send)
        except GatewayError as error:
            await Reply(send).fail(error, scope["path"])
        except ClientGoneError:
            return

    def _check(self, scope: Scope) -> None:
        given = next((value for name, value in scope["headers"] if name == _KEY), b"")
        scheme, _, key = given.partition(b" ")
        if not (hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"):
            raise GatewayError(401, "unauthorized", "this gateway needs its API key: Authorization: Bearer KEY")


class Gateway:
    """Everything behind the routes. ``default`` gets what names no model, ``named`` are further engines by the name
    that clients use. ``api_key`` is the gateway's own and goes no further. Raises UsageError for two equal aliases."""

    def __init__(
        self,
        default: Upstream | None,
        named: Mapping[str, Upstream] | None = None,
        *,
        waits: Waits | None = None,
        api_key: str = "",
        captures: Captures | None = None,
        max_body: int = MAX_BODY,
    ) -> None:
        self.counters = Counters()
        self._proxy = Proxy(self.counters, waits or Waits(), captures)
        self.catalogue = Catalogue(default, named or {}, self._proxy.ask_body)
        self._api_key, self._captures, self._max_body = api_key, captures, max_body

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            *(Path(path, _Endpoint(self.post, self._api_key), methods=["POST"]) for path in POSTED),
            *(Path(path, _Endpoint(self.get, self._api_key), methods=["GET"]) for path in ASKED),
            Path("/v1/models", _Endpoint(self.models, self._api_key), methods=["GET"]),
            Path("/metrics", _Endpoint(self.metrics, self._api_key), methods=["GET"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_path})

    async def aclose(self) -> None:
        await self._proxy.aclose()

    async def post(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request with a body: which engine, which policies, then there and back."""
        began = time.time()
        body = await self._body(scope, receive)
        name = "-"
        try:
            route = await self.catalogue.find(asked_model(body))
            name = route.upstream.name
            await route.upstream.settle()
        except GatewayError as error:
            self.counters.requests.labels(name, scope["path"], error.kind).inc()
            raise
        upstream = route.upstream
        out = self._outgoing(scope, upstream, body)
        policies = upstream.policies
        exchange = None
        if policies.capture and self._captures is not None:
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
            exchange = Exchange(upstream.name, out.path, out.query, began, headers, body)
        if policies.min_output_tokens is not None:
            await self.catalogue.look(upstream)
        await apply_policies(out, route, self.counters, self._proxy.count_tokens)
        if exchange is not None and out.changed:
            exchange.sent = out.body
        await self._proxy.relay(out, receive, send, exchange)

    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A question that the engine answers; ``?model=`` says which engine where there are several."""
        route = await self._asked(scope)
        await route.upstream.settle()
        await self._proxy.relay(self._outgoing(scope, route.upstream, b""), receive, send)

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The engine's own list where there is one engine and no other name; else all lists in one."""
        if not (self.catalogue.aliases or self.catalogue.named):
            return await self.get(scope, receive, send)
        rows = await self.catalogue.listing()
        if not rows:
            first = self.catalogue.upstreams[0]
            await first.settle()
            raise refused(first.name, first.url, "no engine answered GET /v1/models")
        return await _json({"object": "list", "data": rows})(scope, receive, send)

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The gateway's own figures, then the engine's; ``?model=`` says whose where there are several."""
        own = self.counters.exposition()
        only = self.catalogue.only
        theirs = b""
        if scope["query_string"] or (only is not None and len(self.catalogue.upstreams) == 1):
            upstream = (await self._asked(scope)).upstream
            body = await self._proxy.ask_body(upstream, "/metrics")
            theirs = (
                body
                if body is not None
                else b"# %s does not answer GET /metrics\n" % (upstream.url or upstream.name).encode()
            )
        await Response(own + theirs, headers={"content-type": CONTENT_TYPE})(scope, receive, send)

    async def _asked(self, scope: Scope) -> Route:
        model = Request(scope).query_params.get("model")
        if model is not None:
            upstream = next((one for one in self.catalogue.upstreams if one.name == model), None)
            if upstream is not None:
                return Route(upstream)
        return await self.catalogue.find(model)

    def _outgoing(self, scope: Scope, upstream: Upstream, body: bytes) -> Outgoing:
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        if self._api_key or upstream.api_key:
            headers = [(name, value) for name, value in headers if name != _KEY]
        if upstream.api_key:
            headers.append((_KEY, f"Bearer {upstream.api_key}".encode()))
        query = scope["query_string"].decode("latin-1")
        return Outgoing(upstream, scope["method"], scope["path"], query, headers, body)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises GatewayError (413) and ClientGoneError."""
        too_long = GatewayError(413, "body_too_long", f"a request may have {self._max_body} bytes; this one has more")
        stated = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if stated.isdigit() and int(stated) > self._max_body:
            raise too_long
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise too_long
            if not message.get("more_body", False):
                return b"".join(parts)


def _json(data: object, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")


async def _no_such_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    known = ", ".join(
        [*(f"POST {one}" for one in POSTED), *(f"GET {one}" for one in (*ASKED, "/v1/models", "/metrics"))]
    )
    text = f"{request.method} {request.url.path} is not served here; there are: {known}"
    return Response(GatewayError(status, "unknown_path", text).body, status_code=status, media_type="application/json")
