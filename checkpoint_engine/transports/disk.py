"""Weights by way of a directory: published once, read by whoever comes, then or later.

The sender writes a set (:mod:`hotbunk.checkpoint_engine.published`) while the receivers are asked
whether they accept; each then reads it in its own time, through one buffer. What is negotiated goes
over TCP, as with other transports between processes. A receiver that comes when no sender is there
takes the newest set (:func:`latest`): a cache for engines that start late, and a way for an engine
that slept at level 2 to get its weights back.

Nobody knows beforehand what a reader wants, so the set holds the trainer's own element types, and
casts happen where it is read, after the bytes read were checked against the trainer's fingerprints.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from hotbunk.checkpoint_engine.published import OpenSet, make_root, newest
from hotbunk.checkpoint_engine.publishing import SHARD_BYTES, Writing, prune
from hotbunk.checkpoint_engine.transports import tcp
from hotbunk.checkpoint_engine.transports.base import Door, Offer, Published, Transport
from hotbunk.checkpoint_engine.transports.offering import STALL, NegotiatedOffer
from hotbunk.checkpoint_engine.transports.parties import Party
from hotbunk.checkpoint_engine.transports.protocol import Go, packed, unpacked
from hotbunk.checkpoint_engine.transports.reading import SetReader
from hotbunk.checkpoint_engine.transports.receiving import OPEN_WAIT, ReceivingTransfer, greet
from hotbunk.rollout.contract import (
    ArenaHandle,
    Bucket,
    Manifest,
    ReceiverLayout,
    Scope,
    Ticket,
    Transfer,
)
from hotbunk.rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    SessionError,
    TransferFailed,
    UpdateFailed,
)

if TYPE_CHECKING:  # a receiver's process may have no torch
    from hotbunk.checkpoint_engine.source import WeightSource

T = TypeVar("T")
LATER = "set:"  # what the address of a ticket without a sender begins with
OPEN_SECONDS = 60.0
LATER_SECONDS = 3600.0  # for a set read without a sender; the replica's own deadline is shorter
CLOSE_WAIT = 30.0  # seconds to wait for a source that was cut off in the middle of a tensor


class _Where(msgspec.Struct, frozen=True, array_like=True):
    """:attr:`Go.data`: which set."""

    root: str
    name: str


# -- receiving --------------------------------------------------------------------------------


class _Reads:
    """Reading a set, in a thread of its own: a read may hang, and an event loop may not."""

    def __init__(self, root: str, name: str, offered: Manifest | None = None) -> None:
        self._executor = ThreadPoolExecutor(1, "hotbunk-disk")
        self._root, self._name, self._offered = root, name, offered
        self._held: OpenSet | None = None
        self._reader: SetReader | None = None
        self._busy = False

    async def run(self, step: str, seconds: float, work: Callable[[], T]) -> T:
        """:raises DeadlineExceeded: the disk hangs."""
        self._busy = True
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        done, _ = await asyncio.wait({future}, timeout=max(seconds, 0))
        if not done:
            raise DeadlineExceeded(f"reading set {self._name!r} ({step})", seconds)
        self._busy = False
        return future.result()

    def open(self) -> Manifest:
        """:raises TransferFailed: it is gone, broken, or not what was offered."""
        self._held = OpenSet(Path(self._root), self._name)
        if self._offered is not None and self._held.manifest != self._offered:
            raise TransferFailed(f"set {self._name!r} is not the one on offer")
        return self._held.manifest

    def begin(self, layout: ReceiverLayout | None) -> None:
        """:raises UpdateRefused: the layout wants something else than there is."""
        assert self._held is not None
        self._reader = SetReader(self._held, layout)

    @property
    def reader(self) -> SetReader:
        if self._reader is None:
            raise SessionError("buckets were asked for before the update was accepted")
        return self._reader

    def close(self) -> None:
        """Idempotent. A read that hangs keeps its files; closing them could let it read others."""
        self._executor.shutdown(wait=False)
        if self._held is not None and not self._busy:
            self._held.close()
            self._held = None

    async def buckets(self, left: float) -> AsyncIterator[Bucket]:
        """The reader's buckets, one at a time, ``left`` seconds for all of them."""
        until = asyncio.get_running_loop().time() + left
        reader = self.reader
        reader.start()
        while True:
            rest = until - asyncio.get_running_loop().time()
            bucket = await self.run(f"bucket {reader.number}", rest, reader.next)
            if bucket is None:
                return
            yield bucket


class DiskTransfer(ReceivingTransfer):
    """The receiver's end while the sender is there."""

    def __init__(self, *args: object, **kw: object) -> None:
        super().__init__(*args, **kw)  # type: ignore[arg-type]
        self._reads: _Reads | None = None

    async def begin(self, data: bytes, fd: int | None, layout: ReceiverLayout | None) -> None:
        await super().begin(data, fd, layout)
        where = unpacked(data, _Where)
        reads = self._reads = _Reads(where.root, where.name, self.manifest)
        await reads.run("open", self.left(), reads.open)
        reads.begin(layout)

    def buckets(self) -> AsyncIterator[Bucket]:
        if self._reads is None:
            raise SessionError("buckets were asked for before the update was accepted")
        return self._reads.buckets(self.left())

    async def fingerprints(self) -> Mapping[str, int]:
        return self._reads.reader.fingerprints() if self._reads else {}

    async def commit(self) -> None:
        self.ended = self._reads is not None and self._reads.reader.ended
        await super().commit()

    async def finish(self) -> None:
        if self._reads is not None:
            self._reads.close()


class LaterTransfer(Transfer):
    """The receiver's end when no sender is there: the set alone. For one rank."""

    def __init__(self, reads: _Reads, manifest: Manifest, seconds: float) -> None:
        self.manifest = manifest
        self._reads = reads
        self._seconds = seconds

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        self._reads.begin(layout)
        return False

    def buckets(self) -> AsyncIterator[Bucket]:
        return self._reads.buckets(self._seconds)

    async def fingerprints(self) -> Mapping[str, int]:
        return self._reads.reader.fingerprints()

    async def commit(self) -> None:
        if not self._reads.reader.ended:
            raise UpdateFailed("commit was voted before the last bucket was taken")
        self._reads.close()

    async def decline(self) -> None:
        self._reads.close()

    async def abort(self, error: BaseException) -> None:
        self._reads.close()


# -- what is there ----------------------------------------------------------------------------


def latest(root: Path | str, scope: Scope | None = None) -> Published:
    """The newest published weights: what an engine that starts late, or lost its own, takes.

    ``await replica.update_weights(found.ticket, version=found.manifest.version)``.

    :raises TransferFailed: nothing (readable) is published there.
    :raises ConfigError: the directory cannot be read, or others may write to it.
    """
    root = Path(root).resolve()
    held = newest(root, scope)
    try:
        return Published(held.manifest, _later_ticket(root, held.name))
    finally:
        held.close()


def _later_ticket(root: Path, name: str) -> Ticket:
    return Ticket("disk", f"{LATER}{root / name}", published=True)


# -- sending ----------------------------------------------------------------------------------


class DiskOffer(NegotiatedOffer):
    """Publishes, then leaves each replica to itself. The set is held until the offer's end."""

    def __init__(
        self,
        transport: DiskTransport,
        source: WeightSource,
        door: Door,
        manifest: Manifest,
        *,
        ranks: Sequence[int],
        deadline: float,
        stall: float,
    ) -> None:
        super().__init__("disk", door, manifest, ranks=ranks, deadline=deadline, stall=stall)
        self._transport = transport
        self._source = source
        self._publishing: asyncio.Future[OpenSet] | None = None

    async def run(self) -> None:
        publishing = asyncio.ensure_future(self._publish())

        async def lead(party: Party) -> None:
            if await self.agree(party):
                if not await party.wait(asyncio.wait({publishing}), self.left):
                    raise DeadlineExceeded("publishing", self._deadline)
                held = publishing.result()
                party.moved = True
                root = str(self._transport.root)
                party.tell(Go(packed(_Where(root, held.name))))
                await self.settle(party)

        try:
            await self.each(self.parties, lead)
            if not publishing.done():  # nobody waits for it, but whoever comes later will
                done, _ = await asyncio.wait({publishing}, timeout=max(self.left, 0))
                if not done:
                    raise DeadlineExceeded("publishing", self._deadline)
            publishing.result()
        finally:
            publishing.cancel()

    async def _publish(self) -> OpenSet:
        work = partial(self._transport.write, self._source, self.manifest)
        self._publishing = asyncio.get_running_loop().run_in_executor(None, work)
        return await asyncio.shield(self._publishing)

    async def release(self) -> None:
        if self._publishing is not None:
            # It cannot be cut off, and reads what the trainer may take away once this returns.
            done, _ = await asyncio.wait({self._publishing}, timeout=CLOSE_WAIT)
            if done and self._publishing.exception() is None:
                self._publishing.result().close()
        await asyncio.to_thread(self._transport.prune)


class DiskTransport(Transport):
    """See the module.

    :param root: where sets are published; made with mode 0700 if it is not there.
    :param keep: sets of each scope that stay when newer ones come.
    :param lease: seconds after which a set that is still being read is deleted all the same.
    :param shard_bytes: bytes of one file; a tensor is never cut.
    :param address: of this machine, as receivers reach it. A shared file system needs another than
        the default, which is for receivers on this machine.
    :raises ConfigError: one of these cannot be used.
    """

    name = "disk"

    def __init__(
        self,
        root: Path | str,
        *,
        keep: int = 2,
        lease: float = 600.0,
        shard_bytes: int = SHARD_BYTES,
        address: str = "127.0.0.1",
        stall: float = STALL,
    ) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep}: the newest set always stays")
        if lease <= 0 or shard_bytes <= 0:
            raise ConfigError(f"lease={lease} and shard_bytes={shard_bytes} must be above 0")
        tcp.check_address(address)
        self.root = make_root(Path(root))
        self._keep = keep
        self._lease = lease
        self._shard_bytes = shard_bytes
        self._address = address
        self._stall = stall

    async def offer(
        self,
        source: WeightSource,
        manifest: Manifest,
        *,
        ranks: Sequence[int] = (1,),
        deadline: float = 600.0,
    ) -> Offer:
        await asyncio.to_thread(import_module, "hotbunk.checkpoint_engine.bucket")  # a while, once
        from hotbunk.checkpoint_engine.bucket import check_bucket_bytes

        check_bucket_bytes(manifest.bucket_bytes)
        return DiskOffer(
            self,
            source,
            tcp.TcpDoor(self._address),
            manifest,
            ranks=ranks,
            deadline=deadline,
            stall=self._stall,
        )

    async def publish(self, source: WeightSource, manifest: Manifest) -> Published:
        """Publish for whoever comes later, with no replica in view.

        :raises TransferFailed: no room, or the disk failed.
        """
        held = await asyncio.to_thread(self.write, source, manifest)
        held.close()
        await asyncio.to_thread(self.prune)
        return Published(manifest, _later_ticket(self.root, held.name))

    @staticmethod
    async def open(ticket: Ticket) -> Transfer:
        if not ticket.address.startswith(LATER):
            host, port, token = tcp.parse(ticket.address)
            sock = await tcp.connect(host, port, OPEN_WAIT)
            return DiskTransfer(*await greet(sock, token, ticket), ticket)
        if ticket.ranks != 1:
            raise TransferFailed(f"{ticket.ranks} ranks cannot agree about a set without a sender")
        path = Path(ticket.address.removeprefix(LATER))
        reads = _Reads(str(path.parent), path.name)
        try:
            manifest = await reads.run("open", OPEN_SECONDS, reads.open)
        except BaseException:
            reads.close()
            raise
        return LaterTransfer(reads, manifest, LATER_SECONDS)

    # -- in a thread --------------------------------------------------------------------------

    def write(self, source: WeightSource, manifest: Manifest) -> OpenSet:
        """Publish one walk of the source. The set is the caller's to close."""
        import torch

        from hotbunk.checkpoint_engine.bucket import Packer, bucket_size
        from hotbunk.checkpoint_engine.transports.block_sums import BLOCK, BlockSums

        writing = Writing(self.root, manifest, self._shard_bytes)
        try:
            # Zeroed page by page: a bytearray holds every thread up while it is.
            raw = mmap.mmap(-1, bucket_size(manifest.bucket_bytes, manifest.tensors, None))
            buffer = torch.frombuffer(raw, dtype=torch.uint8)
            packer = Packer(manifest.tensors, source.tensors(), buffer)
            sums = BlockSums(manifest.tensors) if manifest.fingerprint != "none" else None
            view = memoryview(raw)
            while (bucket := packer.next()) is not None:
                for entry in bucket.entries:
                    piece = view[entry.offset : entry.offset + entry.nbytes]
                    writing.write(entry.index, entry.start, piece)
                if sums is not None:
                    sums.add(buffer, bucket.entries)
            if sums is None:
                return writing.publish({})
            return writing.publish(sums.whole(), sums.blocks, BLOCK)
        finally:
            writing.discard()

    def prune(self) -> None:
        """Delete sets that are no longer needed, and what killed writers left."""
        prune(self.root, self._keep, self._lease)
