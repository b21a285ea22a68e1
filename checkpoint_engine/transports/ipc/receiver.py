"""The receiving end: in the process that owns the weights. Needs no torch for memory of the host."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hotbunk.checkpoint_engine.transports.ipc.devices import received, receiver_pool
from hotbunk.checkpoint_engine.transports.mapped import MappedTransfer, Way
from hotbunk.checkpoint_engine.transports.protocol import HALVES
from hotbunk.rollout.errors import MemoryFault, TransferFailed
from hotbunk.rollout.native_pool import Shared

if TYPE_CHECKING:
    from hotbunk.rollout.memory import NativeArena

TAG = "ipc"
_HUGE = 1 << 62


class IpcTransfer(MappedTransfer):
    """One rank's end of one sync. One import, whatever the number of buckets."""

    _arena: NativeArena | None = None
    _whole: Any = None  # all of it as bytes: a memoryview, or a tensor of the device
    _view: Any = None

    def map(self, way: Way, fd: int | None) -> None:
        if not way.room * HALVES <= way.nbytes < _HUGE or (fd is None and not way.number):
            raise TransferFailed(f"the sender's memory makes no sense: {way}")
        pool = receiver_pool(way.kind, way.device)
        # Other replicas read the same bucket.
        shared = Shared(-1 if fd is None else fd, 0, way.number, way.nbytes, read_only=1)
        try:
            arena = self._arena = pool.import_arena(shared, TAG, f"{id(self)}")
        except MemoryFault as error:
            raise TransferFailed(f"the sender's memory: {error}") from error
        received.imported()
        # It goes when the last view of it does: whoever still reads a bucket must not fault.
        arena.when_gone(received.closed)
        region = arena.add("halves", way.room * HALVES)
        if pool.addressable:
            self._whole = arena.view(region)
        else:
            from hotbunk.rollout.binding import tensor_over

            self._whole = tensor_over(pool, arena, region)

    def view(self, at: int, nbytes: int) -> object:
        self._view = self._whole[at : at + nbytes]
        return self._view

    def take_back(self) -> None:
        _release(self._view)
        self._view = None

    async def finish(self) -> None:
        self.take_back()
        _release(self._whole)
        self._whole = self._arena = None


def _release(view: Any) -> None:
    if isinstance(view, memoryview):
        with suppress(BufferError):
            view.release()
