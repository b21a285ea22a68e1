"""The receiving end: in the process that owns the weights. Needs no torch."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

from hotbunk.checkpoint_engine.transports import unix
from hotbunk.checkpoint_engine.transports.channel import Channel
from hotbunk.checkpoint_engine.transports.protocol import HALVES, Full, Welcome, packed, unpacked
from hotbunk.checkpoint_engine.transports.receiving import ReceivingTransfer, greet
from hotbunk.checkpoint_engine.transports.shm.protocol import Arena, Way
from hotbunk.rollout.contract import ArenaHandle, ReceiverLayout, Ticket
from hotbunk.rollout.errors import TransferFailed


class ShmTransfer(ReceivingTransfer):
    """One rank's end of one sync."""

    def __init__(self, channel: Channel, home: Path, welcome: Welcome, ticket: Ticket) -> None:
        super().__init__(channel, welcome, ticket)
        self._home = home
        self._room = 0
        self._memory: mmap.mmap | None = None
        self._view: memoryview | None = None

    @staticmethod
    async def open(ticket: Ticket) -> ShmTransfer:
        """Connect, and learn what is on offer.

        :raises TransferFailed: the offer is gone, or this is not its ticket.
        :raises UpdateRefused: another rank refused it already.
        """
        home, token = unix.parse(ticket.address)
        channel, welcome = await greet(await unix.connect(home), token, ticket)
        return ShmTransfer(channel, home, welcome, ticket)

    def offered(
        self, layout: ReceiverLayout | None, arena: ArenaHandle | None
    ) -> tuple[bytes, int | None]:
        if layout is None or arena is None or arena.fd < 0:
            return b"", None
        return packed(Arena(arena.kind, arena.nbytes)), arena.fd

    async def begin(self, data: bytes, fd: int | None, layout: ReceiverLayout | None) -> None:
        try:
            way = unpacked(data, Way)
            self.in_place, self._room = way.in_place, way.room
            if not way.in_place:
                self._map(fd)
        finally:
            if fd is not None:
                os.close(fd)

    async def lend(self, full: Full) -> memoryview | None:
        if self.in_place:
            return None
        assert self._memory is not None
        if not 0 <= full.used <= self._room:
            raise TransferFailed(
                f"bucket {full.number} has {full.used} bytes of {self._room}", where=self.where
            )
        at = full.number % HALVES * self._room
        with memoryview(self._memory) as whole:
            self._view = whole[at : at + full.used]
        return self._view

    def take_back(self) -> None:
        """The bucket was only lent. Who still holds a view of it keeps the memory, not the sync."""
        if self._view is not None:
            with suppress(BufferError):
                self._view.release()
            self._view = None

    async def finish(self) -> None:
        self.take_back()
        if self._memory is not None:
            with suppress(BufferError):
                self._memory.close()
            self._memory = None

    async def lost(self) -> None:
        await unix.sweep_soon(self._home)

    def _map(self, fd: int | None) -> None:
        """The sender's buckets, for reading: written pages become this process's own."""
        if fd is None:
            raise TransferFailed("the sender sent no memory")
        try:
            size, found = self._room * HALVES, os.fstat(fd).st_size
            if self._room <= 0 or found < size:
                raise TransferFailed(f"{size} bytes of memory were promised and {found} came")
            self._memory = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise TransferFailed(f"the sender's memory: {error}") from error
