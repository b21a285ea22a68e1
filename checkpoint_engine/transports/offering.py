"""The sending end of a sync that is negotiated over TCP: who has come, and what they agreed to.

A *party* is one replica: its ranks stand and fall together. Parties do not know one another.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import secrets
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from hotbunk.checkpoint_engine.transports.base import Offer
from hotbunk.checkpoint_engine.transports.control import (
    HELLO_BYTES,
    PROTOCOL,
    Abort,
    Accept,
    Channel,
    Committed,
    Decline,
    Failure,
    FromReceiver,
    FromSender,
    Hello,
    Vote,
    Welcome,
    from_receiver,
)
from hotbunk.rollout.contract import Manifest, ReceiverLayout, Ticket
from hotbunk.rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    HotbunkError,
    TrainerFailed,
    TransferFailed,
    UpdateRefused,
)

log = logging.getLogger(__name__)
HELLO_WAIT = 10.0  # seconds for a new connection to say who it is
STALL = 30.0  # seconds of silence after which a peer is given up
_BEATS = 4  # in the time after which silence means death
_STRANGERS = 64  # connections that have not said yet who they are
_FAREWELL = 1.0  # seconds for a peer to take its last message
_INBOX = 4  # messages of one receiver that wait here; the protocol needs one
T = TypeVar("T")


class Left(Exception):
    """The party is out; why is in :attr:`Party.failure`."""


class Member:
    """A receiver rank's connection."""

    def __init__(self, channel: Channel, hello: Hello) -> None:
        self.channel = channel
        self.rank = hello.rank
        self.process = hello.process
        self.holds = frozenset(hello.holds)
        self.layout: ReceiverLayout | None = None
        self.inbox: asyncio.Queue[FromReceiver] = asyncio.Queue(_INBOX)


class Party:
    """One replica's ranks in one offer."""

    def __init__(self, replica: int, size: int, stall: float) -> None:
        self.replica = replica
        self.size = size
        self.token = secrets.token_urlsafe(32)
        self.members: dict[int, Member] = {}
        self.failure: Failure | None = None
        self.moved = False  # whether a byte may have been written
        self.done = False
        self.committed = False
        self._stall = stall
        self._all_here = asyncio.Event()
        self._left = asyncio.Event()
        self._farewell: asyncio.Task[None] | None = None
        self._on_leave: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        """Still under way."""
        return self.failure is None and not self.done

    def joined(self, member: Member) -> None:
        """A rank has come."""
        self.members[member.rank] = member
        if len(self.members) == self.size:
            self._all_here.set()

    def leave(self, error: BaseException | Failure) -> None:
        """It is out. The first reason counts, and every rank is told."""
        if not self.alive:
            return
        self.failure = error if isinstance(error, Failure) else Failure.of(error)
        log.info("replica %d is out of the sync: %s", self.replica, self.failure)
        self._left.set()
        for one in self._on_leave:
            one()
        self._farewell = asyncio.ensure_future(self._tell(Abort(self.failure, not self.moved)))

    def on_leave(self, call: Callable[[], None]) -> None:
        """Call this when the party leaves, or now if it has left."""
        if self.failure is not None:
            call()
        self._on_leave.append(call)

    async def told(self) -> None:
        """Until every rank of a party that left was told why."""
        if self._farewell is not None:
            await asyncio.shield(self._farewell)

    async def commit(self) -> None:
        """Its end, seen from here: what becomes of a rank now is its replica's own business."""
        self.done = self.committed = True
        await self._tell(Committed())

    async def _tell(self, said: FromSender) -> None:
        async def tell(member: Member) -> None:
            with suppress(HotbunkError):  # it may be the one that died
                await member.channel.send(said, _FAREWELL)

        await asyncio.gather(*(tell(m) for m in self.members.values()))

    async def here(self, seconds: float) -> None:
        """Until every rank has come. :raises DeadlineExceeded: naming those that have not."""
        if not await self.wait(self._all_here.wait(), seconds):
            absent = sorted(set(range(self.size)) - self.members.keys())
            raise DeadlineExceeded(
                f"the coming of rank(s) {absent}",
                seconds,
                where=f"replica {self.replica}, ranks present {sorted(self.members)}",
            )

    async def say(self, message: FromSender, members: Sequence[Member] | None = None) -> None:
        """Tell every rank (or some). :raises Left, TransferFailed: one is gone, or takes nothing."""
        self._still_here()
        ranks = self.members.values() if members is None else members
        await asyncio.gather(*(m.channel.send(message, self._stall) for m in ranks))

    async def hear(
        self,
        step: str,
        seconds: float,
        *kinds: type[FromReceiver],
        members: Sequence[Member] | None = None,
    ) -> list[FromReceiver]:
        """What every rank (or some) says next, by rank; one of ``kinds``.

        :raises Left: the party is out.
        :raises DeadlineExceeded: naming the ranks that said nothing.
        :raises TransferFailed: a rank said something else.
        """
        heard: dict[int, FromReceiver] = {}

        async def one(member: Member) -> None:
            heard[member.rank] = await member.inbox.get()

        async def all_of() -> None:
            await asyncio.gather(*(one(member) for member in ranks))

        ranks = list(self.members.values() if members is None else members)
        if not await self.wait(all_of(), seconds):
            silent = [m.rank for m in ranks if m.rank not in heard]
            raise DeadlineExceeded(
                step, seconds, where=f"replica {self.replica}, silent ranks {silent}"
            )
        for rank, said in heard.items():
            if not isinstance(said, kinds):
                raise TransferFailed(
                    f"rank {rank} said {type(said).__name__} out of turn",
                    where=f"replica {self.replica}, {step}",
                )
        return [heard[rank] for rank in sorted(heard)]

    async def wait(self, what: Awaitable[object], seconds: float) -> bool:
        """Await something unless the party leaves; False: not in time. :raises Left: it left."""
        # A task before anything can raise: whatever is not awaited here is cancelled here.
        task = asyncio.ensure_future(what)
        left = asyncio.ensure_future(self._left.wait())
        try:
            self._still_here()
            await asyncio.wait(
                {task, left}, timeout=max(seconds, 0), return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                task.result()
                return True
            self._still_here()
            return False
        finally:
            for one in (task, left):
                one.cancel()

    def _still_here(self) -> None:
        if not self.alive:
            raise Left


class NegotiatedOffer(Offer):
    """An offer whose receivers come over TCP. Transports say in :meth:`run` how the bytes go."""

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        *,
        ranks: Sequence[int],
        deadline: float,
        address: str,
        port: int = 0,
        stall: float = STALL,
    ) -> None:
        self.manifest = manifest
        self.stall = min(stall, deadline)
        self.parties = [Party(n, size, self.stall) for n, size in enumerate(ranks)]
        self._name = name
        self._deadline = deadline
        self._address = address
        self._port = port
        self._until = asyncio.get_running_loop().time() + deadline
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers = 0
        self._closed = False

    async def listen(self) -> None:
        """Open the door and write the tickets. :raises ConfigError: there is no such address."""
        try:
            self._server = await asyncio.start_server(
                self._come, self._address, self._port, backlog=1024
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {self._address}:{self._port}: {error.strerror or error}",
                remedy="set transport.address to an address of this machine",
            ) from error
        port = self._server.sockets[0].getsockname()[1]
        host = f"[{self._address}]" if ":" in self._address else self._address
        self.tickets = tuple(
            Ticket(self._name, f"{host}:{port}/{party.token}", ranks=party.size)
            for party in self.parties
        )

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._until - asyncio.get_running_loop().time()

    # -- Offer --------------------------------------------------------------------------------

    async def serve(self) -> None:
        beats = asyncio.create_task(self._beat())
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
            beats.cancel()
            await asyncio.gather(*(p.told() for p in self.parties))

    def _all_out(self, error: BaseException) -> None:
        for party in self.parties:
            party.leave(error)

    async def drop(self, replica: int) -> None:
        self.parties[replica].leave(TransferFailed("the replica will not come any more"))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._all_out(TransferFailed("the offer is closed"))
        await asyncio.gather(*(p.told() for p in self.parties))
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=5.0)
        await self.release()

    async def release(self) -> None:
        """Let go of what the transport holds for this offer."""

    # -- for transports -----------------------------------------------------------------------

    @abstractmethod
    async def run(self) -> None:
        """Lead every party to its end. What it raises, every party is told."""

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

        :raises HotbunkError: the party cannot be served.
        """
        patience = self.left / 2  # the others wait for it, and need time for themselves
        until = asyncio.get_running_loop().time() + patience
        await party.here(patience)
        left = until - asyncio.get_running_loop().time()
        said = await party.hear("accept", left, Accept, Decline)
        declined = [rank for rank, one in enumerate(said) if isinstance(one, Decline)]
        if len(declined) == party.size:
            party.done = True
            return False
        if declined:
            raise UpdateRefused(
                f"rank(s) {declined} have this version already, and the others have not",
                remedy="send it as a new version",
            )
        for rank, one in enumerate(said):
            if isinstance(one, Accept):
                party.members[rank].layout = one.layout
        return True

    async def settle(self, party: Party) -> None:
        """Until every rank has voted; then all of them commit."""
        await party.hear("commit", self.left, Vote)
        await party.commit()

    # -- connections --------------------------------------------------------------------------

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        channel = Channel(reader, writer)
        try:
            if self._closed or self._strangers >= _STRANGERS:
                return
            found = await self._introduced(channel)
            if found is not None:
                await self._listen_to(*found)
        except asyncio.CancelledError:  # the offer is closed; nobody waits for this task's result
            pass
        finally:
            self._connections.discard(task)
            await channel.close()

    async def _introduced(self, channel: Channel) -> tuple[Party, Member] | None:
        """Whose connection it is; None: nobody's that we know."""
        self._strangers += 1
        try:
            async with asyncio.timeout(HELLO_WAIT):
                hello = await channel.receive(from_receiver, HELLO_BYTES)
        except (TransferFailed, TimeoutError) as error:
            log.warning("a connection that did not say who it is: %s", error)
            return None
        finally:
            self._strangers -= 1
        party, why = None, ""
        if not isinstance(hello, Hello):
            why = "say hello first"
        elif hello.protocol != PROTOCOL:
            why = f"this side speaks protocol {PROTOCOL}, not {hello.protocol}"
        else:
            known = [p for p in self.parties if hmac.compare_digest(p.token, hello.token)]
            party = known[0] if known else None
            if party is None:
                why = "this is no ticket of the offer that is open here"
            elif not 0 <= hello.rank < party.size or hello.rank in party.members:
                why = f"rank {hello.rank} of {party.size} is taken, or is none"
            elif not party.alive:
                why = "this replica's part in the sync is over"
        try:
            if party is None or why or not isinstance(hello, Hello):
                known_why = party.failure if party is not None and not party.alive else None
                failure = known_why or Failure("TransferFailed", why)
                await channel.send(Abort(failure, refused=True), _FAREWELL)
                return None
            member = Member(channel, hello)
            party.joined(member)
            welcome = Welcome(self.manifest, max(self.left, 0.0), self.stall)
            await channel.send(welcome, self.stall)
        except TransferFailed as error:
            if party is not None and not why:
                party.leave(error)
            return None
        return party, member

    async def _listen_to(self, party: Party, member: Member) -> None:
        where = f"replica {party.replica}, rank {member.rank}"
        try:
            while True:
                said = await member.channel.receive(from_receiver)
                if isinstance(said, Abort):
                    party.leave(said.failure)
                    return
                await member.inbox.put(said)
                if isinstance(said, Decline):
                    return  # it goes now, and others of its replica may not have come yet
        except TransferFailed as error:
            party.leave(error.at(where))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.stall / _BEATS)
            for party in self.parties:
                if party.alive:
                    for member in party.members.values():
                        member.channel.beat()


def check_address(address: str) -> None:
    """:raises ConfigError: not an IP address that others could be told."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        raise ConfigError(f"{address!r} is not an IP address") from None
    if found.is_unspecified:
        raise ConfigError(
            f"{address!r} is every address and none", remedy="name the one that receivers reach"
        )
