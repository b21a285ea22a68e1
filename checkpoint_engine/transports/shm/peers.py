"""The receivers as the sender sees them: ranks with a connection, and replicas of ranks."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hotbunk.checkpoint_engine.layout import Want
from hotbunk.checkpoint_engine.transports.shm.memory import Mapped
from hotbunk.checkpoint_engine.transports.shm.packing import Member
from hotbunk.checkpoint_engine.transports.shm.protocol import (
    Abort,
    Beat,
    Channel,
    Failure,
    FromSender,
    frame,
)
from hotbunk.rollout.errors import HotbunkError, TransferFailed, UpdateRefused

FAREWELL = 2.0  # seconds to get the last words out


class Peer:
    """One receiver rank. What it is told goes out in order, and nobody waits for it."""

    def __init__(self, channel: Channel, replica: Replica, rank: int) -> None:
        self.channel = channel
        self.replica = replica
        self.rank = rank
        self.reader: asyncio.Task[object] | None = None  # who listens to it
        self.accepted = False
        self.declined = False
        self.want: tuple[Want, ...] = ()
        self.mapped: Mapped | None = None  # its arena, where it is written in place
        self.places: Sequence[tuple[int, ...]] = ()
        self.member: Member | None = None
        self.sent = 0  # buckets
        self.acked = 0
        self.complete = False  # it was told the end
        self.voted = False
        self.progress = time.monotonic()  # when it last did something
        self._outbox: asyncio.Queue[tuple[bytes, int | None] | None] = asyncio.Queue()
        self._idle = True
        self._writer = asyncio.create_task(self._write())

    @property
    def where(self) -> str:
        """For errors."""
        return f"replica {self.replica.number}, rank {self.rank}"

    def owes(self) -> bool:
        """Whether it is its turn."""
        member = self.member
        if member is None or self.complete:
            return member is not None and self.acked < self.sent
        return self.acked < self.sent or not member.granted

    def tell(self, message: FromSender | bytes, fd: int | None = None) -> None:
        """Send a message (or a frame made before), after all that were told before."""
        data = message if isinstance(message, bytes) else frame(message)
        self._outbox.put_nowait((data, fd))

    def beat(self) -> None:
        """Say that the sender lives, unless it is saying something anyway."""
        if self._idle and self._outbox.empty():
            self.tell(Beat())

    async def end(self) -> None:
        """Get out what was told, for a moment, and close."""
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


class Replica:
    """All ranks of one replica: accepted together, committed together, failed together."""

    def __init__(self, number: int, ranks: int) -> None:
        self.number = number
        self.ranks = ranks
        self.token = secrets.token_hex(16)
        self.peers: dict[int, Peer] = {}
        self.over = False
        self.served = False
        self.error: HotbunkError | None = None

    @property
    def ready(self) -> bool:
        """Every rank has accepted, or needs nothing."""
        return len(self.peers) == self.ranks and all(
            p.accepted or p.declined for p in self.peers.values()
        )

    @property
    def takers(self) -> list[Peer]:
        """Ranks that want the weights."""
        return [p for p in self.peers.values() if p.accepted]

    @property
    def unanimous(self) -> bool:
        """Every rank that wanted the weights has voted to commit."""
        return self.ready and all(p.voted for p in self.takers)

    def farewell(self, error: BaseException) -> Abort:
        """What its ranks are told when it fails."""
        refused = not self.served and isinstance(error, UpdateRefused)
        return Abort(Failure.of(error), refused)
