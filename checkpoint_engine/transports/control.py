"""What the two ends of a sync say to each other over TCP, whatever way the bytes take.

A frame is its length (four bytes, little-endian) and a msgpack message. Nothing is pickled, every
frame has a bound, and a peer is told by the random token of its ticket and by its rank.

    receiver                                    sender
    Hello(token, rank)                    ->
                                          <-    Welcome(manifest, ...) | Abort
    Accept(layout) | Decline | Abort      ->
                                          <-    Go(data) | Abort      once all ranks have accepted
    Ready                                 ->                          where the way must be built
                                          <-    Full(number, used, entries) ...
    Ack(number) ...                       ->
                                          <-    End(fingerprints)
    Vote                                  ->
                                          <-    Committed             once all ranks have voted

Either side says Abort at any point, and the sender says Beat while it has nothing else to say.
``Go.data``, and whether Ready, Full, Ack and End are said, is the transport's own business.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from hotbunk.rollout.contract import Manifest, ReceiverLayout
from hotbunk.rollout.errors import HotbunkError, TransferFailed

PROTOCOL = 1
HELLO_BYTES = 4 << 10  # most of a frame from somebody who has not shown a token
FRAME_BYTES = 64 << 20  # most of any frame: layouts and manifests of a few hundred thousand names
_TRACEBACK = 16 << 10  # characters kept of one
_LARGE = 128 << 10  # bytes; decoding more would hold the event loop up

T = TypeVar("T")
Piece = tuple[int, int, int, int]  # a BucketEntry: index, start, nbytes, offset


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error as it travels."""

    kind: str
    text: str
    traceback: str = ""

    @staticmethod
    def of(error: BaseException) -> Failure:
        """With the traceback of where it was raised, and the one it carries itself."""
        own = "".join(traceback.format_exception(error))
        told = error.remote_traceback if isinstance(error, HotbunkError) else ""
        both = f"{told}\n{own}" if told else own
        return Failure(type(error).__name__, str(error), both[-_TRACEBACK:])

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Hello(_Message, frozen=True):
    """``process`` names the receiver's process among all that ever were; ``holds`` what it kept."""

    token: str
    rank: int
    process: str
    holds: tuple[str, ...] = ()
    protocol: int = PROTOCOL


class Welcome(_Message, frozen=True):
    """``deadline``: seconds until the offer ends; ``stall``: silence after which a peer is given up."""

    manifest: Manifest
    deadline: float
    stall: float


class Accept(_Message, frozen=True):
    layout: ReceiverLayout | None


class Decline(_Message, frozen=True):
    pass


class Go(_Message, frozen=True):
    """All ranks of the replica accepted."""

    data: bytes


class Ready(_Message, frozen=True):
    pass


class Full(_Message, frozen=True):
    """Bucket ``number`` comes next: ``used`` bytes."""

    number: int
    used: int
    entries: tuple[Piece, ...]


class Ack(_Message, frozen=True):
    number: int


class End(_Message, frozen=True):
    fingerprints: Mapping[str, int]


class Vote(_Message, frozen=True):
    pass


class Committed(_Message, frozen=True):
    pass


class Beat(_Message, frozen=True):
    """The sender lives."""


class Abort(_Message, frozen=True):
    """``refused``: before anything was written anywhere."""

    failure: Failure
    refused: bool = False


FromReceiver = Hello | Accept | Decline | Ready | Ack | Vote | Abort
FromSender = Welcome | Go | Full | End | Committed | Beat | Abort
Message = FromReceiver | FromSender

_encode = msgspec.msgpack.Encoder().encode
from_receiver = msgspec.msgpack.Decoder(FromReceiver)
from_sender = msgspec.msgpack.Decoder(FromSender)


def frame(message: Message) -> bytes:
    """A message as bytes on the wire. :raises TransferFailed: it is too large for a frame."""
    body = _encode(message)
    if len(body) > FRAME_BYTES:
        raise TransferFailed(
            f"a {type(message).__name__} of {len(body)} bytes is more than {FRAME_BYTES}"
        )
    return len(body).to_bytes(4, "little") + body


class Channel:
    """One connection: whole frames. One task reads; anybody writes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def local(self) -> str:
        """The address of this end."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def send(self, message: Message, seconds: float) -> None:
        """Send a message.

        :raises TransferFailed: the peer is gone, or takes nothing for ``seconds``.
        """
        try:
            self._writer.write(frame(message))
            async with asyncio.timeout(seconds):
                await self._writer.drain()
        except TimeoutError:
            raise TransferFailed(f"the peer took nothing for {seconds:g} s") from None
        except OSError as error:
            raise TransferFailed(f"the peer is gone: {error}") from error

    def beat(self) -> None:
        """Say that we live, unless the peer reads nothing or is gone."""
        transport = self._writer.transport
        if not transport.is_closing() and not transport.get_write_buffer_size():
            self._writer.write(frame(Beat()))

    async def receive(self, decoder: msgspec.msgpack.Decoder[T], most: int = FRAME_BYTES) -> T:
        """The next message. Wrap it in a timeout; after one, the channel is good for nothing.

        :raises TransferFailed: the peer is gone, or a frame is longer than ``most`` or makes no
            sense.
        """
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            if size > most:
                raise TransferFailed(f"a frame of {size} bytes, and {most} are allowed here")
            body = await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise TransferFailed("the peer is gone: the connection ended") from error
        try:
            if len(body) > _LARGE:
                return await asyncio.to_thread(decoder.decode, body)
            return decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise TransferFailed(f"a frame that makes no sense: {error}") from error

    async def close(self, seconds: float = 1.0) -> None:
        """Close; what was written still goes out if the peer takes it in time. Idempotent."""
        self._writer.close()
        try:
            async with asyncio.timeout(seconds):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()
