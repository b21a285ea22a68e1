"""The sending end of the collective transport."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from hotbunk.checkpoint_engine import layout
from hotbunk.checkpoint_engine.layout import Want
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports.collective.groups import DEVICES, Group
from hotbunk.checkpoint_engine.transports.collective.receiver import Way
from hotbunk.checkpoint_engine.transports.parties import Member, Party
from hotbunk.checkpoint_engine.transports.protocol import (
    HALVES,
    Ack,
    Go,
    Ready,
    Vote,
    packed,
)
from hotbunk.checkpoint_engine.transports.streams import Stream, Taker
from hotbunk.checkpoint_engine.transports.tcp import TcpDoor
from hotbunk.checkpoint_engine.transports.walking import Link, Packed, WalkingOffer
from hotbunk.rollout.contract import Manifest
from hotbunk.rollout.errors import DeadlineExceeded, TransferFailed

if TYPE_CHECKING:
    from hotbunk.checkpoint_engine.transports.collective import CollectiveTransport

Key = tuple[int, tuple[tuple[str, int], ...]]


class GroupLink(Link):
    """Ranks of one replica that want the same bytes, and the group that they share with us."""

    def __init__(self, party: Party, members: Sequence[Member], want: tuple[Want, ...]) -> None:
        super().__init__(party, members, want, Taker(HALVES))
        self.taker.granted = HALVES
        self.nth = 0  # among links to the very same ranks: one process may hold several replicas
        self.group: Group | None = None
        self.halves: list[torch.Tensor] = []
        # Buckets that are packed, then the last message.
        self.due: asyncio.Queue[Packed | bytes] = asyncio.Queue()

    @property
    def key(self) -> Key:
        """Whom the group is for: the same processes, in the same places."""
        return self.nth, tuple((m.process, m.rank) for m in self.members)

    def tell(self, data: bytes) -> None:
        for member in self.members:
            member.tell(data)


class CollectiveOffer(WalkingOffer[GroupLink]):
    """Serves each replica by groups of its own, so that what breaks one breaks no other."""

    def __init__(
        self,
        transport: CollectiveTransport,
        source: WeightSource,
        manifest: Manifest,
        *,
        ranks: Sequence[int],
        deadline: float,
        stall: float,
    ) -> None:
        super().__init__(
            "collective",
            TcpDoor(transport.address),
            source,
            manifest,
            ranks=ranks,
            deadline=deadline,
            stall=stall,
        )
        self._transport = transport
        self._known: Counter[Key] = Counter()

    async def links(self, party: Party) -> list[GroupLink]:
        """The replica's ranks by what they want, each in a group: kept ones, or new ones."""
        by_want: dict[tuple[Want, ...], list[Member]] = {}
        for member in party.takers:
            by_want.setdefault(member.want, []).append(member)
        links = [GroupLink(party, members, want) for want, members in by_want.items()]
        seconds = min(self.stall, max(self.left, 0.001))
        building: list[asyncio.Future[None]] = []
        for link in links:
            link.nth = self._known[link.key]
            self._known[0, link.key[1]] += 1
            group, fresh = self._transport.group_for(link)
            link.group = group
            store_port = self._transport.store_port
            room = layout.room(self.manifest.bucket_bytes, link.want)
            for place, member in enumerate(link.members, 1):
                way = Way(
                    group.name,
                    group.generation,
                    place,
                    group.size,
                    group.backend,
                    room,
                    store_port if fresh else 0,
                    seconds,
                )
                member.tell(Go(packed(way)))
            if fresh:
                init = partial(group.init, self._transport.address, store_port, seconds)
                loop = asyncio.get_running_loop()
                building.append(loop.run_in_executor(group.executor, init))
                building[-1].add_done_callback(_seen)
        for one in building:  # each ends by itself, a little after its deadline at worst
            if not await party.wait(asyncio.wait({one}), seconds + self.stall):
                raise DeadlineExceeded("building a group", seconds)
            one.result()
        await party.hear("building groups", seconds, Ready)
        return links

    async def streams(
        self, by_want: Mapping[tuple[Want, ...], list[GroupLink]]
    ) -> dict[Stream, list[GroupLink]]:
        device = DEVICES[self._transport.backend]
        found = {}
        for want, links in by_want.items():
            room = layout.room(self.manifest.bucket_bytes, want)
            halves = [torch.empty(room, dtype=torch.uint8, device=device) for _ in range(HALVES)]
            for link in links:
                link.halves = halves
            found[Stream(want, room, [link.taker for link in links], halves)] = links
        return found

    def filled(self, link: GroupLink, bucket: Packed) -> None:
        link.due.put_nowait(bucket)

    def ended(self, link: GroupLink, end: bytes) -> None:
        link.due.put_nowait(end)

    async def lead(self, link: GroupLink) -> None:
        """All of a group take part in a broadcast at once, so there is one bucket at a time."""
        party = link.party
        while True:
            item: list[Packed | bytes] = []

            async def take(item: list[Packed | bytes] = item) -> None:
                item.append(await link.due.get())

            if not await party.wait(take(), self.left):
                raise DeadlineExceeded("the source", self._deadline)
            due = item[0]
            if isinstance(due, bytes):
                break
            await self._broadcast(link, due)
            for ack in await party.hear(
                f"bucket {due.number}", self.stall, Ack, members=link.members
            ):
                if not isinstance(ack, Ack) or ack.number != due.number:
                    raise TransferFailed(f"{ack} is out of turn", where=f"bucket {due.number}")
            link.acked = due.number + 1
            self.grant(link)
        link.tell(due)
        await party.hear("commit", self.left, Vote, members=link.members)

    async def _broadcast(self, link: GroupLink, due: Packed) -> None:
        link.tell(due.full)
        if not due.used:
            return
        group = link.group
        assert group is not None
        data = link.halves[due.number % HALVES][: due.used]
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(group.executor, group.broadcast, data, self.stall)
        work.add_done_callback(_seen)
        if not await link.party.wait(asyncio.wait({work}), self.stall * 2):
            raise TransferFailed(f"a broadcast hangs (bucket {due.number})")
        try:
            work.result()
        except TransferFailed as error:
            raise error.at(f"bucket {due.number}") from error

    async def release(self) -> None:
        await super().release()
        for party in self.parties:
            if not party.committed:
                self._transport.forget(party)


def _seen(work: asyncio.Future[None]) -> None:
    """Nobody waits any more for the work of a replica that left; how it ended is no news."""
    if not work.cancelled():
        work.exception()
