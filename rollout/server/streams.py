"""Requests of the contract under an HTTP request: merged, read in step, ended when nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotbunk.rollout.calls import abandoned
from hotbunk.rollout.contract import TokenChunk

T = TypeVar("T")
LEFT = 499  # the status of an answer that nobody reads
WINDOW = 16  # chunks between a stream and its reader


class Gone(Exception):
    """The client has left."""


async def merged(
    streams: Sequence[AsyncIterator[TokenChunk]],
) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """Chunks of all streams, with the number of theirs; a reader that stops stops them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:  # type: ignore[type-var]
            async for chunk in only:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, TokenChunk | BaseException | None]] = asyncio.Queue(WINDOW)

    async def pump(number: int) -> None:
        try:
            async with aclosing(streams[number]) as one:  # type: ignore[type-var]
                async for chunk in one:
                    await queue.put((number, chunk))
            await queue.put((number, None))
        # Handed on as it is: whoever reads raises it.
        except Exception as error:  # noqa: BLE001
            await queue.put((number, error))

    pumps = [asyncio.create_task(pump(number)) for number in range(len(streams))]
    try:
        left = len(pumps)
        while left:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        await abandoned(*pumps)


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """``work``, cancelled when the client leaves. The body has been read.

    :raises Gone: it left.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_left(request.receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Gone
        return doing.result()
    finally:
        await abandoned(doing, leaving)


class EventStream(Response):
    """Events as they come. When the client leaves, the source is closed at once.

    The server waits with the next event until the client has taken the last ones.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await abandoned(sending, leaving)
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": list(self.raw_headers)}
        )
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(
                0
            )  # events that are there already: whether it broke is told between
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
