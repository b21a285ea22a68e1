"""Offers whose replicas are served by walks of the source: who is ready goes together."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from hotbunk.checkpoint_engine import layout
from hotbunk.checkpoint_engine.bucket import check_bucket_bytes
from hotbunk.checkpoint_engine.layout import Want
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports.base import Door
from hotbunk.checkpoint_engine.transports.offering import NegotiatedOffer
from hotbunk.checkpoint_engine.transports.parties import Member, Party, out_of_turn
from hotbunk.checkpoint_engine.transports.protocol import Accept, Ack, End, Full, Ready, Vote, frame
from hotbunk.checkpoint_engine.transports.streams import Plans, Stream, Taker
from hotbunk.checkpoint_engine.transports.walk import Stopped, Walk
from hotbunk.rollout.contract import BucketEntry, Manifest
from hotbunk.rollout.errors import DeadlineExceeded, HotbunkError, TransferFailed

log = logging.getLogger(__name__)
CLOSE_WAIT = 30.0  # seconds to wait for a source that was cut off in the middle of a tensor
QUIET_WAIT = 5.0  # seconds for the copies under way to end


class Packed(NamedTuple):
    """A bucket that is complete. ``full`` is its message as a frame, made once for everyone."""

    number: int
    used: int
    full: bytes


class Link:
    """Ranks of one replica that get the same buckets together, and how far they are."""

    def __init__(
        self, party: Party, members: Sequence[Member], want: tuple[Want, ...], taker: Taker
    ) -> None:
        self.party = party
        self.members = list(members)
        self.want = want
        self.taker = taker
        self.sent = 0  # buckets
        self.acked = 0
        self.complete = False  # it was told the end
        self.progress = time.monotonic()  # when it last did something

    @property
    def where(self) -> str:
        """For errors."""
        ranks = ", ".join(str(m.rank) for m in self.members)
        return f"replica {self.party.replica}, rank {ranks}"

    def owes(self) -> bool:
        """Whether it is its turn."""
        return self.acked < self.sent or not (self.complete or self.taker.granted)


L = TypeVar("L", bound=Link)


class WalkingOffer(NegotiatedOffer, Generic[L]):
    """Replicas that have accepted are served together, in one walk of the source.

    One that comes later than ``stall`` seconds after the first gets a walk of its own. A rank that
    takes no bucket for ``stall`` seconds is left out.

    :raises ConfigError: the bucket size cannot work.
    """

    def __init__(
        self,
        name: str,
        door: Door,
        source: WeightSource,
        manifest: Manifest,
        *,
        ranks: Sequence[int],
        deadline: float,
        stall: float,
    ) -> None:
        try:
            check_bucket_bytes(manifest.bucket_bytes)
        except BaseException:
            door.close()
            raise
        super().__init__(name, door, manifest, ranks=ranks, deadline=deadline, stall=stall)
        self._source = source
        self._walk: Walk | None = None
        self._walking: asyncio.Future[None] | None = None
        self._links: list[L] = []

    # -- for transports -----------------------------------------------------------------------

    @abstractmethod
    async def links(self, party: Party) -> list[L]:
        """The replica has accepted: how its ranks are reached.

        :raises HotbunkError: they cannot be.
        """

    @abstractmethod
    async def streams(self, by_want: Mapping[tuple[Want, ...], list[L]]) -> dict[Stream, list[L]]:
        """A stream for everyone who wants the same.

        :raises HotbunkError: there is no memory for it; the sync ends.
        """

    def examine(self, member: Member, said: Accept, fd: int | None) -> None:
        """:meth:`look_at`, in a thread: layouts may be large.

        :raises UpdateRefused: the layout does not fit the offer.
        """
        if fd is not None:
            os.close(fd)
        member.want = layout.wants(self.manifest.tensors, said.layout)

    def plans(self, count: int) -> list[Plans]:
        """One for each stream, in their order."""
        return [Plans() for _ in range(count)]

    def go(self, link: L) -> None:
        """Its stream is there: tell the ranks what they must know.

        :raises HotbunkError: this replica cannot be told.
        """

    def written(self) -> None:
        """A bucket's copies were given out; called in the walk's thread. Others read it next."""

    def filled(self, link: L, bucket: Packed) -> None:
        """A bucket is complete."""
        if not link.owes():
            link.progress = time.monotonic()
        link.sent += 1
        for member in link.members:
            member.tell(bucket.full)

    def ended(self, link: L, end: bytes) -> None:
        """That was the last one; ``end`` is the message as a frame."""
        link.complete = True
        for member in link.members:
            member.tell(end)

    async def lead(self, link: L) -> None:
        """One link, from its first bucket to its vote. This one is for links of one rank each.

        :raises HotbunkError: it failed; its replica is out.
        """
        (member,) = link.members
        while True:
            said = await member.next()
            link.progress = time.monotonic()
            match said:
                case Ready() if not link.taker.granted:
                    self.grant(link)
                case Ack() if said.number == link.acked < link.sent:
                    link.acked += 1
                    self.grant(link)
                case Vote() if link.complete and link.acked == link.sent:
                    return
                case _:
                    raise out_of_turn(said, member.rank)

    def grant(self, link: L) -> None:
        """It has room for as many buckets as its window holds."""
        if self._walk is not None:
            self._walk.grant(link.taker, link.acked + link.taker.window)

    # -- NegotiatedOffer ----------------------------------------------------------------------

    async def look_at(self, member: Member, said: Accept, fd: int | None) -> None:
        await asyncio.to_thread(self.examine, member, said, fd)

    def look(self) -> None:
        now = time.monotonic()
        for link in self._links:
            if link.party.alive and link.owes() and now - link.progress > self.stall:
                silent = TransferFailed(f"took no bucket for {self.stall:g} s", where=link.where)
                link.party.leave(silent)

    async def still(self, party: Party) -> None:
        walk = self._walk
        in_place = any(one.taker.target is not None for one in self._links if one.party is party)
        if walk is not None and in_place and not await asyncio.to_thread(walk.quiet, QUIET_WAIT):
            log.error("replica %d: a copy into its memory still runs", party.replica)

    async def release(self) -> None:
        if self._walk is not None:
            self._walk.stop()
        await self._walked()

    async def run(self) -> None:
        waiting = {
            party: asyncio.ensure_future(self.each([party], self.agree)) for party in self.parties
        }
        leading: list[asyncio.Future[Any]] = []
        try:
            while waiting:
                await _wait(waiting.values(), self.left, asyncio.FIRST_COMPLETED)
                await _wait(waiting.values(), self.stall, asyncio.ALL_COMPLETED)
                ended = [party for party, one in waiting.items() if one.done()]
                ready = [p for p in ended if waiting.pop(p).result().get(p)]
                await self._round(ready, leading)
            await asyncio.gather(*leading)
        finally:
            for one in (*waiting.values(), *leading):
                one.cancel()

    # -- one walk -----------------------------------------------------------------------------

    async def _round(self, ready: Sequence[Party], leading: list[asyncio.Future[Any]]) -> None:
        """Serve these replicas in one walk of the source; their votes may take longer."""
        found = await self.each(ready, self.links)
        links = [link for some in found.values() for link in some]
        if not links:
            return
        self._links += links
        await self._walked()
        by_want: dict[tuple[Want, ...], list[L]] = {}
        for link in links:
            by_want.setdefault(link.want, []).append(link)
        streams = await self.streams(by_want)
        walk = self._walk = Walk(
            self.manifest.tensors,
            list(streams),
            self.plans(len(streams)),
            partial(self._full, asyncio.get_running_loop(), streams),
            fingerprints=self.manifest.fingerprint != "none",
            deadline=max(self.left, 0.0),
        )
        for link in links:
            link.party.on_leave(partial(walk.leave, link.taker))
            link.progress = time.monotonic()
            if link.party.alive:
                try:
                    self.go(link)
                except HotbunkError as error:
                    link.party.leave(error.at(link.where))
                link.party.moved = True
        leading += [asyncio.ensure_future(self.each([p], self._led)) for p in found]
        self._walking = asyncio.get_running_loop().run_in_executor(None, walk.run, self._source)
        try:
            done, _ = await asyncio.wait({self._walking}, timeout=max(self.left, 0.0))
            if not done:
                raise DeadlineExceeded("the source", self._deadline)
            self._walking.result()
        except Stopped:  # nobody is left who wants it, and all were told why
            return
        finally:
            walk.stop()
        for stream, served in streams.items():
            end = frame(End(walk.fingerprints(stream)))
            for link in served:
                if link.party.alive:
                    self.ended(link, end)

    def _full(
        self,
        loop: asyncio.AbstractEventLoop,
        streams: dict[Stream, list[L]],
        stream: Stream,
        number: int,
        used: int,
        entries: tuple[BucketEntry, ...],
    ) -> None:
        """A bucket is packed; called in the walk's thread."""
        self.written()
        pieces = tuple((e.index, e.start, e.nbytes, e.offset) for e in entries)
        bucket = Packed(number, used, frame(Full(number, used, pieces)))
        loop.call_soon_threadsafe(self._filled, streams[stream], bucket)

    def _filled(self, links: Sequence[L], bucket: Packed) -> None:
        for link in links:
            if link.party.alive:
                self.filled(link, bucket)

    async def _led(self, party: Party) -> None:
        """One replica, from its first bucket to its commit."""
        await asyncio.gather(*(self.lead(link) for link in self._links if link.party is party))
        party.commit()

    async def _walked(self) -> None:
        """A walk cannot be cut off, and reads what the trainer may take away once this returns."""
        if self._walking is None:
            return
        done, _ = await asyncio.wait({self._walking}, timeout=CLOSE_WAIT)
        if not done:
            log.error("a source still hangs %g s after its sync ended", CLOSE_WAIT)
            return
        if not self._walking.cancelled():
            self._walking.exception()  # told to every receiver, and raised by serve
        if self._walk is not None:
            self._walk.forget()
        self._walking = None


async def _wait(tasks: Iterable[asyncio.Future[Any]], seconds: float, until: str) -> None:
    await asyncio.wait(list(tasks), timeout=max(seconds, 0.0), return_when=until)
