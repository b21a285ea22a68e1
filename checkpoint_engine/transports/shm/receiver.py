"""The receiving end: in the process that owns the weights. Needs no torch."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

from hotbunk.checkpoint_engine.transports.mapped import MappedTransfer, Way
from hotbunk.checkpoint_engine.transports.protocol import HALVES
from hotbunk.rollout.errors import TransferFailed


class ShmTransfer(MappedTransfer):
    """One rank's end of one sync."""

    _memory: mmap.mmap | None = None
    _view: memoryview | None = None

    def map(self, way: Way, fd: int | None) -> None:
        """For reading: written pages become this process's own."""
        if fd is None:
            raise TransferFailed("the sender sent no memory")
        try:
            size, found = way.room * HALVES, os.fstat(fd).st_size
            if found < size:
                raise TransferFailed(f"{size} bytes of memory were promised and {found} came")
            self._memory = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise TransferFailed(f"the sender's memory: {error}") from error

    def view(self, at: int, nbytes: int) -> memoryview:
        assert self._memory is not None
        with memoryview(self._memory) as whole:
            self._view = whole[at : at + nbytes]
        return self._view

    def take_back(self) -> None:
        """The bucket was only lent. Who still holds a view of it keeps the memory, not the sync."""
        if self._view is not None:
            with suppress(BufferError):
                self._view.release()
            self._view = None

    async def finish(self) -> None:
        self.take_back()
        if self._memory is not None:
            with suppress(BufferError):
                self._memory.close()
            self._memory = None
