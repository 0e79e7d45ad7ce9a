"""Who may read a site of reports: the browser of this machine, or whoever has shown the token once."""

from __future__ import annotations

import hmac
import html
import secrets
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEAST_TOKEN = 16
"""Characters: fewer can be guessed."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
DEFAULT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'"
FRAMES = "; base-uri 'none'; frame-ancestors 'none'"
"""What only a header can say; every page's policy gets it."""


class Guard:
    """Lets requests through that carry the cookie of this process. ``?token=`` once, with the right token, gets it; an
    empty ``token`` lets everybody in. ``name``: of the cookie, since ports share theirs."""

    def __init__(self, app: ASGIApp, token: str, name: str) -> None:
        self._app, self._token, self._name = app, token.encode(), name
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or not self._token:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        shown = request.query_params.get("token")
        if shown is not None and hmac.compare_digest(shown.encode(), self._token):
            await self._welcome(scope)(scope, receive, send)
        elif hmac.compare_digest(request.cookies.get(self._name, "").encode(), self._session.encode()):
            await self._app(scope, receive, send)
        else:
            said = "This site of reports wants its token: open it once with ?token=TOKEN behind the address.\n"
            await PlainTextResponse(said, 401)(scope, receive, send)

    def _welcome(self, scope: Scope) -> HTMLResponse:
        """The cookie, and on to the same page without the token. By a page and not by a redirect: a browser that came
        here from elsewhere would leave a strict cookie out of a redirect's request."""
        path = "/" + quote(scope["path"].lstrip("/\\"))
        rest = [(name, value) for name, value in parse_qsl(scope["query_string"].decode("latin-1")) if name != "token"]
        there = html.escape(path + (f"?{urlencode(rest)}" if rest else ""))
        page = HTMLResponse(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={there}">'
            f'<title>Reports</title><p><a href="{there}">Go on</a></p></html>'
        )
        page.set_cookie(self._name, self._session, httponly=True, samesite="strict", path="/")
        return page


class Headers:
    """Puts on every answer what keeps a page to itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers["Content-Security-Policy"] = headers.get("Content-Security-Policy", DEFAULT_POLICY) + FRAMES
            await send(message)

        await self._app(scope, receive, sending)
