"""The sending end: one offer to many replicas, in the trainer's process."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotbunk.checkpoint_engine import layout
from hotbunk.checkpoint_engine.bucket import check_bucket_bytes
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports.base import Offer
from hotbunk.checkpoint_engine.transports.shm import address
from hotbunk.checkpoint_engine.transports.shm.memory import Halves, Memory
from hotbunk.checkpoint_engine.transports.shm.packing import Member, Plans, Stopped, Stream, Walk
from hotbunk.checkpoint_engine.transports.shm.peers import Peer, Replica
from hotbunk.checkpoint_engine.transports.shm.protocol import (
    HALVES,
    HELLO_BYTES,
    PROTOCOL,
    Abort,
    Accept,
    Ack,
    Channel,
    Committed,
    Decline,
    End,
    Failure,
    Full,
    Go,
    Hello,
    Pull,
    Vote,
    Welcome,
    frame,
    from_receiver,
)
from hotbunk.rollout.contract import BucketEntry, Manifest, Ticket
from hotbunk.rollout.errors import (
    DeadlineExceeded,
    HotbunkError,
    SessionError,
    TrainerFailed,
    TransferFailed,
    UpdateRefused,
)

log = logging.getLogger(__name__)
_FAREWELL = "farewell"  # the name of tasks that close a connection
HELLO_WAIT = 5.0  # seconds for somebody who connected to say who it is
CLOSE_WAIT = 30.0  # seconds to wait for a source that was cut off in the middle of a tensor
QUIET_WAIT = 5.0  # seconds for the copies under way to end
IN_PLACE_WINDOW = 8  # buckets written ahead of a receiver's acknowledgement; they take no memory
IN_PLACE_BUCKETS = 8  # and for the same reason they are that many times as large


class Sender:
    """What a transport keeps from sync to sync."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.memory = Memory()
        self.plans: list[Plans] = []
        address.sweep_all(directory)

    def plans_for(self, count: int) -> list[Plans]:
        """One for each stream, in their order."""
        self.plans += [Plans() for _ in range(count - len(self.plans))]
        del self.plans[count:]
        return self.plans


class ShmOffer(Offer):
    """See :class:`~hotbunk.checkpoint_engine.transports.base.Offer`.

    Replicas that are ready are served together, in one walk of the source; one that comes later
    than ``stall`` seconds after the first gets a walk of its own.
    """

    def __init__(
        self,
        sender: Sender,
        source: WeightSource,
        manifest: Manifest,
        ranks: Sequence[int],
        deadline: float,
        stall: float,
    ) -> None:
        check_bucket_bytes(manifest.bucket_bytes)
        if any(n < 1 for n in ranks):
            raise SessionError(f"every replica has a rank or more: {list(ranks)}")
        self.closed = False
        self._sender = sender
        self._source = source
        self._manifest = manifest
        self._deadline = deadline
        self._until = time.monotonic() + deadline
        self._stall = min(stall, deadline)
        self._replicas = [Replica(number, count) for number, count in enumerate(ranks)]
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._walk: Walk | None = None
        self._walking: asyncio.Future[None] | None = None
        self._failure: HotbunkError | None = None
        self._ready_since = 0.0
        self._welcome = frame(Welcome(manifest, self._stall))
        self._listener, self._home = address.listen(sender.directory)
        self.tickets = tuple(
            Ticket("shm", address.ticket_address(self._home, r.token), 0, r.ranks)
            for r in self._replicas
        )

    # -- the offer ----------------------------------------------------------------------------

    async def serve(self) -> None:
        if self.closed:
            raise SessionError("this offer was closed")
        self._begin(self._answer())
        self._begin(self._tick())
        while pending := [r for r in self._replicas if not r.over]:
            now = time.monotonic()
            if now >= self._until:
                late = DeadlineExceeded("the sync", self._deadline)
                for replica in pending:
                    self._fail(replica, late)
                break
            group = [r for r in pending if r.ready and not r.served]
            missing = [r for r in pending if not r.ready]
            if group and (not missing or now >= self._ready_since + self._stall):
                await self._round(group)
                if self._failure is not None:
                    raise self._failure
                continue
            wake = self._until if not group else min(self._until, self._ready_since + self._stall)
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(wake - now, 0)):
                    await self._changed.wait()

    async def drop(self, replica: int) -> None:
        self._fail(self._replicas[replica], TransferFailed("the replica was left out of the sync"))

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for replica in self._replicas:
            self._fail(replica, TransferFailed("the sender closed the offer"))
        if self._walk is not None:
            self._walk.stop()
        for task in self._tasks:
            if task.get_name() != _FAREWELL:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_WAIT)
        self._listener.close()
        address.remove(self._home)
        await self._walked()
        for peer in self._peers():
            await peer.cut()
        # Who failed may be gone, and its arena's pages would stay with this process.
        fine = [r for r in self._replicas if r.error is None]
        self._sender.memory.keep([p.mapped for r in fine for p in r.takers if p.mapped])
        for peer in self._peers():
            peer.mapped = None

    def _peers(self) -> list[Peer]:
        return [peer for replica in self._replicas for peer in replica.peers.values()]

    def _begin(self, work: Coroutine[Any, Any, None], name: str = "") -> None:
        task = asyncio.create_task(work, name=name or None)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- one receiver rank --------------------------------------------------------------------

    async def _answer(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # of a peer that left, or too many open files
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(0.05)
                continue
            self._begin(self._meet(Channel(sock)))

    async def _meet(self, channel: Channel) -> None:
        """One connection, from its hello to its end."""
        peer: Peer | None = None
        try:
            async with asyncio.timeout(HELLO_WAIT):
                peer = await self._known(channel)
            if peer is None:
                return
            peer.reader = asyncio.current_task()
            peer.tell(self._welcome)
            while not peer.replica.over and not peer.declined:
                await self._heard(peer)
        except TimeoutError:
            log.warning("somebody connected and said nothing for %g s", HELLO_WAIT)
        except HotbunkError as error:
            if peer is None:
                log.warning("a stranger was turned away: %s", error)
            else:
                self._fail(peer.replica, error.at(peer.where))
        finally:
            if peer is None:
                channel.close()

    async def _known(self, channel: Channel) -> Peer | None:
        """Who says hello, if it may. Others are told why not."""
        if channel.peer_uid != os.geteuid():
            raise TransferFailed(f"the peer is user {channel.peer_uid}")
        hello = await channel.receive(from_receiver, HELLO_BYTES)
        why = ""
        found = None
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
            why = f"protocol {PROTOCOL} begins with a hello"
        else:
            # Every token is compared, each in the same time: nothing is learnt from how long it takes.
            matching = [
                r
                for r in self._replicas
                if hmac.compare_digest(r.token.encode(), hello.token.encode())
            ]
            found = matching[0] if matching else None
            if found is None:
                why = "this is not a ticket of the sync on offer"
            elif not 0 <= hello.rank < found.ranks:
                why = f"there is no rank {hello.rank} of {found.ranks}"
            elif hello.rank in found.peers:
                why = f"rank {hello.rank} is here already"
            elif found.over:
                why = str(found.error or "the replica was left out of the sync")
        if why or found is None or not isinstance(hello, Hello):
            said = Abort(Failure.of(TransferFailed(why, remedy="ask for a new ticket")))
            if found is not None and found.error is not None:
                said = found.farewell(found.error)
            await channel.send(frame(said))
            return None
        peer = found.peers[hello.rank] = Peer(channel, found, hello.rank)
        return peer

    async def _heard(self, peer: Peer) -> None:
        """One message of a receiver. :raises TransferFailed: gone, or out of turn."""
        said = await peer.channel.receive(from_receiver)
        peer.progress = time.monotonic()
        replica, member = peer.replica, peer.member
        undecided = not peer.accepted and not peer.declined
        match said:
            case Abort():
                error = (TransferFailed if replica.served else UpdateRefused)(str(said.failure))
                error.remote_traceback = said.failure.traceback
                raise error
            case Accept() if undecided:
                await asyncio.to_thread(self._look_at, peer, said, peer.channel.claim())
                peer.accepted = True
            case Decline() if undecided:
                peer.declined = True
            case Pull() if member is not None and member.target is not None:
                self._grant(member, member.window)
            case Ack() if member is not None and said.number == peer.acked < peer.sent:
                peer.acked += 1
                self._grant(member, peer.acked + member.window)
            case Vote() if peer.complete and peer.acked == peer.sent and not peer.voted:
                peer.voted = True
            case _:
                raise TransferFailed(f"the receiver said {type(said).__name__} out of turn")
        self._settle(replica)

    def _grant(self, member: Member, granted: int) -> None:
        if self._walk is not None:
            self._walk.grant(member, granted)

    def _settle(self, replica: Replica) -> None:
        """Commit or let go where all ranks have decided."""
        if not replica.over and replica.unanimous:
            replica.over = True
            for peer in replica.peers.values():
                if peer.accepted:
                    peer.tell(Committed())
                self._begin(self._farewell(peer), _FAREWELL)
        if replica.ready and not self._ready_since:
            self._ready_since = time.monotonic()
        self._changed.set()

    # -- failing ------------------------------------------------------------------------------

    def _fail(self, replica: Replica, error: HotbunkError) -> None:
        """The replica is out, and its ranks are told why. Idempotent."""
        if replica.over:
            return
        replica.over, replica.error = True, error
        message = frame(replica.farewell(error))
        for peer in replica.peers.values():
            if peer.member is not None and self._walk is not None:
                self._walk.leave(peer.member)
            peer.tell(message)
            self._begin(self._farewell(peer), _FAREWELL)
        self._changed.set()

    async def _farewell(self, peer: Peer) -> None:
        """Close the connection, when nothing is written to its arena any more."""
        walk = self._walk
        in_place = peer.member is not None and peer.member.target is not None
        if walk is not None and in_place and not await asyncio.to_thread(walk.quiet, QUIET_WAIT):
            log.error("%s: a copy into its arena still runs", peer.where)
        await peer.end()

    async def _tick(self) -> None:
        """Say that the sender lives, and leave out who does not."""
        while True:
            await asyncio.sleep(min(1.0, self._stall / 5))
            now = time.monotonic()
            for replica in self._replicas:
                for peer in list(replica.peers.values()):
                    if replica.over:
                        break
                    peer.beat()
                    if peer.owes() and now - peer.progress > self._stall:
                        silent = TransferFailed(
                            f"took no bucket for {self._stall:g} s", where=peer.where
                        )
                        self._fail(replica, silent)

    # -- one walk -----------------------------------------------------------------------------

    def _look_at(self, peer: Peer, said: Accept, fd: int | None) -> None:
        """What the rank wants, and whether it can be written in place. Runs in a thread.

        :raises UpdateRefused: the layout does not fit the offer, or the arena.
        """
        specs, arena = self._manifest.tensors, said.arena
        try:
            peer.want = layout.wants(specs, said.layout)
            if said.layout is None or arena is None or arena.kind != "file" or fd is None:
                return
            places = layout.places_in(specs, peer.want, said.layout, arena.nbytes)
            if places is not None:
                peer.mapped = self._sender.memory.arena(fd, arena.nbytes)
                peer.places = places
        finally:
            if fd is not None:
                os.close(fd)

    async def _round(self, group: Sequence[Replica]) -> None:
        """Serve these replicas, all together."""
        await self._walked()
        for replica in group:
            replica.served = True
        loop = asyncio.get_running_loop()
        walk: Walk | None = None
        try:
            parties = _parties([p for r in group for p in r.takers], self._manifest)
            rooms = [party.room for party in parties if party.packed]
            halves = iter(await asyncio.to_thread(self._sender.memory.halves, rooms))
            streams = [party.stream(next(halves) if party.packed else None) for party in parties]
            of_stream = dict(zip(map(id, streams), (p.peers for p in parties), strict=True))

            def on_full(
                stream: Stream, number: int, used: int, entries: tuple[BucketEntry, ...]
            ) -> None:
                pieces = tuple((e.index, e.start, e.nbytes, e.offset) for e in entries)
                data = frame(Full(number, used, pieces))
                loop.call_soon_threadsafe(self._full, of_stream[id(stream)], data)

            self._walk = walk = Walk(
                self._manifest.tensors,
                streams,
                self._sender.plans_for(len(streams)),
                on_full,
                fingerprints=self._manifest.fingerprint != "none",
                deadline=max(self._until - time.monotonic(), 0.0),
            )
            for party in parties:
                party.go()
            self._walking = loop.run_in_executor(None, walk.run, self._source)
            async with asyncio.timeout(max(self._until - time.monotonic(), 0.0)):
                await asyncio.shield(self._walking)
            for stream in streams:
                end = frame(End(walk.fingerprints(stream)))
                for peer in of_stream[id(stream)]:
                    peer.tell(end)
                    peer.complete = True
        except Stopped:
            pass  # whoever wanted it was told why not
        except HotbunkError as error:
            self._give_up(error)
        except TimeoutError:
            self._give_up(DeadlineExceeded("the source", self._deadline))
        # A boundary: sources raise what trainers raise.
        except Exception as error:  # noqa: BLE001
            failed = TrainerFailed(f"the source raised {type(error).__name__}: {error}")
            failed.remote_traceback = Failure.of(error).traceback
            self._give_up(failed)
        finally:
            if walk is not None:
                walk.stop()

    def _give_up(self, error: HotbunkError) -> None:
        self._failure = error
        for replica in self._replicas:
            self._fail(replica, error)

    def _full(self, peers: Sequence[Peer], data: bytes) -> None:
        for peer in peers:
            if peer.replica.over:
                continue
            if not peer.owes():
                peer.progress = time.monotonic()
            peer.sent += 1
            peer.tell(data)

    async def _walked(self) -> None:
        """The trainer's tensors may be taken away, once this returns."""
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


class _Party:
    """Receivers that want the same, and what will serve them."""

    def __init__(self, want: tuple[layout.Want, ...], bucket_bytes: int) -> None:
        self.want = want
        self.batch = bucket_bytes
        self.peers: list[Peer] = []
        self._halves: Halves | None = None

    @property
    def packed(self) -> bool:
        """Whether anybody needs a bucket with bytes in it."""
        return any(peer.mapped is None for peer in self.peers)

    @property
    def room(self) -> int:
        """Bytes of a bucket at most."""
        return layout.room(self.batch * (1 if self.packed else IN_PLACE_BUCKETS), self.want)

    def stream(self, halves: Halves | None) -> Stream:
        self._halves = halves
        for peer in self.peers:
            if peer.mapped is not None:
                peer.member = Member(IN_PLACE_WINDOW, peer.mapped.tensor, peer.places)
            else:
                peer.member = Member(HALVES)
                peer.member.granted = HALVES
            peer.member.gone = peer.replica.over
        room = self.room
        tensors = [half[:room] for half in halves.tensors()] if halves else []
        members = [peer.member for peer in self.peers if peer.member is not None]
        return Stream(self.want, room, members, tensors, batch=self.batch)

    def go(self) -> None:
        """Tell them. An arena is not written to before its receiver pulls."""
        for peer in self.peers:
            peer.progress = time.monotonic()
            if peer.mapped is not None:
                peer.tell(Go(True, 0))
            elif self._halves is not None:
                peer.tell(Go(False, self._halves.room), self._halves.fd)


def _parties(peers: Sequence[Peer], manifest: Manifest) -> list[_Party]:
    found: dict[tuple[layout.Want, ...], _Party] = {}
    for peer in peers:
        party = found.setdefault(peer.want, _Party(peer.want, manifest.bucket_bytes))
        party.peers.append(peer)
    return list(found.values())
