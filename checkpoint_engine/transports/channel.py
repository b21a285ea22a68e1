"""One connection of a sync: whole frames, and descriptors beside them where the socket carries any.

A frame is its length (four bytes, little-endian) and a msgpack message. Nothing is pickled and every
frame has a bound.
"""

from __future__ import annotations

import array
import asyncio
import os
import select
import socket
import struct
import time
from contextlib import suppress
from typing import TypeVar

import msgspec

from hotbunk.checkpoint_engine.transports.protocol import FRAME_BYTES
from hotbunk.rollout.errors import TransferFailed

_MOST_FDS = 4  # waiting to be claimed
_CHUNK = 256 << 10  # bytes; read at a time
_LEFT_OVER = 64  # chunks read of what came too late
_LARGE = 128 << 10  # bytes; decoding more would hold the event loop up

T = TypeVar("T")


class Channel:
    """A connected socket, Unix or TCP.

    One task reads and one writes. Descriptors that nobody claimed are closed with the channel.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._waiter: asyncio.Future[None] | None = None
        self._watched: asyncio.AbstractEventLoop | None = None
        self.silent = True  # nothing has come yet

    @property
    def peer_pid(self) -> int:
        """The process at the other end of a Unix socket, as the kernel knows it."""
        return self._peer()[0]

    @property
    def peer_uid(self) -> int:
        """Its user."""
        return self._peer()[1]

    def _peer(self) -> tuple[int, int, int]:
        size = struct.calcsize("3i")
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, uid, gid = struct.unpack("3i", credentials)
        return pid, uid, gid

    @property
    def local(self) -> str:
        """The address of this end of a TCP connection."""
        return str(self._sock.getsockname()[0])

    def send_now(self, data: bytes | memoryview) -> int:
        """Send what the socket takes at once; how many bytes that were. The rest is :meth:`send`'s.

        :raises TransferFailed: the peer is gone.
        """
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise TransferFailed(f"the peer is gone: {error}") from error

    async def send(self, data: bytes | memoryview, fd: int | None = None) -> None:
        """Send a frame, and a descriptor with its first byte. Cut off, the channel is done for.

        :raises TransferFailed: the peer is gone.
        """
        loop = asyncio.get_running_loop()
        try:
            sent = 0
            if fd is not None:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                while not sent:
                    try:
                        sent = self._sock.sendmsg([data], rights)
                    except BlockingIOError:
                        await self._writable(loop)
            if sent < len(data):
                await loop.sock_sendall(self._sock, memoryview(data)[sent:])
        except OSError as error:
            raise TransferFailed(f"the peer is gone: {error}") from error

    async def receive(self, decoder: msgspec.msgpack.Decoder[T], most: int = FRAME_BYTES) -> T:
        """The next message. It may be waited for again after a timeout.

        :raises TransferFailed: the peer is gone, or a frame is longer than ``most`` or makes no
            sense.
        """
        body = await self._frame(most)
        if len(body) > _LARGE:
            return await asyncio.to_thread(_decoded, decoder, body)
        return _decoded(decoder, body)

    def receive_now(self, decoder: msgspec.msgpack.Decoder[T], seconds: float) -> T | None:
        """The next message if it comes within a time; for a thread, while no task reads.

        :raises TransferFailed: as :meth:`receive`.
        """
        until = time.monotonic() + seconds
        number = self._sock.fileno()
        if number < 0:
            raise TransferFailed("this end of the connection was closed")
        poll = select.poll()
        poll.register(number, select.POLLIN)
        while (body := self._whole(FRAME_BYTES)) is None:
            if not self._read():
                left = until - time.monotonic()
                if left <= 0 or not poll.poll(max(1, left * 1000)):
                    return None
        return _decoded(decoder, body)

    def claim(self) -> int | None:
        """The descriptor that came with the frames read so far; it is the caller's now."""
        return self._fds.pop(0) if self._fds else None

    def close(self) -> None:
        """Idempotent. What was sent still arrives."""
        self.unwatch()
        if self._sock.fileno() >= 0:
            # A connection that is closed over unread bytes is reset, and the last word is lost.
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
                for _ in range(_LEFT_OVER):
                    if not self._sock.recv(_CHUNK):
                        break
            self._sock.close()
        while self._fds:
            os.close(self._fds.pop())

    async def _frame(self, most: int) -> bytes:
        loop = asyncio.get_running_loop()
        while (body := self._whole(most)) is None:
            if not self._read():
                await self._readable(loop)
        return body

    def _whole(self, most: int) -> bytes | None:
        """The next frame's message, if all of it is here."""
        if len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "little")
        if size > most:
            raise TransferFailed(f"a frame of {size} bytes, and {most} are allowed here")
        if len(self._buffer) < 4 + size:
            return None
        body = bytes(memoryview(self._buffer)[4 : 4 + size])
        del self._buffer[: 4 + size]
        return body

    def _read(self) -> bool:
        """Whether anything was there to be read."""
        room = socket.CMSG_SPACE(_MOST_FDS * 4)
        try:
            data, rights, flags, _ = self._sock.recvmsg(_CHUNK, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError as error:
            raise TransferFailed(f"the peer is gone: {error}") from error
        for level, kind, content in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = array.array("i")
                whole.frombytes(content[: len(content) - len(content) % whole.itemsize])
                self._fds.extend(whole)
        if len(self._fds) > _MOST_FDS:
            raise TransferFailed("the peer sends more descriptors than the protocol has")
        if flags & socket.MSG_CTRUNC:
            raise TransferFailed(
                "descriptors of the peer's could not be taken: too many of its, or of ours",
                remedy="raise the limit of open files (ulimit -n)",
            )
        if not data:
            raise TransferFailed("the peer is gone: it closed the connection")
        self.silent = False
        self._buffer += data
        return True

    async def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until something comes. The loop goes on watching: messages mostly follow one another."""
        self._waiter = loop.create_future()
        if self._watched is None:
            loop.add_reader(self._sock.fileno(), self._came)
            self._watched = loop
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _came(self) -> None:
        if self._waiter is None:  # nobody reads now: or the loop would call again and again
            self.unwatch()
        else:
            _set(self._waiter)

    def unwatch(self) -> None:
        """Leave the socket to a thread. Whoever waits for it next watches it again."""
        if self._watched is not None and self._sock.fileno() >= 0:
            self._watched.remove_reader(self._sock.fileno())
        self._watched = None

    async def _writable(self, loop: asyncio.AbstractEventLoop) -> None:
        future: asyncio.Future[None] = loop.create_future()
        number = self._sock.fileno()
        loop.add_writer(number, _set, future)
        try:
            await future
        finally:
            if self._sock.fileno() >= 0:
                loop.remove_writer(number)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferFailed(f"a frame that makes no sense: {error}") from error
