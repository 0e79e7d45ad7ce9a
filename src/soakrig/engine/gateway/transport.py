"""An httpx transport over aiohttp that passes requests on as they are and gives every chunk as it comes off the wire.

httpx's own costs twice as much per event, and a third of a millisecond more per request (benchmarks/gateway.py).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import aiohttp
import httpx
from yarl import URL

READ_BUFFER = 1 << 18
_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""What aiohttp would add where the client said nothing."""


class PassingStream(httpx.AsyncByteStream):
    """A response's body: what has arrived, piece by piece. Raises ``httpx.ReadError`` when the connection breaks."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            # aiohttp raises before it hands out what came before the break, and keeps it in no public place.
            if left := b"".join(getattr(content, "_buffer", ())):
                yield left
            raise httpx.ReadError(_short(error)) from error

    async def aclose(self) -> None:
        self._response.close()


class PassingTransport(httpx.AsyncBaseTransport):
    """One connection a request, nothing added, decoded, redirected or retried.

    Raises ``httpx.ConnectError`` when no connection came about, ``httpx.RemoteProtocolError`` when what answered does
    not speak HTTP or closed without a word, ``httpx.ReadError`` when the connection broke before the head.
    """

    def __init__(self, connect: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=None)
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=self._timeout,
                read_bufsize=READ_BUFFER,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_ADDED,
                trust_env=False,
            )
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
        url = URL(str(request.url), encoded=True)  # path and query as the client wrote them
        try:
            response = await self._session.request(
                request.method, url, headers=headers, data=request.content or None, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise httpx.ConnectError(_short(error)) from error
        except (aiohttp.ClientResponseError, aiohttp.ServerDisconnectedError) as error:
            raise httpx.RemoteProtocolError(_short(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.ReadError(_short(error)) from error
        return httpx.Response(response.status, headers=response.raw_headers, stream=PassingStream(response))

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


def _short(error: BaseException) -> str:
    """What went wrong, without the words in which aiohttp wraps it."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection ended before the body did"
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
