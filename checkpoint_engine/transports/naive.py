"""Trainer and engine in one process: buckets pass by reference, through one buffer.

The buffer lies in a memory pool under the tag ``bucket`` where one is given, so that it is counted
like everything else, and is given back after every sync.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import torch

from hotbunk.checkpoint_engine.bucket import Packer, bucket_size, check_bucket_bytes
from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports.base import Offer, Transport
from hotbunk.rollout.arena import Arena, MemoryPool
from hotbunk.rollout.binding import tensor_over
from hotbunk.rollout.contract import (
    ArenaHandle,
    Bucket,
    Manifest,
    ReceiverLayout,
    Ticket,
    Transfer,
)
from hotbunk.rollout.errors import SessionError, TransferFailed

BUCKET_TAG = "bucket"
CLOSE_WAIT = 30.0  # seconds to wait for a source that was cut off in the middle of a tensor
log = logging.getLogger(__name__)
_addresses = itertools.count()
_open_lanes: dict[str, _Lane] = {}
OnBucket = Callable[[], Awaitable[None]]


class _Lane:
    """The way to one receiver in this process. Packs when the receiver asks."""

    def __init__(
        self,
        source: WeightSource,
        manifest: Manifest,
        pool: MemoryPool | None,
        on_bucket: OnBucket | None,
    ) -> None:
        self.address = str(next(_addresses))
        self.manifest = manifest
        self.source = source
        self._on_bucket = on_bucket
        self._pool = pool
        self._arena: Arena | None = None
        self._filling: asyncio.Future[Bucket | None] | None = None
        _open_lanes[self.address] = self

    def buffer(self, layout: ReceiverLayout | None) -> torch.Tensor:
        """A bucket's buffer, taken when the first one is packed."""
        size = bucket_size(self.manifest.bucket_bytes, self.manifest.tensors, layout)
        if self._pool is None:
            return torch.empty(size, dtype=torch.uint8)
        self._arena = self._pool.arena(BUCKET_TAG, size, self.address)
        region = self._arena.add("bucket", size)
        return tensor_over(self._pool, self._arena, region)

    async def fill(self, packer: Packer) -> Bucket | None:
        """The next bucket, packed off the event loop: it takes longer than a loop may stand still.

        A packing cannot be cut off. When this is cancelled it goes on, and :meth:`close` waits.
        """
        self._filling = asyncio.get_running_loop().run_in_executor(None, packer.next)
        return await asyncio.shield(self._filling)

    async def written(self) -> None:
        """A bucket is full and was written: the moment at which a sync holds most memory."""
        if self._on_bucket is not None:
            await self._on_bucket()

    async def close(self) -> None:
        _open_lanes.pop(self.address, None)
        if self._filling is not None:
            # The trainer's tensors, too, may be taken away once this returns.
            done, _ = await asyncio.wait({self._filling}, timeout=CLOSE_WAIT)
            if not done:
                log.error("a source still hangs %g s after its sync ended", CLOSE_WAIT)
            elif not self._filling.cancelled():
                self._filling.exception()  # raised to whoever asked, if anybody still does
            self._filling = None
        if self._arena is not None and self._pool is not None:
            self._pool.drop(self._arena)
            self._arena = None


class NaiveOffer(Offer):
    """An offer to receivers in this process; each takes its buckets in its own time."""

    def __init__(self, lanes: Sequence[_Lane]) -> None:
        self._lanes = lanes
        self.tickets = tuple(Ticket("naive", lane.address) for lane in lanes)

    async def serve(self) -> None:
        """Nothing to do: the receivers pack."""

    async def close(self) -> None:
        for lane in self._lanes:
            await lane.close()


class NaiveTransfer(Transfer):
    """The receiver's end: packs a bucket when it is asked for one."""

    def __init__(self, lane: _Lane) -> None:
        self.manifest = lane.manifest
        self._lane = lane
        self._layout: ReceiverLayout | None = None
        self._packer: Packer | None = None

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        self._layout = layout
        return False

    async def buckets(self) -> AsyncIterator[Bucket]:
        if self._packer is not None:
            raise SessionError("the buckets of this update were taken before")
        specs = self.manifest.tensors
        packer = self._packer = Packer(
            specs,
            self._lane.source.tensors(),
            self._lane.buffer(self._layout),
            layout=self._layout,
            fingerprints=self.manifest.fingerprint != "none",
        )
        while (bucket := await self._lane.fill(packer)) is not None:
            yield bucket
            await self._lane.written()

    async def fingerprints(self) -> Mapping[str, int]:
        return self._packer.fingerprints if self._packer else {}

    async def commit(self) -> None:
        """One rank: its vote is the decision."""

    async def decline(self) -> None:
        """Nothing was packed yet."""

    async def abort(self, error: BaseException) -> None:
        """Nobody packs unless asked."""


class NaiveTransport(Transport):
    """See the module. ``on_bucket`` is called before the first bucket and when one was written, to measure."""

    name = "naive"

    def __init__(self, pool: MemoryPool | None = None, on_bucket: OnBucket | None = None) -> None:
        self._pool = pool
        self._on_bucket = on_bucket

    async def offer(
        self,
        source: WeightSource,
        manifest: Manifest,
        *,
        ranks: Sequence[int] = (1,),
        deadline: float = 600.0,
    ) -> Offer:
        check_bucket_bytes(manifest.bucket_bytes)
        if any(n != 1 for n in ranks):
            raise SessionError(f"the naive transport reaches one rank a replica, not {max(ranks)}")
        if self._on_bucket is not None:  # the level that the first bucket comes on top of
            await self._on_bucket()
        return NaiveOffer([_Lane(source, manifest, self._pool, self._on_bucket) for _ in ranks])

    @staticmethod
    async def open(ticket: Ticket) -> Transfer:
        lane = _open_lanes.pop(ticket.address, None)
        if lane is None:
            raise TransferFailed(
                f"no offer {ticket.address!r} in this process",
                remedy="the naive transport works within one process, once per ticket",
            )
        return NaiveTransfer(lane)
