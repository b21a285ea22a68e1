"""The receiving end of a sync that is negotiated over TCP. Needs no torch."""

from __future__ import annotations

import asyncio
import os
import uuid

from hotbunk.checkpoint_engine.transports.control import (
    Abort,
    Accept,
    Beat,
    Channel,
    Committed,
    Decline,
    Failure,
    FromReceiver,
    FromSender,
    Go,
    Hello,
    Vote,
    Welcome,
    from_sender,
)
from hotbunk.rollout.contract import (
    ArenaHandle,
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

OPEN_WAIT = 10.0  # seconds for a sender to answer
ABORT_WAIT = 2.0  # seconds for a sender to take a word of farewell


def process_id() -> str:
    """This process among all that ever were; a fork of it is another one."""
    if os.getpid() not in _ids:
        _ids.clear()
        _ids[os.getpid()] = uuid.uuid4().hex
    return _ids[os.getpid()]


_ids: dict[int, str] = {}


def parse(address: str) -> tuple[str, int, str]:
    """Host, port and token. :raises TransferFailed: the address is none of ours."""
    place, _, token = address.partition("/")
    host, _, port = place.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16 and token):
        raise TransferFailed(f"{address!r} is no address of this transport")
    return host.strip("[]"), int(port), token


async def connect(ticket: Ticket, holds: tuple[str, ...] = ()) -> tuple[Channel, Welcome]:
    """Reach the sender and show the ticket. ``holds``: what this process kept of earlier syncs.

    :raises TransferFailed: the offer is gone, or this is not its ticket.
    """
    host, port, token = parse(ticket.address)
    where = f"rank {ticket.rank}"
    channel: Channel | None = None
    try:
        async with asyncio.timeout(OPEN_WAIT):
            channel = Channel(*await asyncio.open_connection(host, port))
            await channel.send(Hello(token, ticket.rank, process_id(), holds), OPEN_WAIT)
            said = await channel.receive(from_sender)
        if isinstance(said, Welcome):
            return channel, said
        raise _told(said, where, TransferFailed)
    except BaseException as error:
        if channel is not None:
            await channel.close()
        if isinstance(error, TimeoutError):
            raise TransferFailed(
                f"the sender did not answer within {OPEN_WAIT:g} s", where=where
            ) from None
        if isinstance(error, OSError):
            raise TransferFailed(
                f"the offer is gone: {error.strerror or error} ({host}:{port})",
                where=where,
                remedy="a ticket is good for one sync; ask for a new one",
            ) from error
        raise


class ReceivingTransfer(Transfer):
    """One rank's end: everything but the bytes.

    Waits end at the offer's deadline, or when the sender was silent for ``stall`` seconds.
    """

    def __init__(self, channel: Channel, welcome: Welcome, ticket: Ticket) -> None:
        self.manifest: Manifest = welcome.manifest
        self.stall = welcome.stall
        self.where = f"rank {ticket.rank}"
        self._until = asyncio.get_running_loop().time() + welcome.deadline
        self._deadline = welcome.deadline
        self._channel: Channel | None = channel

    # -- for transports -----------------------------------------------------------------------

    async def begin(self, data: bytes, layout: ReceiverLayout | None) -> None:
        """All ranks accepted: open the way for the bytes. ``data`` is :attr:`Go.data`."""

    async def finish(self) -> None:
        """Let go of what the way needed. Idempotent; never raises."""

    def left(self) -> float:
        """Seconds until the deadline."""
        return self._until - asyncio.get_running_loop().time()

    async def say(self, message: FromReceiver) -> None:
        """:raises TransferFailed: the sender is gone."""
        channel = self._open()
        try:
            await channel.send(message, self.stall)
        except TransferFailed as error:
            raise error.at(self.where) from error

    async def hear(self, step: str) -> FromSender:
        """What the sender says next.

        :raises TransferFailed: it is gone or silent.
        :raises DeadlineExceeded: the offer's time is over.
        """
        channel = self._open()
        try:
            while True:
                left = self.left()
                if left <= 0:
                    raise DeadlineExceeded(step, self._deadline, where=self.where)
                async with asyncio.timeout(min(self.stall, left)):
                    said = await channel.receive(from_sender)
                if not isinstance(said, Beat):
                    return said
        except TransferFailed as error:
            raise error.at(f"{self.where}, {step}") from error
        except DeadlineExceeded:
            raise
        except TimeoutError:
            raise TransferFailed(
                f"the sender was silent for {self.stall:g} s", where=f"{self.where}, {step}"
            ) from None

    def over(
        self, said: FromSender, step: str, kind: type[UpdateRefused | UpdateFailed]
    ) -> UpdateRefused | UpdateFailed:
        """What the sender said instead of what it should have, as an error."""
        return _told(said, f"{self.where}, {step}", kind)

    # -- Transfer -----------------------------------------------------------------------------

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        await self.say(Accept(layout))
        said = await self.hear("accept")
        if not isinstance(said, Go):
            refused = isinstance(said, Abort) and said.refused
            raise self.over(said, "accept", UpdateRefused if refused else TransferFailed)
        await self.begin(said.data, layout)
        return False

    async def commit(self) -> None:
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
        if self._channel is None:
            return
        try:
            await self._channel.send(Abort(Failure.of(error)), ABORT_WAIT)
        except HotbunkError:  # it is gone, or has forgotten us
            pass
        finally:
            await self._close()

    def _open(self) -> Channel:
        if self._channel is None:
            raise SessionError("this transfer has ended", where=self.where)
        return self._channel

    async def _close(self) -> None:
        channel, self._channel = self._channel, None
        await self.finish()
        if channel is not None:
            await channel.close(ABORT_WAIT)


def _told(
    said: FromSender, where: str, kind: type[UpdateRefused | UpdateFailed]
) -> UpdateRefused | UpdateFailed:
    if not isinstance(said, Abort):
        return TransferFailed(f"the sender said {type(said).__name__} out of turn", where=where)
    error = kind(str(said.failure), where=where)
    error.remote_traceback = said.failure.traceback
    return error
