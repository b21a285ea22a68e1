"""The sending end of a sync between processes: who comes in, and what they agree to."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from hotbunk.checkpoint_engine.transports.base import Door, Offer
from hotbunk.checkpoint_engine.transports.channel import Channel
from hotbunk.checkpoint_engine.transports.parties import Left, Member, Party, out_of_turn
from hotbunk.checkpoint_engine.transports.protocol import (
    HELLO_BYTES,
    PROTOCOL,
    Abort,
    Accept,
    Decline,
    Failure,
    Hello,
    Vote,
    Welcome,
    frame,
    from_receiver,
)
from hotbunk.rollout.contract import Manifest, Ticket
from hotbunk.rollout.errors import (
    DeadlineExceeded,
    HotbunkError,
    SessionError,
    TrainerFailed,
    TransferFailed,
    UpdateRefused,
)

log = logging.getLogger(__name__)
HELLO_WAIT = 5.0  # seconds for a new connection to say who it is
STALL = 30.0  # seconds of silence after which a peer is given up
_STRANGERS = 64  # connections that have not said yet who they are
_FAREWELL = 1.0  # seconds for a stranger to take the reason
T = TypeVar("T")


class NegotiatedOffer(Offer):
    """An offer whose receivers come in by a door. Transports say in :meth:`run` how the bytes go.

    Receivers are let in from the moment it exists.

    :param name: the transport's, for tickets.
    :param stall: seconds; receivers give up a sender that is silent for so long.
    """

    some_may_decline = False  # whether a replica is served when some of its ranks need nothing

    def __init__(
        self,
        name: str,
        door: Door,
        manifest: Manifest,
        *,
        ranks: Sequence[int],
        deadline: float,
        stall: float = STALL,
    ) -> None:
        if any(n < 1 for n in ranks):
            door.close()
            raise SessionError(f"every replica has a rank or more: {list(ranks)}")
        self.manifest = manifest
        self.stall = min(stall, deadline)
        self.closed = False
        self.parties = [Party(n, size, still=self.still) for n, size in enumerate(ranks)]
        self.tickets = tuple(
            Ticket(name, door.address(party.token), ranks=party.size) for party in self.parties
        )
        self._door = door
        self._deadline = deadline
        self._until = asyncio.get_running_loop().time() + deadline
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0
        self._begin(self._answer())

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._until - asyncio.get_running_loop().time()

    # -- Offer --------------------------------------------------------------------------------

    async def serve(self) -> None:
        if self.closed:
            raise SessionError("this offer was closed")
        ticks = asyncio.create_task(self._tick())
        try:
            await self.run()
        except HotbunkError as error:
            self._all_out(error)
            raise
        except asyncio.CancelledError:
            self._all_out(TransferFailed("the sync was cancelled"))
            raise
        # A boundary: a source is the trainer's, and may raise anything.
        except Exception as error:
            self._all_out(error)
            failure = Failure.of(error)
            wrapped = TrainerFailed(str(failure), remote_traceback=failure.traceback)
            raise wrapped from error
        finally:
            ticks.cancel()
            await asyncio.gather(*(p.told() for p in self.parties))

    def _all_out(self, error: BaseException) -> None:
        for party in self.parties:
            party.leave(error)

    async def drop(self, replica: int) -> None:
        self.parties[replica].leave(TransferFailed("the replica was left out of the sync"))

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._all_out(TransferFailed("the sender closed the offer"))
        await asyncio.gather(*(p.told() for p in self.parties))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        self._door.close()
        for party in self.parties:
            for member in party.members.values():
                await member.cut()
        await self.release()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- for transports -----------------------------------------------------------------------

    @abstractmethod
    async def run(self) -> None:
        """Lead every party to its end. What it raises, every party is told."""

    async def look_at(self, member: Member, said: Accept, fd: int | None) -> None:
        """Check what a rank asks for, before its answer counts. ``fd`` is this method's to close.

        :raises UpdateRefused: it cannot be had.
        """
        if fd is not None:
            os.close(fd)

    async def still(self, party: Party) -> None:
        """Until nothing is written to a party that left; then its connections are closed."""

    async def release(self) -> None:
        """Let go of what the transport holds for this offer."""

    def look(self) -> None:
        """Called now and then while the offer is served: who makes no progress is left out."""

    async def each(
        self, parties: Sequence[Party], work: Callable[[Party], Awaitable[T]]
    ) -> dict[Party, T]:
        """One step with every party still under way, side by side; who fails in it is out."""
        results: dict[Party, T] = {}

        async def one(party: Party) -> None:
            try:
                results[party] = await work(party)
            except Left:
                pass
            except HotbunkError as error:
                party.leave(error.at(f"replica {party.replica}"))

        await asyncio.gather(*(one(p) for p in parties if p.alive))
        return results

    async def agree(self, party: Party) -> bool:
        """Until every rank has accepted; False: they need nothing, and are done.

        A party that has not agreed by half of the time could not be served in what is left.

        :raises HotbunkError: the party cannot be served.
        """
        return await party.agree(self.left / 2, some_may_decline=self.some_may_decline)

    async def settle(self, party: Party) -> None:
        """Until every rank has voted; then all of them commit."""
        await party.hear("commit", self.left, Vote)
        party.commit()

    # -- connections --------------------------------------------------------------------------

    async def _answer(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._door.listener)
            except OSError as error:  # of a peer that left, or too many open files
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(0.05)
                continue
            if self._strangers >= _STRANGERS:
                sock.close()
                continue
            self._strangers += 1
            self._begin(self._meet(Channel(sock)))

    async def _meet(self, channel: Channel) -> None:
        """One connection, from its hello to its end."""
        member: Member | None = None
        try:
            async with asyncio.timeout(HELLO_WAIT):
                member = await self._introduced(channel)
        except TimeoutError:
            log.warning("somebody connected and said nothing for %g s", HELLO_WAIT)
        except TransferFailed as error:
            if not channel.silent:  # who only looks whether we live says nothing
                log.warning("a stranger was turned away: %s", error)
        finally:
            self._strangers -= 1
            if member is None:
                channel.close()
        if member is not None:
            member.reader = asyncio.current_task()
            member.tell(Welcome(self.manifest, max(self.left, 0.0), self.stall))
            await self._listen_to(member)

    async def _introduced(self, channel: Channel) -> Member | None:
        """Whose connection it is; None: nobody's that we know, who was told why."""
        if self._door.same_user and channel.peer_uid != os.geteuid():
            raise TransferFailed(f"the peer is user {channel.peer_uid}")
        hello = await channel.receive(from_receiver, HELLO_BYTES)
        why, party = "", None
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
            why = f"protocol {PROTOCOL} begins with a hello"
        else:
            party = self._party_of(hello.token)
            if party is None:
                why = "this is not a ticket of the sync on offer"
            elif not 0 <= hello.rank < party.size:
                why = f"there is no rank {hello.rank} of {party.size}"
            elif hello.rank in party.members:
                why = f"rank {hello.rank} is taken: it is here already"
            elif not party.alive:
                why = "this replica's part in the sync is over"
        if party is None or why or not isinstance(hello, Hello):
            failure = Failure.of(TransferFailed(why, remedy="ask for a new ticket"))
            said = Abort(failure)
            if party is not None and party.failure is not None:
                said = Abort(party.failure, not party.moved)
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL):
                    await channel.send(frame(said))
            return None
        member = Member(channel, hello, party)
        party.joined(member)
        return member

    def _party_of(self, token: str) -> Party | None:
        # Every token is compared, each in the same time: nothing is learnt from how long it takes.
        known = [p for p in self.parties if hmac.compare_digest(p.token.encode(), token.encode())]
        return known[0] if known else None

    async def _listen_to(self, member: Member) -> None:
        party, answered = member.party, False
        try:
            while True:
                said = await member.channel.receive(from_receiver)
                fd = member.channel.claim()
                if isinstance(said, Abort):
                    raise _told(said, refused=not party.moved)
                if isinstance(said, Accept) and not answered:
                    await self.look_at(member, said, fd)
                elif fd is not None:
                    os.close(fd)
                if answered:
                    member.heard(said)
                    continue
                if not isinstance(said, Accept | Decline):
                    raise out_of_turn(said, member.rank)
                answered = True
                party.answered(member, said)
                if isinstance(said, Decline):
                    return  # it goes now, and others of its replica may not have come yet
        except HotbunkError as error:
            party.leave(error.at(member.where))

    async def _tick(self) -> None:
        """Say that the sender lives, and leave out who does not."""
        while True:
            await asyncio.sleep(min(1.0, self.stall / 5))
            if self.left <= 0:
                self._all_out(DeadlineExceeded("the sync", self._deadline))
            self.look()
            for party in self.parties:
                if party.alive:
                    for member in party.members.values():
                        member.beat()


def _told(said: Abort, *, refused: bool) -> HotbunkError:
    """What a rank gave up for, as an error."""
    error = (UpdateRefused if refused else TransferFailed)(str(said.failure))
    error.remote_traceback = said.failure.traceback
    return error
