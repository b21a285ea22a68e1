"""The sending end: one offer to many replicas on one device, in the trainer's process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from hotbunk.checkpoint_engine.source import WeightSource
from hotbunk.checkpoint_engine.transports import unix
from hotbunk.checkpoint_engine.transports.ipc.devices import Ledger, identity
from hotbunk.checkpoint_engine.transports.mapped import Arena, Way
from hotbunk.checkpoint_engine.transports.mapping import Halves, MappedLink, MappedOffer
from hotbunk.checkpoint_engine.transports.protocol import HALVES
from hotbunk.rollout import binding
from hotbunk.rollout.contract import Manifest
from hotbunk.rollout.errors import MemoryFault, UpdateRefused
from hotbunk.rollout.memory import ALIGN, NativeArena, NativePool
from hotbunk.rollout.native_pool import Shared

TAG = "bucket"
_numbers = itertools.count()


class DeviceHalves:
    """Two buckets in memory of the device. Gone when the last view of it is.

    :raises MemoryFault: there is not so much.
    """

    def __init__(self, pool: NativePool, room: int) -> None:
        self.room = -(-room // ALIGN) * ALIGN
        self.arena = pool.arena(TAG, self.room * HALVES, f"ipc-{next(_numbers)}")
        self._pool = pool
        region = self.arena.add("halves", self.room * HALVES)
        self._whole: torch.Tensor | None = binding.tensor_over(pool, self.arena, region)

    def tensors(self) -> list[torch.Tensor]:
        assert self._whole is not None
        return list(self._whole.view(HALVES, self.room).unbind())

    def close(self) -> None:
        """Give it back; what a walk that hangs still writes to goes with the walk."""
        self._whole = None
        self._pool.leave(self.arena)


class Imported:
    """A receiver's arena in this process."""

    def __init__(self, pool: NativePool, arena: NativeArena) -> None:
        self.arena = arena
        region = arena.add("weights", arena.size)
        self.tensor = binding.tensor_over(pool, arena, region)


class IpcOffer(MappedOffer):
    """Replicas of this device; buckets lie in its memory."""

    def __init__(
        self,
        pool: NativePool,
        ledger: Ledger,
        directory: Path | None,
        source: WeightSource,
        manifest: Manifest,
        ranks: Sequence[int],
        deadline: float,
        stall: float,
    ) -> None:
        door = unix.UnixDoor(directory)
        super().__init__("ipc", door, source, manifest, ranks=ranks, deadline=deadline, stall=stall)
        self._pool = pool
        self._ledger = ledger
        self._kind = pool.driver.partition(":")[0]
        self._device = identity(pool.driver)
        self._halves: list[DeviceHalves] = []
        self._handles: list[int] = []  # descriptors of what was exported

    def map_arena(self, arena: Arena, fd: int | None) -> Imported | None:
        if arena.kind != self._kind:
            return None
        shared = Shared(fd=-1 if fd is None else fd, number=arena.number, nbytes=arena.nbytes)
        try:
            found = self._pool.import_arena(shared, TAG, f"theirs-{next(_numbers)}")
        except MemoryFault as error:
            raise UpdateRefused(f"the arena cannot be mapped: {error}") from error
        self._ledger.imported()
        found.when_gone(self._ledger.closed)
        return Imported(self._pool, found)

    def make_halves(self, rooms: Sequence[int]) -> list[DeviceHalves]:
        made: list[DeviceHalves] = []
        for room in rooms:
            made.append(DeviceHalves(self._pool, room))
            self._halves.append(made[-1])
        return made

    def way(self, link: MappedLink, halves: Halves) -> tuple[Way, int | None]:
        assert isinstance(halves, DeviceHalves)
        (member,) = link.members
        shared = halves.arena.export(member.channel.peer_pid)
        self._ledger.exported()
        fd = None
        if shared.fd >= 0:
            fd = int(shared.fd)
            self._handles.append(fd)
        way = Way(False, halves.room, self._kind, self._device, shared.nbytes, shared.number)
        return way, fd

    def written(self) -> None:
        """Another process sees what a device has done, not what it was told to do."""
        if self._pool.device.startswith("cuda") and torch.cuda.is_available():
            torch.cuda.synchronize(self._pool.device)

    async def release(self) -> None:
        await super().release()
        while self._halves:
            self._halves.pop().close()
        while self._handles:
            os.close(self._handles.pop())
