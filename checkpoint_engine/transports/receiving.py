"""The receiving end of a sync between processes. Needs no torch."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from hotbunk.checkpoint_engine.transports.channel import Channel
from hotbunk.checkpoint_engine.transports.protocol import (
    Abort,
    Accept,
    Ack,
    Beat,
    Committed,
    Decline,
    End,
    Failure,
    FromReceiver,
    FromSender,
    Full,
    Go,
    Hello,
    Ready,
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
    DeadlineExceeded,
    HotbunkError,
    SessionError,
    TransferFailed,
    UpdateFailed,
    UpdateRefused,
)

OPEN_WAIT = 10.0  # seconds for the sender to answer a hello
ABORT_WAIT = 5.0  # seconds for the sender to take a word of farewell, and to write no more
_LAST_WORD = 1.0  # seconds for what the sender said before it went
_GRACE = 1.0  # seconds after the deadline for the sender to say so itself


def process_id() -> str:
    """This process among all that ever were; a fork of it is another one."""
    if os.getpid() not in _ids:
        _ids.clear()
        _ids[os.getpid()] = uuid.uuid4().hex
    return _ids[os.getpid()]


_ids: dict[int, str] = {}


async def greet(
    sock: socket.socket, token: str, ticket: Ticket, holds: tuple[str, ...] = ()
) -> tuple[Channel, Welcome]:
    """Show the ticket, and learn what is on offer. ``holds``: what was kept of earlier syncs.

    :raises TransferFailed: the offer is gone, or this is not its ticket.
    :raises UpdateRefused: another rank refused it already.
    """
    channel = Channel(sock)
    where = f"rank {ticket.rank}"
    try:
        async with asyncio.timeout(OPEN_WAIT):
            await channel.send(frame(Hello(token, ticket.rank, process_id(), holds)))
            said = await channel.receive(from_sender)
        if not isinstance(said, Welcome):
            raise _told(said, where)
    except TimeoutError:
        channel.close()
        raise TransferFailed(
            f"the sender did not answer within {OPEN_WAIT:g} s", where=where
        ) from None
    except BaseException:
        channel.close()
        raise
    return channel, said


class ReceivingTransfer(Transfer):
    """One rank's end: everything but the bytes.

    Waits end at the offer's deadline, or when the sender was silent for ``stall`` seconds.
    """

    def __init__(self, channel: Channel, welcome: Welcome, ticket: Ticket) -> None:
        self.manifest: Manifest = welcome.manifest
        self.stall = welcome.stall
        self.where = f"rank {ticket.rank}"
        self.in_place = False  # whether the sender writes into this rank's own memory
        self._until = asyncio.get_running_loop().time() + welcome.deadline
        self._deadline = welcome.deadline
        self._channel: Channel | None = channel
        self._accepted = self._begun = False
        self.next = 0  # number of the bucket that comes next
        self.ended = False  # whether the last bucket was taken
        self._fingerprints: Mapping[str, int] = {}

    # -- for transports -----------------------------------------------------------------------

    def offered(
        self, layout: ReceiverLayout | None, arena: ArenaHandle | None
    ) -> tuple[bytes, int | None]:
        """:attr:`Accept.data`, and a descriptor that goes with it."""
        return b"", None

    async def begin(self, data: bytes, fd: int | None, layout: ReceiverLayout | None) -> None:
        """All ranks accepted: open the way for the bytes.

        :param data: :attr:`Go.data`.
        :param fd: what came with it; this method's to close.
        """
        if fd is not None:
            os.close(fd)

    async def lend(self, full: Full) -> object:
        """A bucket's bytes; None where they are in place already. Not for every transport."""
        raise NotImplementedError

    def take_back(self) -> None:
        """A bucket was used; whoever still holds it keeps it from nothing. Idempotent."""

    async def finish(self) -> None:
        """Let go of what the way needed. Idempotent; never raises."""

    async def lost(self) -> None:
        """The sender is gone."""

    def left(self) -> float:
        """Seconds until the deadline."""
        return self._until - asyncio.get_running_loop().time()

    async def say(self, message: FromReceiver, fd: int | None = None) -> None:
        """:raises TransferFailed: the sender is gone, or takes nothing."""
        await self.send(frame(message), fd)

    async def send(self, data: bytes, fd: int | None = None) -> None:
        """A frame, or the rest of one. :raises TransferFailed: as :meth:`say`."""
        channel = self.channel()
        try:
            async with asyncio.timeout(self.stall):
                await channel.send(data, fd)
        except TimeoutError:
            raise self._silent("taking a message") from None
        except TransferFailed as error:
            last = await self._last_word(channel)  # it may have said why before it went
            if last is None:
                await self.lost()
            raise (_told(last, self.where) if last else error.at(self.where)) from error

    async def hear(self, step: str) -> FromSender:
        """What the sender says next.

        :raises TransferFailed: it is gone or silent.
        :raises DeadlineExceeded: the offer's time is over.
        """
        channel = self.channel()
        try:
            while True:
                left = self.left() + _GRACE
                if left <= 0:
                    raise DeadlineExceeded(step, self._deadline, where=self.where)
                async with asyncio.timeout(min(self.stall, left)):
                    said = await channel.receive(from_sender)
                if not isinstance(said, Beat):
                    return said
        except TransferFailed as error:
            await self.lost()
            raise error.at(f"{self.where}, {step}") from error
        except DeadlineExceeded:
            raise
        except TimeoutError:
            raise self._silent(step) from None

    def over(
        self, said: FromSender, step: str, kind: type[UpdateFailed] = TransferFailed
    ) -> UpdateRefused | UpdateFailed:
        """What the sender said instead of what it should have, as an error."""
        return _told(said, f"{self.where}, {step}", kind)

    async def begun(self) -> None:
        """Buckets are asked for. :raises SessionError: too early, or for a second time."""
        if not self._accepted:
            raise SessionError("buckets were asked for before the update was accepted")
        if self._begun:
            raise SessionError("the buckets of this update were taken before", where=self.where)
        self._begun = True
        if self.in_place:
            await self.say(Ready())

    async def next_one(self, said: FromSender | None = None) -> Full | None:
        """The next bucket's message; None: that was the last one.

        :param said: what the sender said next, where it was heard already.
        :raises TransferFailed: it is another one than the next, or none.
        """
        step = f"bucket {self.next}"
        if said is None or isinstance(said, Beat):
            said = await self.hear(step)
        if isinstance(said, End):
            self._fingerprints = said.fingerprints
            self.ended = True
            return None
        if not isinstance(said, Full):
            raise self.over(said, step)
        if said.number != self.next:
            raise TransferFailed(
                f"bucket {said.number} came, and {self.next} is next", where=self.where
            )
        return said

    # -- Transfer -----------------------------------------------------------------------------

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        data, fd = self.offered(layout, arena)
        await self.say(Accept(layout, data), fd)
        said = await self.hear("accept")
        claimed = self.channel().claim()
        if not isinstance(said, Go):
            if claimed is not None:
                os.close(claimed)
            raise self.over(said, "accept")
        try:
            await self.begin(said.data, claimed, layout)
        except TransferFailed as error:
            raise error.at(f"{self.where}, accept") from error
        self._accepted = True
        return self.in_place

    async def buckets(self) -> AsyncIterator[Bucket]:
        await self.begun()
        try:
            while (said := await self.next_one()) is not None:
                data = await self.lend(said)
                yield Bucket(data, tuple(BucketEntry(*piece) for piece in said.entries))
                del data
                self.take_back()
                self.next += 1
                await self.say(Ack(said.number))
        finally:
            self.take_back()

    async def fingerprints(self) -> Mapping[str, int]:
        return self._fingerprints

    async def commit(self) -> None:
        if not self.ended:  # who has applied nothing, or not all, has nothing to vote for
            raise UpdateFailed(
                "commit was voted before the last bucket was taken", where=self.where
            )
        await self.say(Vote())
        said = await self.hear("commit")
        if not isinstance(said, Committed):
            raise self.over(said, "commit", UpdateFailed)
        await self._close()

    async def decline(self) -> None:
        try:
            await self.say(Decline())
        finally:
            await self._close()

    async def abort(self, error: BaseException) -> None:
        channel = self._channel
        if channel is None:
            return
        # Whoever asks may give its memory away next, so nobody may still write there.
        with suppress(HotbunkError, TimeoutError):
            async with asyncio.timeout(ABORT_WAIT):
                await channel.send(frame(Abort(Failure.of(error))))
                while self.in_place:
                    await channel.receive(from_sender)
        await self._close()

    # -- inside -------------------------------------------------------------------------------

    def channel(self) -> Channel:
        """:raises SessionError: this transfer has ended."""
        if self._channel is None:
            raise SessionError("this transfer has ended", where=self.where)
        return self._channel

    async def _close(self) -> None:
        channel, self._channel = self._channel, None
        await self.finish()
        if channel is not None:
            channel.close()

    async def _last_word(self, channel: Channel) -> Abort | None:
        with suppress(TransferFailed, TimeoutError):
            async with asyncio.timeout(_LAST_WORD):
                while True:
                    said = await channel.receive(from_sender)
                    if isinstance(said, Abort):
                        return said
        return None

    def _silent(self, step: str) -> TransferFailed:
        return TransferFailed(
            f"the sender was silent for {self.stall:g} s", where=f"{self.where}, {step}"
        )


def _told(
    said: FromSender, where: str, kind: type[UpdateFailed] = TransferFailed
) -> UpdateRefused | UpdateFailed:
    """What the sender said, as an error."""
    if not isinstance(said, Abort):
        return TransferFailed(f"the sender said {type(said).__name__} out of turn", where=where)
    error = UpdateRefused if said.refused else kind
    found = error(str(said.failure), where=where)
    found.remote_traceback = said.failure.traceback
    return found
