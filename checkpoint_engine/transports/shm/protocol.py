"""What the two ends of the shm transport say to each other, and how it is framed.

A frame is its length (four bytes, little-endian) and a msgpack message; a descriptor travels with
the first byte of the frame that names it. Nothing is pickled, every frame has a bound, and a peer
is told apart by its user id, the offer's token and its rank.

    receiver                                    sender
    Hello(token, rank)                    ->
                                          <-    Welcome(manifest, stall) | Abort
    Accept(layout, arena) | Decline       ->
    | Abort                               <-    Go(in_place, room) | Abort
    Pull (in place only)                  ->
                                          <-    Full(number, used, entries) ...
    Ack(number) ...                       ->
                                          <-    End(fingerprints)
    Vote                                  ->
                                          <-    Committed

Either side says Abort at any point, and the sender says Beat while it has nothing else to say.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from hotbunk.rollout.contract import Manifest, ReceiverLayout
from hotbunk.rollout.errors import HotbunkError, TransferFailed

PROTOCOL = 1
HELLO_BYTES = 4 << 10  # most of a frame from somebody who has not shown a token
FRAME_BYTES = 64 << 20  # most of any frame: layouts and manifests of a few hundred thousand names
HALVES = 2  # buckets that one receiver may have at a time: one is packed, one is copied out
_TRACEBACK = 16 << 10  # characters kept of one
_MOST_FDS = 4  # waiting to be claimed
_CHUNK = 256 << 10  # bytes; read at a time
_LARGE = 128 << 10  # bytes; decoding more would hold the event loop up

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
    token: str
    rank: int
    protocol: int = PROTOCOL


class Welcome(_Message, frozen=True):
    manifest: Manifest
    stall: float  # seconds after which a silent peer is given up, on both sides


class Arena(_Message, frozen=True):
    """The receiver's arena; its descriptor travels with the frame."""

    kind: str
    nbytes: int
    handle: bytes = b""


class Accept(_Message, frozen=True):
    layout: ReceiverLayout | None
    arena: Arena | None


class Decline(_Message, frozen=True):
    pass


class Go(_Message, frozen=True):
    """All ranks accepted. ``room``: bytes of one half of the memory that travels with the frame."""

    in_place: bool
    room: int


class Pull(_Message, frozen=True):
    """From now on the arena may be written to."""


class Full(_Message, frozen=True):
    """Bucket ``number`` lies in half ``number % 2``, or in place."""

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


FromReceiver = Hello | Accept | Decline | Pull | Ack | Vote | Abort
FromSender = Welcome | Go | Full | End | Committed | Beat | Abort
Message = FromReceiver | FromSender

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode
from_receiver = msgspec.msgpack.Decoder(FromReceiver)
from_sender = msgspec.msgpack.Decoder(FromSender)


def frame(message: Message) -> bytes:
    """A message as bytes on the wire."""
    body = _encode(message)
    if len(body) > FRAME_BYTES:
        raise TransferFailed(
            f"a {type(message).__name__} of {len(body)} bytes is more than {FRAME_BYTES}"
        )
    return len(body).to_bytes(4, "little") + body


class Channel:
    """One connected socket: whole frames, and descriptors beside them.

    One task reads and one writes. Descriptors that nobody claimed are closed with the channel.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()
        self._fds: list[int] = []

    @property
    def peer_uid(self) -> int:
        """The user at the other end, as the kernel knows it."""
        size = struct.calcsize("3i")
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("3i", credentials)[1])

    async def send(self, data: bytes, fd: int | None = None) -> None:
        """Send a frame. :raises TransferFailed: the peer is gone."""
        loop = asyncio.get_running_loop()
        try:
            sent = 0
            if fd is not None:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                while not sent:
                    try:
                        sent = self._sock.sendmsg([data], rights)
                    except BlockingIOError:
                        await self._ready(loop.add_writer, loop.remove_writer)
            if sent < len(data):
                await loop.sock_sendall(self._sock, memoryview(data)[sent:])
        except OSError as error:
            raise TransferFailed(f"the peer is gone: {error}") from error

    async def receive(self, decoder: msgspec.msgpack.Decoder[T], most: int = FRAME_BYTES) -> T:
        """The next message.

        :raises TransferFailed: the peer is gone, or a frame is longer than ``most`` or makes no
            sense.
        """
        body = await self._frame(most)
        try:
            if len(body) > _LARGE:
                return await asyncio.to_thread(decoder.decode, body)
            return decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise TransferFailed(f"a frame that makes no sense: {error}") from error

    def claim(self) -> int | None:
        """The descriptor that came with the frames read so far; it is the caller's now."""
        return self._fds.pop(0) if self._fds else None

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()
        while self._fds:
            os.close(self._fds.pop())

    async def _frame(self, most: int) -> bytes:
        while len(self._buffer) < 4:
            await self._fill()
        size = int.from_bytes(self._buffer[:4], "little")
        if size > most:
            raise TransferFailed(f"a frame of {size} bytes, and {most} are allowed here")
        while len(self._buffer) < 4 + size:
            await self._fill()
        body = bytes(memoryview(self._buffer)[4 : 4 + size])
        del self._buffer[: 4 + size]
        return body

    async def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        room = socket.CMSG_SPACE(_MOST_FDS * 4)
        found = None
        while found is None:
            try:
                found = self._sock.recvmsg(_CHUNK, room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await self._ready(loop.add_reader, loop.remove_reader)
            except OSError as error:
                raise TransferFailed(f"the peer is gone: {error}") from error
        data, rights, flags, _ = found
        for level, kind, content in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = array.array("i")
                whole.frombytes(content[: len(content) - len(content) % whole.itemsize])
                self._fds.extend(whole)
        if len(self._fds) > _MOST_FDS or flags & socket.MSG_CTRUNC:
            raise TransferFailed("the peer sends more descriptors than the protocol has")
        if not data:
            raise TransferFailed("the peer is gone: it closed the connection")
        self._buffer += data

    async def _ready(
        self,
        add: Callable[[socket.socket, Callable[[], None]], object],
        remove: Callable[[socket.socket], object],
    ) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ready() -> None:
            if not future.done():
                future.set_result(None)

        add(self._sock, ready)
        try:
            await future
        finally:
            if self._sock.fileno() >= 0:
                remove(self._sock)
