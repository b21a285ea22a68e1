"""Frames over one socket, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

from hotbunk.rollout.process.messages import (
    HEADER,
    MAX_FRAME,
    BrokenFrame,
    FromChild,
    ToChild,
    frame,
)


class Connection(asyncio.Protocol):
    """Sends messages, and hands over those that come.

    :param receive: called with each message, in order; may raise :class:`BrokenFrame`.
    :param closed: called once, with the reason, when nothing more will come.
    :param accepts: the messages that may come.
    """

    def __init__(
        self, receive: Callable[[Any], None], closed: Callable[[str], None], accepts: Any
    ) -> None:
        self.received = 0  # frames
        self.broken = False  # by what came, not by its end
        self._receive = receive
        self._closed = closed
        self._decoder = msgspec.msgpack.Decoder(accepts)
        self._buffer = bytearray()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = asyncio.Event()
        self._reason = "closed its connection"

    def send(self, message: ToChild | FromChild) -> None:
        """Queue a message; after the end of the connection it is dropped.

        :raises UsageError: it cannot travel.
        """
        data = frame(message)
        if self._transport is None:
            return
        if not self._out:  # what is sent in one turn of the loop leaves in one write
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(data)

    async def drained(self) -> None:
        """Until the other side has taken most of what was sent, or the connection has ended."""
        self._flush()
        await self._writable.wait()

    async def close(self, seconds: float) -> None:
        """Send what is queued, for ``seconds`` at most, then end."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
            try:
                async with asyncio.timeout(seconds):
                    await self._ended.wait()
            except TimeoutError:
                self.abort("closed")

    def abort(self, reason: str) -> None:
        """End now; what is queued is dropped."""
        if self._transport is not None:
            self._reason = reason
            self._transport.abort()

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    # -- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are no asyncio.Transport, and have all of it.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= HEADER:
                size = int.from_bytes(self._buffer[at : at + HEADER], "little")
                if size > MAX_FRAME:
                    raise BrokenFrame(f"a frame of {size} bytes came (at most {MAX_FRAME})")
                end = at + HEADER + size
                if len(self._buffer) < end:
                    break
                message = self._decoder.decode(self._buffer[at + HEADER : end])
                at = end
                self.received += 1
                self._receive(message)
        except (BrokenFrame, msgspec.DecodeError) as error:
            self._buffer.clear()
            self.broken = True
            self.abort(f"sent a broken message: {error}")
            return
        del self._buffer[:at]

    def eof_received(self) -> bool:
        if self._buffer:
            self._reason = f"closed its connection after {len(self._buffer)} bytes of a message"
        return False

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._out.clear()
        self._writable.set()
        self._ended.set()
        self._closed(f"{self._reason}: {exc}" if exc else self._reason)
