"""The client's side of one request: headers that wait, bytes, and an end that is either whole or plainly broken."""

from __future__ import annotations

from starlette.types import Send

from soakrig.engine.gateway.capture import Exchange
from soakrig.engine.gateway.errors import GatewayError


class Reply:
    """``head`` only notes what to say; the first byte says it. Leaving it without ``end`` breaks the connection."""

    def __init__(self, send: Send, exchange: Exchange | None = None) -> None:
        self._send, self._exchange = send, exchange
        self._status, self._headers = 0, list[tuple[bytes, bytes]]()
        self._framed = True
        self.started = False

    def head(self, status: int, headers: list[tuple[bytes, bytes]], *, packed: bool = False) -> None:
        """What the head will say. ``packed``: the bytes are compressed, so that no frame can be put among them."""
        self._status, self._headers = status, headers
        self._framed = not packed and not any(name.lower() == b"content-length" for name, _ in headers)

    async def write(self, data: bytes, *, start: bool = False) -> None:
        """Send bytes, the head before the first; ``start`` sends the head where there is no byte at all."""
        if not data and not start:
            return
        if not self.started:
            await self._start()
        if self._exchange is not None:
            self._exchange.add(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The answer is whole."""
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: GatewayError, path: str) -> None:
        """Say ``error``: with its own status while nothing was said, else as one frame, and the connection breaks."""
        if self.started:
            if self._framed:
                await self.write(error.frame(path))
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(error.body))]
        if error.retry_after:
            headers.append((b"retry-after", b"%d" % error.retry_after))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        self._status, self._headers = error.status, headers
        await self.write(error.body)
        await self.end()

    async def _start(self) -> None:
        self.started = True
        if self._exchange is not None:
            self._exchange.status = self._status
            self._exchange.answer_headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in self._headers]
        await self._send({"type": "http.response.start", "status": self._status, "headers": self._headers})
