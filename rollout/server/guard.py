"""Around the application: requests come whole in their time and size, and answers say who answers."""

from __future__ import annotations

import asyncio
from typing import cast

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_SECONDS = 30.0
BODY_SECONDS = 60.0


class Punctual(H11Protocol):
    """HTTP/1.1, but a connection on which no request comes to be is closed.

    uvicorn waits for ever for a head that was begun, or not even that.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # there is none before the first
        answering = cycle is not None and not cycle.response_complete
        if self._late is None and not answering:
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)
        elif self._late is not None and answering:
            self._late.cancel()
            self._late = None


class BodyLimit:
    """A body is whole within its size and its time. :param most: bytes of it."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if not said.isdigit() or int(said) > self._most:
            refused = PlainTextResponse(self._text, 413, {"Connection": "close"})
            await refused(scope, receive, send)
            return
        read, whole = 0, False
        until = asyncio.get_running_loop().time() + BODY_SECONDS

        async def counted() -> Message:
            nonlocal read, whole
            try:  # what comes after the body is how its client leaves: that may take long
                async with asyncio.timeout_at(None if whole else until):
                    message = await receive()
            except TimeoutError:
                late = f"a body must be whole within {BODY_SECONDS:g} s"
                raise HTTPException(408, late, {"Connection": "close"}) from None
            whole = not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self._most:
                raise HTTPException(413, self._text, {"Connection": "close"})
            return message

        await self._app(scope, counted, send)

    @property
    def _text(self) -> str:
        return f"a body may have {self._most} bytes"


class Signed:
    """Adds a header to every answer. Nothing is buffered on the way."""

    def __init__(self, app: ASGIApp, name: str, value: str) -> None:
        self._app = app
        self._header = (name.encode(), value.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self._header]
            await send(message)

        await self._app(scope, receive, signed)
