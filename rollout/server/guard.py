"""Around the application: bodies have a limit, and answers say which server they are from."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """:param most: bytes of a request's body."""

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
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
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
