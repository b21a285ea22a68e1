"""The trainer's ranks, as a sync sees them: what they hold, and the offer that rank 0 makes of it.

The manager is elsewhere (in verl's driver); it asks all ranks the same thing at the same time, in
bytes. Rank 0's offer is the transport's own. When it is served, the others walk with it: gathering
sharded weights takes part of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hotbunk.checkpoint_engine.ranks import Led, OneRank, StoreRanks, TrainerRanks, follow
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports.base import Offer, Transport
from hotbunk.rollout import registry
from hotbunk.rollout.contract import Manifest, TensorSpec, Ticket
from hotbunk.rollout.errors import SessionError, UsageError, closest
from hotbunk.rollout.process.messages import encode
from hotbunk.rollout.process.wire_errors import to_wire
from hotbunk.trainer_hooks.verl.handle import Answer

HOST = "127.0.0.1"
WEIGHTS, ADAPTERS = "weights", "adapter"  # parts


class Begin(msgspec.Struct, frozen=True):
    """Make the transport; rank 0 of several also a store, for the others to hear it by."""

    transport: str
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    deadline: float = 600.0
    host: str = HOST


class Meet(msgspec.Struct, frozen=True):
    """Where rank 0's store is."""

    host: str
    port: int


class Describe(msgspec.Struct, frozen=True):
    """What ``part`` of the weights is: names, shapes, types, and what an engine must know of it."""

    part: str


class Described(msgspec.Struct, frozen=True):
    """The answer to :class:`Describe`."""

    specs: tuple[TensorSpec, ...]
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)


class MakeOffer(msgspec.Struct, frozen=True):
    """Put ``part`` on offer, number ``number``, to replicas of so many ranks each."""

    number: int
    part: str
    manifest: Manifest
    ranks: tuple[int, ...]
    deadline: float


class Serve(msgspec.Struct, frozen=True):
    """Send what is on offer, until every replica has all of it or is out."""


class Drop(msgspec.Struct, frozen=True):
    """That replica of the offer will not come."""

    replica: int


class Close(msgspec.Struct, frozen=True):
    """The offer ends."""


class LetGo(msgspec.Struct, frozen=True):
    """Give the device's memory back."""


class Part(msgspec.Struct, frozen=True):
    """A part of the weights: where it comes from, and what an engine must know of it."""

    source: WeightSource
    metadata: Callable[[], Mapping[str, Any]]


class Sending:
    """One trainer rank. Each verb is a message of this module.

    :param let_go: gives the device's memory back.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        let_go: Callable[[], None],
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._parts = parts
        self._letting_go = let_go
        self._rank, self._world = rank, world
        self._told: Begin | None = None
        self._store: Any = None
        self._meet: Meet | None = None
        self._transport: Transport | None = None
        self._offer: Offer | None = None
        self._led: Led | None = None
        self._ranks: TrainerRanks = OneRank()
        self._following: WeightSource | None = None

    async def answer(self, verb: str, args: bytes) -> bytes:
        """Do what a message asks; what came of it, encoded."""
        try:
            kind, act = self._verbs()[verb]
            value = await act(msgspec.msgpack.decode(args, type=kind))
            return encode(Answer(value=msgspec.Raw(encode(value))))
        # A boundary between processes: whatever is raised goes to who asked.
        except Exception as error:  # noqa: BLE001
            return encode(Answer(error=to_wire(verb, error)))

    def _verbs(self) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
        return {
            "begin": (Begin, self.begin),
            "meet": (Meet, self.meet),
            "describe": (Describe, self.describe),
            "offer": (MakeOffer, self.offer),
            "serve": (Serve, self.serve),
            "drop": (Drop, self.drop),
            "close": (Close, self.close),
            "let_go": (LetGo, self.let_go),
        }

    @property
    def _leads(self) -> bool:
        return self._rank == 0

    # -- once ---------------------------------------------------------------------------------

    async def begin(self, told: Begin) -> Meet | None:
        """Idempotent for the same message: several managers may share these ranks."""
        if self._told is not None and self._told != told:
            raise SessionError(f"these trainer ranks send by {self._told.transport} already")
        if self._told is None and self._leads:
            made = registry.load_transport(told.transport)
            self._transport = made(**told.options)
        self._told = told
        if self._leads and self._world > 1 and self._store is None:
            from hotbunk.checkpoint_engine.transports.collective.groups import open_store

            self._store, port = open_store(told.host, told.deadline)
            self._meet = Meet(told.host, port)
        return self._meet

    async def meet(self, where: Meet) -> None:
        """The others reach rank 0's store."""
        if not self._leads and self._store is None:
            from hotbunk.checkpoint_engine.transports.collective.groups import join_store

            assert self._told is not None
            self._store = await asyncio.to_thread(
                join_store, where.host, where.port, self._told.deadline
            )

    # -- a sync -------------------------------------------------------------------------------

    async def describe(self, told: Describe) -> Described:
        """All ranks walk the first time: engines know no names beforehand."""
        part = self._part(told.part)
        specs = await asyncio.to_thread(part.source.specs)
        return Described(specs, dict(part.metadata()))

    async def offer(self, told: MakeOffer) -> tuple[Ticket, ...]:
        """Rank 0's tickets; the others get ready to walk with it."""
        source = self._part(told.part).source
        if self._offer is not None or self._following is not None:
            raise SessionError("the last offer is still open")
        if self._world > 1:
            # Numbered: words of a sync that broke off are never heard in the next one.
            assert self._told is not None
            self._ranks = StoreRanks(
                self._store,
                self._rank,
                self._world,
                deadline=told.deadline,
                prefix=f"hotbunk/{told.number}",
            )
        if not self._leads:
            self._following = source
            return ()
        if self._transport is None:
            raise SessionError("begin comes before offer")
        self._led = Led(self._ranks)
        self._offer = await self._transport.offer(
            self._led.source(0, source), told.manifest, ranks=told.ranks, deadline=told.deadline
        )
        return self._offer.tickets

    async def serve(self, told: Serve) -> None:
        if self._following is not None:
            await follow([self._following], self._ranks, None)
            return
        if self._offer is None or self._led is None:
            raise SessionError("there is no offer to serve")
        word = "was stopped"
        try:
            await self._offer.serve()
            word = "ended"
        finally:
            await asyncio.to_thread(self._led.end, word)

    async def drop(self, told: Drop) -> None:
        if self._offer is not None:
            await self._offer.drop(told.replica)

    async def close(self, told: Close) -> None:
        """Idempotent."""
        offer, self._offer, self._following = self._offer, None, None
        if offer is not None:
            await offer.close()

    async def let_go(self, told: LetGo) -> None:
        await asyncio.to_thread(self._letting_go)

    def _part(self, name: str) -> Part:
        if name not in self._parts:
            raise UsageError(f"there is no part {name!r}{closest(name, self._parts)}")
        return self._parts[name]
