"""The receivers of an offer, as the sender sees them.

A *party* is one replica: its ranks (*members*) stand and fall together. Parties do not know one
another.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from hotbunk.checkpoint_engine.layout import Want
from hotbunk.checkpoint_engine.transports.channel import Channel
from hotbunk.checkpoint_engine.transports.protocol import (
    Abort,
    Accept,
    Beat,
    Committed,
    Decline,
    Failure,
    FromReceiver,
    FromSender,
    Hello,
    frame,
)
from hotbunk.rollout.contract import ReceiverLayout
from hotbunk.rollout.errors import (
    DeadlineExceeded,
    HotbunkError,
    TransferFailed,
    UpdateRefused,
)

log = logging.getLogger(__name__)
FAREWELL = 2.0  # seconds for a peer to take its last message
_INBOX = 64  # messages of one receiver that may wait here; no window is larger


class Left(Exception):
    """The party is out; why is in :attr:`Party.failure`."""


class Member:
    """A receiver rank's connection. What it is told goes out in order, and nobody waits for it."""

    def __init__(self, channel: Channel, hello: Hello, party: Party) -> None:
        self.channel = channel
        self.party = party
        self.rank = hello.rank
        self.process = hello.process
        self.holds = frozenset(hello.holds)
        self.layout: ReceiverLayout | None = None
        self.want: tuple[Want, ...] = ()
        self._inbox: asyncio.Queue[FromReceiver | None] = asyncio.Queue()
        self._outbox: asyncio.Queue[tuple[bytes | memoryview, int | None] | None] = asyncio.Queue()
        self._idle = True
        self._writer = asyncio.create_task(self._write())
        self.reader: asyncio.Task[object] | None = None  # who listens to it

    @property
    def where(self) -> str:
        """For errors."""
        return f"replica {self.party.replica}, rank {self.rank}"

    def tell(self, message: FromSender | bytes, fd: int | None = None) -> None:
        """Send a message (or a frame made before) after all that were told before."""
        data: bytes | memoryview = message if isinstance(message, bytes) else frame(message)
        if fd is None and self._idle and self._outbox.empty():
            with suppress(TransferFailed):  # the writer will find it out as well
                sent = self.channel.send_now(data)
                if sent == len(data):
                    return
                data = memoryview(data)[sent:]
        self._outbox.put_nowait((data, fd))

    def beat(self) -> None:
        """Say that the sender lives, unless it is saying something anyway."""
        if self._idle and self._outbox.empty():
            self.tell(Beat())

    def heard(self, said: FromReceiver) -> None:
        """The rank said something. :raises TransferFailed: more than it was asked for."""
        if self._inbox.qsize() >= _INBOX:
            raise TransferFailed(f"{_INBOX} messages came that nobody asked for")
        self._inbox.put_nowait(said)

    def interrupt(self) -> None:
        """Whoever waits for what it says learns that its party is out."""
        self._inbox.put_nowait(None)

    async def next(self) -> FromReceiver:
        """What it says next. :raises Left: its party is out."""
        said = await self._inbox.get()
        if said is None:
            self.interrupt()  # for the next one
            raise Left
        return said

    async def end(self) -> None:
        """Get out what was told, for a moment, and close. Idempotent."""
        self._outbox.put_nowait(None)
        await asyncio.wait({self._writer}, timeout=FAREWELL)
        await self.cut()

    async def cut(self) -> None:
        """Close at once. Idempotent."""
        found: tuple[asyncio.Task[Any] | None, ...] = (self._writer, self.reader)
        tasks = {task for task in found if task is not None and task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=FAREWELL)
        self.channel.close()

    async def _write(self) -> None:
        with suppress(TransferFailed):  # whoever reads from it notices as well
            while (item := await self._outbox.get()) is not None:
                self._idle = False
                await self.channel.send(*item)
                self._idle = True


class Party:
    """One replica's ranks in one offer.

    :param still: awaited before the connections of a party that left are closed.
    """

    def __init__(
        self,
        replica: int,
        size: int,
        *,
        still: Callable[[Party], Awaitable[None]] | None = None,
    ) -> None:
        self.replica = replica
        self.size = size
        self.token = secrets.token_urlsafe(32)
        self.members: dict[int, Member] = {}
        self.failure: Failure | None = None
        self.moved = False  # whether a byte may have been written
        self.done = False
        self.committed = False
        self._still = still
        self._accepted: set[int] = set()
        self._declined: set[int] = set()
        self._all_here = asyncio.Event()
        self._all_answered = asyncio.Event()
        self._left = asyncio.Event()
        self._farewell: asyncio.Task[None] | None = None
        self._on_leave: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        """Still under way."""
        return self.failure is None and not self.done

    @property
    def takers(self) -> list[Member]:
        """Ranks that want the weights, in order."""
        return [self.members[rank] for rank in sorted(self._accepted)]

    def joined(self, member: Member) -> None:
        """A rank has come."""
        self.members[member.rank] = member
        if len(self.members) == self.size:
            self._all_here.set()

    def answered(self, member: Member, said: Accept | Decline) -> None:
        """A rank said what it thinks of the offer."""
        member.layout = said.layout if isinstance(said, Accept) else None
        (self._accepted if isinstance(said, Accept) else self._declined).add(member.rank)
        if len(self._accepted) + len(self._declined) == self.size:
            self._all_answered.set()

    async def agree(self, seconds: float, *, some_may_decline: bool) -> bool:
        """Until every rank has accepted; False: they need nothing, and are done.

        :raises DeadlineExceeded: naming the ranks that have not come, or have not answered.
        :raises UpdateRefused: some have the version already, and others have not.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if not await self.wait(self._all_here.wait(), seconds):
            absent = sorted(set(range(self.size)) - self.members.keys())
            raise DeadlineExceeded(
                f"the coming of rank(s) {absent}",
                seconds,
                where=f"replica {self.replica}, ranks present {sorted(self.members)}",
            )
        if not await self.wait(self._all_answered.wait(), until - loop.time()):
            silent = sorted(set(range(self.size)) - self._accepted - self._declined)
            raise DeadlineExceeded(
                "accept", seconds, where=f"replica {self.replica}, silent ranks {silent}"
            )
        if len(self._declined) == self.size:
            self.done = True
            self._close_soon()
            return False
        if self._declined and not some_may_decline:
            raise UpdateRefused(
                f"rank(s) {sorted(self._declined)} have this version already, and the others "
                "have not",
                remedy="send it as a new version",
            )
        return True

    def leave(self, error: BaseException | Failure) -> None:
        """It is out. The first reason counts, and every rank is told."""
        if not self.alive:
            return
        self.failure = error if isinstance(error, Failure) else Failure.of(error)
        log.info("replica %d is out of the sync: %s", self.replica, self.failure)
        self._left.set()
        for member in self.members.values():
            member.interrupt()
        for one in self._on_leave:
            one()
        self.tell(Abort(self.failure, not self.moved))
        self._close_soon()

    def on_leave(self, call: Callable[[], None]) -> None:
        """Call this when the party leaves, or now if it has left."""
        if self.failure is not None:
            call()
        self._on_leave.append(call)

    def commit(self) -> None:
        """Its end, seen from here: what becomes of a rank now is its replica's own business."""
        self.done = self.committed = True
        self.tell(Committed(), self.takers)
        self._close_soon()

    def tell(self, message: FromSender, members: Sequence[Member] | None = None) -> None:
        """Tell every rank (or some)."""
        data = frame(message)
        for member in self.members.values() if members is None else members:
            member.tell(data)

    async def told(self) -> None:
        """Until every rank of a party that is at its end was told so, and its connections closed."""
        if self._farewell is not None:
            await asyncio.shield(self._farewell)

    def _close_soon(self) -> None:
        self._farewell = asyncio.ensure_future(self._close())

    async def _close(self) -> None:
        if self.failure is not None and self._still is not None:
            await self._still(self)
        await asyncio.gather(*(member.end() for member in self.members.values()))

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
        ranks = self.takers if members is None else list(members)

        async def one(member: Member) -> None:
            with suppress(Left):  # this is found out below
                heard[member.rank] = await member.next()

        async def all_of() -> None:
            await asyncio.gather(*(one(member) for member in ranks))

        if not await self.wait(all_of(), seconds):
            silent = [m.rank for m in ranks if m.rank not in heard]
            raise DeadlineExceeded(
                step, seconds, where=f"replica {self.replica}, silent ranks {silent}"
            )
        self._still_here()
        for rank, said in heard.items():
            if not isinstance(said, kinds):
                raise out_of_turn(said, rank).at(f"replica {self.replica}, {step}")
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


def out_of_turn(said: FromReceiver, rank: int) -> HotbunkError:
    """What to say about a message that has no business here."""
    return TransferFailed(f"rank {rank} said {type(said).__name__} out of turn")
