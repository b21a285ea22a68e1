"""The receiving end: in the process that owns the weights. Needs no torch."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path

from hotbunk.checkpoint_engine.transports.shm import address
from hotbunk.checkpoint_engine.transports.shm.protocol import (
    HALVES,
    Abort,
    Accept,
    Ack,
    Arena,
    Beat,
    Channel,
    Committed,
    Decline,
    End,
    Failure,
    FromReceiver,
    FromSender,
    Full,
    Go,
    Hello,
    Pull,
    Vote,
    Welcome,
    frame,
    from_sender,
)
from hotbunk.rollout.contract import (
    ArenaHandle,
    Bucket,
    BucketEntry,
    Manifest,
    ReceiverLayout,
    Ticket,
    Transfer,
)
from hotbunk.rollout.errors import (
    HotbunkError,
    SessionError,
    TransferFailed,
    UpdateFailed,
    UpdateRefused,
)

OPEN_WAIT = 30.0  # seconds for the sender to answer a hello
ABORT_WAIT = 5.0  # seconds for the sender to say that it writes no more


class ShmTransfer(Transfer):
    """One rank's end of one sync. A sender that is silent for ``stall`` seconds is given up."""

    def __init__(self, channel: Channel, home: Path, welcome: Welcome, ticket: Ticket) -> None:
        self.manifest: Manifest = welcome.manifest
        self._channel: Channel | None = channel
        self._home = home
        self._stall = welcome.stall
        self._rank = ticket.rank
        self._in_place = False
        self._room = 0
        self._memory: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._begun = False
        self._next = 0  # number of the bucket that comes next
        self._fingerprints: Mapping[str, int] = {}

    @staticmethod
    async def open(ticket: Ticket) -> ShmTransfer:
        """Connect, and learn what is on offer.

        :raises TransferFailed: the offer is gone, or this is not its ticket.
        :raises UpdateRefused: another rank refused it already.
        """
        home, token = address.parse(ticket.address)
        channel = Channel(await address.connect(home))
        try:
            async with asyncio.timeout(OPEN_WAIT):
                await channel.send(frame(Hello(token, ticket.rank)))
                welcome = await channel.receive(from_sender)
        except TimeoutError:
            channel.close()
            raise TransferFailed(
                f"the sender did not answer within {OPEN_WAIT:g} s", where=f"rank {ticket.rank}"
            ) from None
        except BaseException:
            channel.close()
            raise
        if not isinstance(welcome, Welcome):
            channel.close()
            raise _told(welcome, ticket.rank)
        return ShmTransfer(channel, home, welcome, ticket)

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        fd = None
        offered = None
        if layout is not None and arena is not None and (arena.fd >= 0 or arena.handle):
            offered = Arena(arena.kind, arena.nbytes, arena.handle)
            fd = arena.fd if arena.fd >= 0 else None
        await self._say(Accept(layout, offered), fd)
        go = await self._hear("accept")
        if not isinstance(go, Go):
            raise _told(go, self._rank)
        self._in_place, self._room = go.in_place, go.room
        if not go.in_place:
            self._map(go)
        return self._in_place

    async def buckets(self) -> AsyncIterator[Bucket]:
        if self._begun:
            raise SessionError("the buckets of this update were taken before")
        self._begun = True
        if self._in_place:
            await self._say(Pull())
        try:
            while True:
                said = await self._hear(f"bucket {self._next}")
                if isinstance(said, End):
                    self._fingerprints = said.fingerprints
                    break
                if not isinstance(said, Full):
                    raise _told(said, self._rank)
                yield self._lend(said)
                self._take_back()
                self._next += 1
                await self._say(Ack(said.number))
        finally:
            self._take_back()
        self._unmap()

    async def fingerprints(self) -> Mapping[str, int]:
        return self._fingerprints

    async def commit(self) -> None:
        await self._say(Vote())
        said = await self._hear("commit")
        if not isinstance(said, Committed):
            raise _told(said, self._rank, UpdateFailed)
        self._close()

    async def decline(self) -> None:
        try:
            await self._say(Decline())
        finally:
            self._close()

    async def abort(self, error: BaseException) -> None:
        channel = self._channel
        if channel is None:
            return
        # Whoever asks may give the arena away next, so nobody may still write there.
        with suppress(HotbunkError, TimeoutError):
            async with asyncio.timeout(ABORT_WAIT):
                await channel.send(frame(Abort(Failure.of(error))))
                while self._in_place:
                    await channel.receive(from_sender)
        self._close()

    # -- memory -------------------------------------------------------------------------------

    def _map(self, go: Go) -> None:
        """The sender's buckets, for reading: written pages become this process's own."""
        assert self._channel is not None
        fd = self._channel.claim()
        if fd is None:
            raise TransferFailed("the sender sent no memory", where=self._where)
        try:
            size = go.room * HALVES
            if go.room <= 0 or os.fstat(fd).st_size < size:
                raise TransferFailed(
                    f"{size} bytes of memory were promised and {os.fstat(fd).st_size} came",
                    where=self._where,
                )
            self._memory = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise TransferFailed(f"the sender's memory: {error}", where=self._where) from error
        finally:
            os.close(fd)

    def _lend(self, full: Full) -> Bucket:
        if full.number != self._next:
            raise TransferFailed(
                f"bucket {full.number} came, and {self._next} is next", where=self._where
            )
        entries = tuple(BucketEntry(*piece) for piece in full.entries)
        if self._in_place:
            return Bucket(None, entries)
        assert self._memory is not None
        if not 0 <= full.used <= self._room:
            raise TransferFailed(
                f"bucket {full.number} has {full.used} bytes of {self._room}", where=self._where
            )
        at = full.number % HALVES * self._room
        with memoryview(self._memory) as whole:
            self._view = whole[at : at + full.used]
        return Bucket(self._view, entries)

    def _take_back(self) -> None:
        """The bucket was only lent. Who still holds a view of it keeps the memory, not the sync."""
        if self._view is not None:
            with suppress(BufferError):
                self._view.release()
            self._view = None

    def _unmap(self) -> None:
        self._take_back()
        if self._memory is not None:
            with suppress(BufferError):
                self._memory.close()
            self._memory = None

    # -- talking ------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"rank {self._rank}"

    async def _say(self, message: FromReceiver, fd: int | None = None) -> None:
        if self._channel is None:
            raise SessionError("this transfer has ended", where=self._where)
        try:
            async with asyncio.timeout(self._stall):
                await self._channel.send(frame(message), fd)
        except TimeoutError:
            raise self._silent("taking a message") from None
        except TransferFailed as error:
            last = await self._last_word()  # it may have said why before it went
            if last is None:
                await address.sweep_soon(self._home)
            raise (_told(last, self._rank) if last else error.at(self._where)) from error

    async def _hear(self, step: str) -> FromSender:
        if self._channel is None:
            raise SessionError("this transfer has ended", where=self._where)
        try:
            while True:
                async with asyncio.timeout(self._stall):
                    said = await self._channel.receive(from_sender)
                if not isinstance(said, Beat):
                    return said
        except TimeoutError:
            raise self._silent(step) from None
        except TransferFailed as error:
            await address.sweep_soon(self._home)
            raise error.at(f"{self._where}, {step}") from error

    async def _last_word(self) -> Abort | None:
        assert self._channel is not None
        with suppress(TransferFailed, TimeoutError):
            async with asyncio.timeout(1.0):
                while True:
                    said = await self._channel.receive(from_sender)
                    if isinstance(said, Abort):
                        return said
        return None

    def _silent(self, step: str) -> TransferFailed:
        return TransferFailed(
            f"the sender was silent for {self._stall:g} s", where=f"{self._where}, {step}"
        )

    def _close(self) -> None:
        self._unmap()
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _told(
    said: FromSender, rank: int, kind: type[UpdateFailed] = TransferFailed
) -> UpdateRefused | UpdateFailed:
    """What the sender said, as an error."""
    where = f"rank {rank}"
    if not isinstance(said, Abort):
        return TransferFailed(f"the sender said {type(said).__name__} out of turn", where=where)
    text = str(said.failure)
    error = UpdateRefused(text, where=where) if said.refused else kind(text, where=where)
    error.remote_traceback = said.failure.traceback
    return error
