"""The sending end of the collective transport."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from hotbunk.checkpoint_engine import layout
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports.collective.groups import DEVICES, Group
from hotbunk.checkpoint_engine.transports.collective.receiver import Way
from hotbunk.checkpoint_engine.transports.control import Ack, End, Full, Go, Piece, Ready
from hotbunk.checkpoint_engine.transports.offering import Member, NegotiatedOffer, Party
from hotbunk.checkpoint_engine.transports.shm.packing import Member as Taker
from hotbunk.checkpoint_engine.transports.shm.packing import Plans, Stopped, Stream, Walk
from hotbunk.rollout.contract import BucketEntry, Manifest
from hotbunk.rollout.errors import DeadlineExceeded, TransferFailed

if TYPE_CHECKING:
    from hotbunk.checkpoint_engine.transports.collective import CollectiveTransport

HALVES = 2  # buckets: one is packed while one is sent
CLOSE_WAIT = 30.0  # seconds to wait for a source that was cut off in the middle of a tensor


class Link:
    """The ranks of one replica that want the same bytes, and the group that they share with us."""

    def __init__(
        self, party: Party, members: Sequence[Member], want: tuple[layout.Want, ...]
    ) -> None:
        self.party = party
        self.members = list(members)
        self.want = want
        self.nth = 0  # among links to the very same ranks: one process may hold several replicas
        self.taker = Taker(HALVES)
        self.taker.granted = HALVES
        self.group: Group | None = None
        self.halves: list[torch.Tensor] = []
        self.sums: dict[str, int] = {}  # fingerprints, when all was packed
        # Bucket, used bytes, table; None: that was all.
        self.full: asyncio.Queue[tuple[int, int, tuple[Piece, ...]] | None] = asyncio.Queue()

    @property
    def key(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Whom the group is for: the same processes, in the same places."""
        return self.nth, tuple((m.process, m.rank) for m in self.members)


class CollectiveOffer(NegotiatedOffer):
    """Serves each replica by groups of its own, so that what breaks one breaks no other."""

    def __init__(
        self,
        transport: CollectiveTransport,
        source: WeightSource,
        manifest: Manifest,
        *,
        ranks: Sequence[int],
        deadline: float,
        address: str,
        stall: float,
    ) -> None:
        super().__init__(
            "collective",
            manifest,
            ranks=ranks,
            deadline=deadline,
            address=address,
            stall=stall,
        )
        self._transport = transport
        self._source = source
        self._walking: asyncio.Future[None] | None = None
        self._walk: Walk | None = None
        self._links: Counter[tuple[int, tuple[tuple[str, int], ...]]] = Counter()

    async def run(self) -> None:
        waiting = {
            party: asyncio.ensure_future(self.each([party], self.agree)) for party in self.parties
        }
        try:
            while waiting:
                await self._wait(waiting.values(), self.left, asyncio.FIRST_COMPLETED)
                # Who is much later than the first has a walk of its own.
                await self._wait(waiting.values(), self.stall, asyncio.ALL_COMPLETED)
                ended = [party for party, one in waiting.items() if one.done()]
                await self._round([p for p in ended if waiting.pop(p).result().get(p)])
        finally:
            for one in waiting.values():
                one.cancel()

    @staticmethod
    async def _wait(tasks: Iterable[asyncio.Future[Any]], seconds: float, until: str) -> None:
        await asyncio.wait(list(tasks), timeout=max(seconds, 0.0), return_when=until)

    async def _round(self, ready: Sequence[Party]) -> None:
        """Serve these replicas in one walk of the source."""
        linked = await self.each(ready, self._linked)
        links = [link for some in linked.values() for link in some]
        if not links:
            return
        await self._walk_ended()
        streams = self._streams(links)
        walk = self._walk = Walk(
            self.manifest.tensors,
            list(streams),
            [Plans() for _ in streams],
            partial(self._full, asyncio.get_running_loop(), streams),
            fingerprints=self.manifest.fingerprint != "none",
            deadline=max(self.left, 0.0),
        )
        for link in links:
            link.party.on_leave(partial(walk.leave, link.taker))
        self._walking = asyncio.get_running_loop().run_in_executor(None, walk.run, self._source)
        leading = asyncio.ensure_future(self.each(ready, partial(self._lead, links)))
        try:
            done, _ = await asyncio.wait({self._walking}, timeout=max(self.left, 0.0))
            if not done:
                raise DeadlineExceeded("the source", self._deadline)
            try:
                self._walking.result()
            except Stopped:  # nobody is left who wants it, and all were told why
                pass
            else:
                for stream, served in streams.items():
                    for link in served:
                        link.sums = walk.fingerprints(stream)
                        link.full.put_nowait(None)
            await leading
        finally:
            walk.stop()
            leading.cancel()

    # -- groups -------------------------------------------------------------------------------

    async def _linked(self, party: Party) -> list[Link]:
        """The replica's ranks by what they want, each in a group: kept ones, or new ones."""
        by_want: dict[tuple[layout.Want, ...], list[Member]] = {}
        for _, member in sorted(party.members.items()):
            want = layout.wants(self.manifest.tensors, member.layout)
            by_want.setdefault(want, []).append(member)
        links = [Link(party, members, want) for want, members in by_want.items()]
        seconds = min(self.stall, max(self.left, 0.001))
        building: list[asyncio.Future[None]] = []
        for link in links:
            link.nth = self._links[link.key]
            self._links[0, link.key[1]] += 1
            group, fresh = self._transport.group_for(link)
            link.group = group
            room = layout.room(self.manifest.bucket_bytes, link.want)
            for place, member in enumerate(link.members, 1):
                way = Way(
                    group.name,
                    group.generation,
                    place,
                    group.size,
                    group.backend,
                    room,
                    self._transport.store_port if fresh else 0,
                    seconds,
                )
                await member.channel.send(Go(msgspec.msgpack.encode(way)), self.stall)
            if fresh:
                building.append(
                    asyncio.get_running_loop().run_in_executor(
                        group.executor,
                        group.init,
                        self._transport.address,
                        self._transport.store_port,
                        seconds,
                    )
                )
        for one in building:  # each ends by itself, a little after its deadline at worst
            if not await party.wait(asyncio.wait({one}), seconds + self.stall):
                raise DeadlineExceeded("building a group", seconds)
            one.result()
        await party.hear("building groups", seconds, Ready)
        return links

    def _streams(self, links: Sequence[Link]) -> dict[Stream, list[Link]]:
        """Links that want the same bytes share what is packed."""
        by_want: dict[tuple[layout.Want, ...], list[Link]] = {}
        for link in links:
            by_want.setdefault(link.want, []).append(link)
        device = DEVICES[self._transport.backend]
        streams = {}
        for want, served in by_want.items():
            room = layout.room(self.manifest.bucket_bytes, want)
            halves = [torch.empty(room, dtype=torch.uint8, device=device) for _ in range(HALVES)]
            for link in served:
                link.halves = halves
            streams[Stream(want, room, [link.taker for link in served], halves)] = served
        return streams

    # -- bytes --------------------------------------------------------------------------------

    @staticmethod
    def _full(
        loop: asyncio.AbstractEventLoop,
        streams: dict[Stream, list[Link]],
        stream: Stream,
        number: int,
        used: int,
        entries: tuple[BucketEntry, ...],
    ) -> None:
        """A bucket is packed; called in the walk's thread."""
        pieces = tuple((e.index, e.start, e.nbytes, e.offset) for e in entries)
        for link in streams[stream]:
            loop.call_soon_threadsafe(link.full.put_nowait, (number, used, pieces))

    async def _lead(self, links: Sequence[Link], party: Party) -> None:
        """One replica, from its first bucket to its commit."""
        party.moved = True
        mine = [link for link in links if link.party is party]
        await asyncio.gather(*(self._send(link) for link in mine))
        await self.settle(party)

    async def _send(self, link: Link) -> None:
        party, group = link.party, link.group
        assert group is not None
        assert self._walk is not None
        loop = asyncio.get_running_loop()
        while True:
            item: list[tuple[int, int, tuple[Piece, ...]] | None] = []

            async def take(item: list[tuple[int, int, tuple[Piece, ...]] | None] = item) -> None:
                item.append(await link.full.get())

            if not await party.wait(take(), self.left):
                raise DeadlineExceeded("the source", self._deadline)
            if item[0] is None:
                break
            number, used, pieces = item[0]
            step = f"bucket {number}"
            await party.say(Full(number, used, pieces), link.members)
            if used:
                data = link.halves[number % HALVES][:used]
                work = loop.run_in_executor(group.executor, group.broadcast, data, self.stall)
                if not await party.wait(asyncio.wait({work}), self.stall * 2):
                    raise TransferFailed(f"a broadcast hangs ({step})")
                try:
                    work.result()
                except TransferFailed as error:
                    raise error.at(step) from error
            for ack in await party.hear(step, self.stall, Ack, members=link.members):
                if not isinstance(ack, Ack) or ack.number != number:
                    raise TransferFailed(f"{ack} is out of turn", where=step)
            self._walk.grant(link.taker, number + 1 + HALVES)
        await party.say(End(link.sums), link.members)

    async def release(self) -> None:
        if self._walk is not None:
            self._walk.stop()
        await self._walk_ended()
        for party in self.parties:
            if not party.committed:
                self._transport.forget(party)

    async def _walk_ended(self) -> None:
        """A walk cannot be cut off, and reads what the trainer may take away once this returns."""
        if self._walking is None:
            return
        done, _ = await asyncio.wait({self._walking}, timeout=CLOSE_WAIT)
        if done and not self._walking.cancelled():
            self._walking.exception()  # told to every receiver, and raised by serve
        if self._walk is not None:
            self._walk.forget()
        self._walking = None
