"""Memory of the sender: its own, which receivers map, and receivers' arenas, which it maps."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

from hotbunk.checkpoint_engine.transports.protocol import HALVES
from hotbunk.rollout.arena import PAGE
from hotbunk.rollout.binding import tensor_over
from hotbunk.rollout.errors import MemoryFault, UpdateRefused
from hotbunk.rollout.kernels import native_kernels
from hotbunk.rollout.memory import NativePool
from hotbunk.rollout.native import NativeUnavailable

_SMALLEST = 8 << 20  # bytes of a bucket; a smaller one costs more than the cache gains
_TOO_LARGE = 4  # times what is needed: then memory is given back and taken anew


def packed_bytes(bucket_bytes: int) -> int:
    """Most bytes that are packed into a half, where buckets may have so many.

    What waits in the cache for who copies it out is there sooner than from memory; that is worth
    more than the messages of smaller buckets cost, down to some size.
    """
    kernels = native_kernels()
    fits = kernels.cache * 3 // 4 // HALVES if kernels is not None else 0
    return min(bucket_bytes, fits) if fits >= _SMALLEST else bucket_bytes


class Halves:
    """One file of two halves, without a name. ``fd`` opens it for reading only.

    Its pages are huge where the native library finds a way.

    :raises MemoryFault: there is not so much memory.
    """

    def __init__(self, room: int) -> None:
        self.room = -(-room // PAGE) * PAGE  # the second half is as aligned as the first
        size = self.room * HALVES
        self._pool: NativePool | None = None
        try:
            self._pool = NativePool("shared")
        except NativeUnavailable:
            self._whole, self.fd = _plain(size)
        else:
            arena = self._pool.arena("bucket", size)
            region = arena.add("halves", size)
            assert arena.fd is not None, "shared memory has a file"
            try:
                self.fd = _for_reading(arena.fd)
            except OSError as error:
                self._pool.close()
                raise MemoryFault(f"shared memory cannot be opened: {error}") from error
            self._whole = tensor_over(self._pool, arena, region)

    def tensors(self) -> list[torch.Tensor]:
        """The halves, as flat tensors of bytes."""
        return list(self._whole.view(HALVES, self.room).unbind())

    def close(self) -> None:
        """Give it back. What receivers still have mapped goes with them."""
        os.close(self.fd)
        del self._whole
        if self._pool is not None:
            self._pool.close()


def _plain(size: int) -> tuple[torch.Tensor, int]:
    fd = os.memfd_create("hotbunk-shm", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)  # now, and not by a signal when it is written
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8), _for_reading(fd)
    except OSError as error:
        raise MemoryFault(f"no {size} bytes of shared memory: {error}") from error
    finally:
        os.close(fd)


def _for_reading(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class Mapped:
    """A receiver's arena in this process."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            self.tensor = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)


class Memory:
    """What a transport keeps from sync to sync, as long as it is used.

    An arena that a sync does not write to is unmapped at its end: then its receiver is gone, or
    has changed its mind.
    """

    def __init__(self) -> None:
        self._halves: list[Halves] = []
        self._arenas: dict[tuple[int, int, int], Mapped] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of this process's own."""
        return sum(one.room * HALVES for one in self._halves)

    def halves(self, rooms: Sequence[int]) -> list[Halves]:
        """Memory for as many streams, none of it smaller than asked for.

        :raises MemoryFault: there is not so much.
        """
        free, self._halves = self._halves, []
        try:
            for room in rooms:
                fit = [h for h in free if room <= h.room <= max(room * _TOO_LARGE, PAGE)]
                best = min(fit, key=lambda h: h.room, default=None)
                if best is not None:
                    free.remove(best)
                self._halves.append(best or Halves(room))
        finally:
            for one in free:
                one.close()
        return list(self._halves)

    def arena(self, fd: int, nbytes: int) -> Mapped:
        """A receiver's arena, by its descriptor, which may be closed afterwards.

        :raises UpdateRefused: it is smaller than the receiver said, or cannot be mapped.
        """
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino, nbytes)
        if found.st_size < nbytes or nbytes < 0:
            raise UpdateRefused(f"an arena of {nbytes} bytes is a file of {found.st_size}")
        if key not in self._arenas:
            try:
                self._arenas[key] = Mapped(fd, nbytes)
            except (OSError, ValueError) as error:
                raise UpdateRefused(f"the arena cannot be mapped: {error}") from error
        return self._arenas[key]

    def keep(self, used: Sequence[Mapped]) -> None:
        """Unmap every other arena."""
        self._arenas = {key: one for key, one in self._arenas.items() if one in used}

    def close(self) -> None:
        """Idempotent."""
        self.keep(())
        while self._halves:
            self._halves.pop().close()
