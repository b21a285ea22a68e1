"""The receiving end where sender and receiver map one another's memory. Needs no torch.

Transports over a Unix socket whose buckets lie in two halves of the sender's memory, or where the
receiver has published its arena, in place: shm and ipc. They differ in what memory that is.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import abstractmethod
from pathlib import Path
from typing import Self

import msgspec

from hotbunk.checkpoint_engine.transports import unix
from hotbunk.checkpoint_engine.transports.channel import Channel
from hotbunk.checkpoint_engine.transports.protocol import (
    HALVES,
    Ack,
    FromSender,
    Full,
    Welcome,
    frame,
    from_sender,
    packed,
    unpacked,
)
from hotbunk.checkpoint_engine.transports.receiving import ReceivingTransfer, greet
from hotbunk.rollout.contract import ArenaHandle, Bucket, BucketEntry, ReceiverLayout, Ticket
from hotbunk.rollout.errors import TransferFailed
from hotbunk.rollout.native_kernels import beside
from hotbunk.rollout.transfer import Begin, Run, Write
from hotbunk.rollout.uncut import uncut

LARGEST = 1 << 44  # bytes; a bucket above this is a broken message
_LINGER = 0.005  # seconds that a thread waits for the next bucket, before the event loop does
_ROW = 0.1  # seconds after which others have a turn in that thread


class Arena(msgspec.Struct, frozen=True, array_like=True):
    """:attr:`Accept.data`: the receiver's arena; its descriptor travels with the frame.

    ``number`` is the driver's own name of it, where memory is not named by descriptors.
    """

    kind: str
    nbytes: int
    number: int = 0


class Way(msgspec.Struct, frozen=True, array_like=True):
    """:attr:`Go.data`. Bucket ``number`` lies in half ``number % 2``, or in place.

    ``room``: bytes of one half of the memory that travels with the frame. ``kind``, ``device`` (an
    id that all processes have for it), ``nbytes`` and ``number``: for memory of devices.
    """

    in_place: bool
    room: int
    kind: str = "file"
    device: str = ""
    nbytes: int = 0
    number: int = 0


class MappedTransfer(ReceivingTransfer):
    """One rank's end of one sync."""

    def __init__(self, channel: Channel, home: Path, welcome: Welcome, ticket: Ticket) -> None:
        super().__init__(channel, welcome, ticket)
        self.room = 0  # bytes of a half
        self._home = home

    @classmethod
    async def open(cls, ticket: Ticket) -> Self:
        """Connect, and learn what is on offer.

        :raises TransferFailed: the offer is gone, or this is not its ticket.
        :raises UpdateRefused: another rank refused it already.
        """
        home, token = unix.parse(ticket.address)
        channel, welcome = await greet(await unix.connect(home), token, ticket)
        return cls(channel, home, welcome, ticket)

    # -- for transports -----------------------------------------------------------------------

    @abstractmethod
    def map(self, way: Way, fd: int | None) -> None:
        """The sender's halves. ``fd`` is closed when this returns.

        :raises TransferFailed: they are not what was promised.
        """

    @abstractmethod
    def view(self, at: int, nbytes: int) -> object:
        """Bytes of what was mapped, lent until :meth:`take_back`."""

    # -- ReceivingTransfer --------------------------------------------------------------------

    def offered(
        self, layout: ReceiverLayout | None, arena: ArenaHandle | None
    ) -> tuple[bytes, int | None]:
        if layout is None or arena is None or (arena.fd < 0 and not arena.handle):
            return b"", None
        number = int.from_bytes(arena.handle, "little")
        data = packed(Arena(arena.kind, arena.nbytes, number))
        return data, arena.fd if arena.fd >= 0 else None

    async def begin(self, data: bytes, fd: int | None, layout: ReceiverLayout | None) -> None:
        try:
            way = unpacked(data, Way)
            if not way.in_place:
                if not 0 < way.room <= LARGEST:
                    raise TransferFailed(f"buckets of {way.room} bytes make no sense")
                self.map(way, fd)
            self.in_place, self.room = way.in_place, way.room
        finally:
            if fd is not None:
                os.close(fd)

    async def take(
        self, write: Write, *, begin: Begin | None = None, run: Run = asyncio.to_thread
    ) -> None:
        await self.begun()
        said: FromSender | None = None
        try:
            while (full := await self.next_one(said)) is not None:
                if begin is not None:
                    await begin()
                    begin = None
                row = _Row(self, write, full)
                rest, said = await uncut(run(row.run), row.stop)
                if rest:
                    await self.send(rest)
                if row.failed is not None:
                    await self.lost()
                    raise row.failed.at(f"{self.where}, bucket {self.next}")
        finally:
            self.take_back()

    async def lend(self, full: Full) -> object:
        return self.lend_now(full)

    def lend_now(self, full: Full) -> object:
        """See :meth:`lend`; what is mapped needs no waiting for."""
        if self.in_place:
            return None
        if not 0 <= full.used <= self.room:
            raise TransferFailed(
                f"bucket {full.number} has {full.used} bytes of {self.room}", where=self.where
            )
        return self.view(full.number % HALVES * self.room, full.used)

    async def lost(self) -> None:
        await unix.sweep_soon(self._home)


class _Row:
    """Buckets one after the other, without the event loop between them.

    Ends when the next one has not come yet, after a while, and with whatever else the sender says.
    Nobody else uses the channel while :meth:`run` is in its thread.
    """

    def __init__(self, transfer: MappedTransfer, write: Write, first: Full) -> None:
        self.failed: TransferFailed | None = None
        self._transfer = transfer
        self._write = write
        self._first = first
        self._channel = transfer.channel()
        self._channel.unwatch()
        self._stopped = False

    def stop(self) -> None:
        """End after the bucket that is being written."""
        self._stopped = True

    def run(self) -> tuple[bytes, FromSender | None]:
        """What is left to be sent, and what the sender said after the last bucket."""
        transfer, full = self._transfer, self._first
        until = time.monotonic() + _ROW
        while True:
            data = transfer.lend_now(full)
            with beside():  # the sender fills the other half
                self._write(Bucket(data, tuple(BucketEntry(*piece) for piece in full.entries)))
            del data
            transfer.take_back()
            transfer.next += 1
            ack = frame(Ack(full.number))
            try:
                rest = ack[self._channel.send_now(ack) :]
            except TransferFailed:
                return ack, None  # the loop finds it out as well, and asks why
            if rest or self._stopped or time.monotonic() > until:
                return rest, None
            try:
                said = self._channel.receive_now(from_sender, _LINGER)
            except TransferFailed as error:
                self.failed = error
                return b"", None
            if not isinstance(said, Full) or said.number != transfer.next:
                return b"", said
            full = said
