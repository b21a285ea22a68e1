"""The receiving end of the collective transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import msgspec
import torch

from hotbunk.checkpoint_engine.transports.collective.groups import (
    DEVICES,
    Group,
    Kept,
)
from hotbunk.checkpoint_engine.transports.control import Ack, Channel, End, Full, Ready, Welcome
from hotbunk.checkpoint_engine.transports.receiving import ReceivingTransfer, connect
from hotbunk.rollout.contract import Bucket, BucketEntry, ReceiverLayout, Ticket
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
        self._begun = self._whole = False
        self._fingerprints: Mapping[str, int] = {}

    @staticmethod
    async def open(ticket: Ticket) -> CollectiveTransfer:
        channel, welcome = await connect(ticket, held())
        return CollectiveTransfer(channel, welcome, ticket, ticket.address.rpartition(":")[0])

    async def begin(self, data: bytes, layout: ReceiverLayout | None) -> None:
        try:
            way = msgspec.msgpack.decode(data, type=Way)
        except msgspec.DecodeError as error:
            raise TransferFailed(f"the sender named no group: {error}") from error
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
        host = self._host.strip("[]")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(group.executor, group.init, host, way.store_port, way.seconds)
        _kept.put(self._key, group)

    async def buckets(self) -> AsyncIterator[Bucket]:
        if self._group is None:
            raise SessionError("buckets were asked for before the update was accepted")
        if self._begun:
            raise SessionError("the buckets of this update were taken before")
        self._begun = True
        loop = asyncio.get_running_loop()
        number = 0
        while True:
            step = f"bucket {number}"
            said = await self.hear(step)
            if isinstance(said, End):
                self._fingerprints = said.fingerprints
                break
            if not isinstance(said, Full):
                raise self.over(said, step, TransferFailed)
            if said.number != number or not 0 <= said.used <= self._buffer.numel():
                raise TransferFailed(
                    f"bucket {said.number} of {said.used} bytes is out of turn",
                    where=f"{self.where}, {step}",
                )
            data = self._buffer[: said.used]
            if said.used:
                work = loop.run_in_executor(
                    self._group.executor, self._group.broadcast, data, self._seconds
                )
                try:
                    await work
                except TransferFailed as error:
                    raise error.at(f"{self.where}, {step}") from error
            yield Bucket(data, tuple(BucketEntry(*piece) for piece in said.entries))
            await self.say(Ack(number))
            number += 1
        self._whole = True

    async def fingerprints(self) -> Mapping[str, int]:
        return self._fingerprints

    async def decline(self) -> None:
        self._whole = True  # nothing of a group was used
        await super().decline()

    async def finish(self) -> None:
        """A group whose sync broke off may be in the middle of a piece of work."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        group, self._group = self._group, None
        if group is not None and not self._whole:
            _kept.drop(self._key)
            group.close()
