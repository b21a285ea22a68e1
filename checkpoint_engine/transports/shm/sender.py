"""The sending end: one offer to many replicas, in the trainer's process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hotbunk.checkpoint_engine import layout
from hotbunk.checkpoint_engine.layout import Want
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports import unix
from hotbunk.checkpoint_engine.transports.parties import Member, Party
from hotbunk.checkpoint_engine.transports.protocol import HALVES, Accept, Go, packed, unpacked
from hotbunk.checkpoint_engine.transports.shm.memory import Halves, Mapped, Memory
from hotbunk.checkpoint_engine.transports.shm.protocol import Arena, Way
from hotbunk.checkpoint_engine.transports.streams import Plans, Stream, Taker
from hotbunk.checkpoint_engine.transports.walking import Link, WalkingOffer
from hotbunk.rollout.contract import Manifest, ReceiverLayout
from hotbunk.rollout.errors import TransferFailed, UpdateRefused

IN_PLACE_WINDOW = 8  # buckets written ahead of a receiver's acknowledgement; they take no memory
IN_PLACE_BUCKETS = 8  # and for the same reason they are that many times as large


class Sender:
    """What a transport keeps from sync to sync."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.memory = Memory()
        self.plans: list[Plans] = []
        unix.sweep_all(directory)

    def plans_for(self, count: int) -> list[Plans]:
        """One for each stream, in their order."""
        self.plans += [Plans() for _ in range(count - len(self.plans))]
        del self.plans[count:]
        return self.plans


class ShmLink(Link):
    """One rank. ``mapped`` is its arena, where it is written in place."""

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


class ShmOffer(WalkingOffer[ShmLink]):
    """See :class:`~hotbunk.checkpoint_engine.transports.walking.WalkingOffer`."""

    some_may_decline = True

    def __init__(
        self,
        sender: Sender,
        source: WeightSource,
        manifest: Manifest,
        ranks: Sequence[int],
        deadline: float,
        stall: float,
    ) -> None:
        door = unix.UnixDoor(sender.directory)
        super().__init__("shm", door, source, manifest, ranks=ranks, deadline=deadline, stall=stall)
        self._sender = sender
        # Arenas of ranks that can be written in place, with the places of what they want.
        self._arenas: dict[Member, tuple[Mapped, tuple[tuple[int, ...], ...]]] = {}

    def examine(self, member: Member, said: Accept, fd: int | None) -> None:
        try:
            super().examine(member, said, None)
            if fd is not None and said.layout is not None:
                self._look_at_arena(member, said.layout, said.data, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _look_at_arena(self, member: Member, wanted: ReceiverLayout, data: bytes, fd: int) -> None:
        """:raises UpdateRefused: the layout does not fit the arena."""
        try:
            arena = unpacked(data, Arena)
        except TransferFailed as error:
            raise UpdateRefused(error.what) from error
        if arena.kind != "file":
            return
        places = layout.places_in(self.manifest.tensors, member.want, wanted, arena.nbytes)
        if places is not None:
            self._arenas[member] = (self._sender.memory.arena(fd, arena.nbytes), places)

    async def links(self, party: Party) -> list[ShmLink]:
        return [
            ShmLink(party, member, *self._arenas.get(member, (None, ()))) for member in party.takers
        ]

    async def streams(
        self, by_want: Mapping[tuple[Want, ...], list[ShmLink]]
    ) -> dict[Stream, list[ShmLink]]:
        batch = self.manifest.bucket_bytes
        # A stream needs memory of its own if anybody needs a bucket with bytes in it.
        packs = [any(link.mapped is None for link in links) for links in by_want.values()]
        rooms = [
            layout.room(batch * (1 if pack else IN_PLACE_BUCKETS), want)
            for pack, want in zip(packs, by_want, strict=True)
        ]
        needed = [room for room, pack in zip(rooms, packs, strict=True) if pack]
        halves = iter(await asyncio.to_thread(self._sender.memory.halves, needed))
        found = {}
        for (want, links), room, pack in zip(by_want.items(), rooms, packs, strict=True):
            mine = next(halves) if pack else None
            for link in links:
                link.halves = mine
            tensors = [half[:room] for half in mine.tensors()] if mine else []
            stream = Stream(want, room, [link.taker for link in links], tensors, batch=batch)
            found[stream] = links
        return found

    def plans(self, count: int) -> list[Plans]:
        return self._sender.plans_for(count)

    def go(self, link: ShmLink) -> None:
        (member,) = link.members
        if link.mapped is not None:
            member.tell(Go(packed(Way(True, 0))))
        else:
            assert link.halves is not None
            member.tell(Go(packed(Way(False, link.halves.room))), link.halves.fd)

    async def release(self) -> None:
        await super().release()
        # Who failed may be gone, and its arena's pages would stay with this process.
        fine = [link.mapped for link in self._links if link.party.failure is None]
        self._sender.memory.keep([mapped for mapped in fine if mapped is not None])
        self._arenas.clear()
        for link in self._links:  # an exception's frames may hold it for long
            link.mapped = link.taker.target = None
