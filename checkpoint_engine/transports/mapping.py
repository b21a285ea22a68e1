"""The sending end where sender and receiver map one another's memory: see ``mapped.py``."""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from hotbunk.checkpoint_engine import layout
from hotbunk.checkpoint_engine.layout import Want
from hotbunk.checkpoint_engine.transports.mapped import Arena, Way
from hotbunk.checkpoint_engine.transports.parties import Member, Party
from hotbunk.checkpoint_engine.transports.protocol import HALVES, Accept, Go, packed, unpacked
from hotbunk.checkpoint_engine.transports.streams import Stream, Taker
from hotbunk.checkpoint_engine.transports.walking import Link, WalkingOffer
from hotbunk.rollout.contract import ReceiverLayout
from hotbunk.rollout.errors import TransferFailed, UpdateRefused

IN_PLACE_WINDOW = 8  # buckets written ahead of a receiver's acknowledgement; they take no memory
IN_PLACE_BUCKETS = 8  # and for the same reason they are that many times as large


class Mapped(Protocol):
    """A receiver's arena in this process."""

    tensor: torch.Tensor


class Halves(Protocol):
    """Memory for two buckets of ``room`` bytes."""

    room: int

    def tensors(self) -> list[torch.Tensor]:
        """The halves, as flat tensors of bytes."""
        ...


class MappedLink(Link):
    """One rank. ``mapped`` is its arena, where it is written in place; else it reads ``halves``."""

    def __init__(
        self, party: Party, member: Member, mapped: Mapped | None, places: Sequence[tuple[int, ...]]
    ) -> None:
        if mapped is None:
            taker = Taker(HALVES)
            taker.granted = HALVES
        else:  # not written to before its receiver says so
            taker = Taker(IN_PLACE_WINDOW, mapped.tensor, places)
        super().__init__(party, [member], member.want, taker)
        self.mapped = mapped
        self.halves: Halves | None = None


class MappedOffer(WalkingOffer[MappedLink]):
    """See :class:`~hotbunk.checkpoint_engine.transports.walking.WalkingOffer`."""

    some_may_decline = True

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        # Arenas of ranks that can be written in place, with the places of what they want.
        self._arenas: dict[Member, tuple[Mapped, tuple[tuple[int, ...], ...]]] = {}

    # -- for transports -----------------------------------------------------------------------

    @abstractmethod
    def map_arena(self, arena: Arena, fd: int | None) -> Mapped | None:
        """A receiver's arena, in a thread; ``fd`` is closed when this returns. None: not this kind.

        :raises UpdateRefused: it is not what the receiver said.
        """

    @abstractmethod
    def make_halves(self, rooms: Sequence[int]) -> Sequence[Halves]:
        """Memory for as many streams, none of it smaller than asked for; in a thread.

        :raises MemoryFault: there is not so much.
        """

    def packed_bytes(self) -> int:
        """Most bytes of a bucket that is packed into a half; never more than the manifest's."""
        return self.manifest.bucket_bytes

    @abstractmethod
    def way(self, link: MappedLink, halves: Halves) -> tuple[Way, int | None]:
        """How a rank finds the halves, and a descriptor that stays open until :meth:`release`."""

    # -- WalkingOffer -------------------------------------------------------------------------

    def examine(self, member: Member, said: Accept, fd: int | None) -> None:
        try:
            super().examine(member, said, None)
            if said.data and said.layout is not None:
                self._look_at_arena(member, said.layout, said.data, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _look_at_arena(
        self, member: Member, wanted: ReceiverLayout, data: bytes, fd: int | None
    ) -> None:
        """:raises UpdateRefused: the layout does not fit the arena."""
        try:
            arena = unpacked(data, Arena)
        except TransferFailed as error:
            raise UpdateRefused(error.what) from error
        places = layout.places_in(self.manifest.tensors, member.want, wanted, arena.nbytes)
        mapped = None if places is None else self.map_arena(arena, fd)
        if places is not None and mapped is not None:
            self._arenas[member] = (mapped, places)

    async def links(self, party: Party) -> list[MappedLink]:
        return [
            MappedLink(party, member, *self._arenas.get(member, (None, ())))
            for member in party.takers
        ]

    async def streams(
        self, by_want: Mapping[tuple[Want, ...], list[MappedLink]]
    ) -> dict[Stream, list[MappedLink]]:
        batch = self.manifest.bucket_bytes
        # A stream needs memory of its own if anybody needs a bucket with bytes in it.
        packs = [any(link.mapped is None for link in links) for links in by_want.values()]
        rooms = [
            layout.room(self.packed_bytes() if pack else batch * IN_PLACE_BUCKETS, want)
            for pack, want in zip(packs, by_want, strict=True)
        ]
        needed = [room for room, pack in zip(rooms, packs, strict=True) if pack]
        halves = iter(await asyncio.to_thread(self.make_halves, needed))
        found = {}
        for (want, links), room, pack in zip(by_want.items(), rooms, packs, strict=True):
            mine = next(halves) if pack else None
            for link in links:
                link.halves = mine
            tensors = [half[:room] for half in mine.tensors()] if mine else []
            stream = Stream(want, room, [link.taker for link in links], tensors, batch=batch)
            found[stream] = links
        return found

    def go(self, link: MappedLink) -> None:
        (member,) = link.members
        way, fd = Way(True, 0), None
        if link.mapped is None:
            assert link.halves is not None
            way, fd = self.way(link, link.halves)
        member.tell(Go(packed(way)), fd)

    async def release(self) -> None:
        await super().release()
        self._arenas.clear()
        for link in self._links:  # an exception's frames may hold it for long
            link.mapped = link.halves = link.taker.target = None
