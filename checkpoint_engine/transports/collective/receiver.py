"""The receiving end of the collective transport."""

from __future__ import annotations

import asyncio

import msgspec
import torch

from hotbunk.checkpoint_engine.transports import tcp
from hotbunk.checkpoint_engine.transports.channel import Channel
from hotbunk.checkpoint_engine.transports.collective.groups import (
    DEVICES,
    Group,
    Kept,
)
from hotbunk.checkpoint_engine.transports.protocol import Full, Ready, Welcome, unpacked
from hotbunk.checkpoint_engine.transports.receiving import OPEN_WAIT, ReceivingTransfer, greet
from hotbunk.rollout.contract import ReceiverLayout, Ticket
from hotbunk.rollout.errors import SessionError, TransferFailed

MOST_KEPT = 8  # groups; the oldest are those of trainers that are gone
LARGEST = 1 << 40  # bytes; a bucket above this is a broken message
# Groups of this process's receiver ranks, by name and rank in the group.
_kept = Kept(MOST_KEPT)


class Way(msgspec.Struct, frozen=True, array_like=True):
    """:attr:`Go.data`: the group by which the bytes come; ``room`` is a bucket's size in bytes."""

    group: str
    generation: int
    rank: int
    size: int
    backend: str
    room: int
    store_port: int  # 0: the group exists already
    seconds: float  # for building it, and for each piece of work


def held() -> tuple[str, ...]:
    """Groups that this process could go on with."""
    return _kept.names()


class CollectiveTransfer(ReceivingTransfer):
    """One rank's end of one sync."""

    def __init__(self, channel: Channel, welcome: Welcome, ticket: Ticket, host: str) -> None:
        super().__init__(channel, welcome, ticket)
        self._host = host
        self._address = channel.local
        self._group: Group | None = None
        self._key: tuple[str, int] = ("", 0)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._seconds = self.stall
        self._declined = False

    @staticmethod
    async def open(ticket: Ticket) -> CollectiveTransfer:
        host, port, token = tcp.parse(ticket.address)
        sock = await tcp.connect(host, port, OPEN_WAIT)
        channel, welcome = await greet(sock, token, ticket, held())
        return CollectiveTransfer(channel, welcome, ticket, host)

    async def begin(self, data: bytes, fd: int | None, layout: ReceiverLayout | None) -> None:
        await super().begin(data, fd, layout)
        way = unpacked(data, Way)
        if not 0 < way.room <= LARGEST or way.backend not in DEVICES or way.seconds <= 0:
            raise TransferFailed(f"the sender's group makes no sense: {way}", where=self.where)
        self._seconds = way.seconds
        self._key = (way.group, way.rank)
        if way.store_port:
            await self._build(way)
        else:
            self._group = _kept.get(self._key)
            if self._group is None or self._group.generation != way.generation:
                raise SessionError(
                    f"group {way.group!r} (generation {way.generation}) is not initialised here",
                    where=self.where,
                )
        self._buffer = torch.empty(way.room, dtype=torch.uint8, device=DEVICES[way.backend])
        await self.say(Ready())

    async def _build(self, way: Way) -> None:
        group = self._group = Group(
            way.group,
            way.generation,
            way.rank,
            way.size,
            backend=way.backend,
            address=self._address,
        )
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            group.executor, group.init, self._host, way.store_port, way.seconds
        )
        _kept.put(self._key, group)

    async def lend(self, full: Full) -> torch.Tensor:
        step = f"bucket {full.number}"
        if not 0 <= full.used <= self._buffer.numel():
            raise TransferFailed(
                f"{step} has {full.used} bytes of {self._buffer.numel()}", where=self.where
            )
        data = self._buffer[: full.used]
        if full.used:
            group = self._group
            assert group is not None
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(group.executor, group.broadcast, data, self._seconds)
            try:
                await work
            except TransferFailed as error:
                raise error.at(f"{self.where}, {step}") from error
        return data

    async def decline(self) -> None:
        self._declined = True  # nothing of a group was used
        await super().decline()

    async def finish(self) -> None:
        """A group whose sync broke off may be in the middle of a piece of work."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        group, self._group = self._group, None
        if group is not None and not (self._declined or self.ended):
            _kept.drop(self._key)
            group.close()
