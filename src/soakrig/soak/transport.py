"""An httpx transport over aiohttp that gives every chunk as it comes off the wire.

httpx alone costs ten times a bare loop per event, and its aiohttp transport on PyPI reads through two generators and
builds a TLS context even for plain http. This one hands the body's reader to whoever asks for it (``RawStream.read``),
opens a connection for each request, and keeps httpx's requests, responses and exceptions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import aiohttp
import httpx

READ_BUFFER = 1 << 18


class RawStream(httpx.AsyncByteStream):
    """A response body. ``read`` returns what has arrived, at least one byte, and ``b""`` at the end; it raises
    aiohttp's own ``ClientPayloadError`` when the connection breaks before HTTP's end of the body; ``left`` then has
    what came before the break. Iteration, which httpx does, gives that too and raises ``httpx.ReadError``."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.read = response.content.readany

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while chunk := await self.read():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            if left := self.left():
                yield left
            raise httpx.ReadError(_short(error)) from error

    def left(self) -> bytes:
        """What arrived and was not read when the connection broke: aiohttp raises before it hands that out, and keeps
        it in no public place."""
        return b"".join(getattr(self._response.content, "_buffer", ()))

    async def aclose(self) -> None:
        self._response.close()


class AiohttpStreams(httpx.AsyncBaseTransport):
    """One connection a request, no limit on their number, nothing decoded, redirected or retried.

    ``open`` is for turns: it spares httpx's request and response objects, some 50 us each. Both ways raise
    ``httpx.ConnectError`` when no connection came about, ``httpx.RemoteProtocolError`` when what answered does not
    speak HTTP, ``httpx.ReadError`` when the connection broke before the response's head.
    """

    def __init__(self, *, connect: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=None)
        self._session: aiohttp.ClientSession | None = None

    async def open(self, url: str, headers: Mapping[str, str], body: bytes) -> RawStream:
        """POST ``body`` and return the answer as soon as its head is there."""
        return RawStream(await self._request("POST", url, headers, body))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers.raw}
        response = await self._request(request.method, str(request.url), headers, request.content or None)
        return httpx.Response(response.status, headers=response.raw_headers, stream=RawStream(response))

    async def _request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=self._timeout,
                read_bufsize=READ_BUFFER,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        try:
            return await self._session.request(method, url, headers=headers, data=body, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise httpx.ConnectError(_short(error)) from error
        except aiohttp.ClientResponseError as error:
            raise httpx.RemoteProtocolError(_short(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.ReadError(_short(error)) from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
