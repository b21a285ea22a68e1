"""An update that is gathered whole before anything takes it: memory of the host, without a name."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Self

import psutil
import torch

from hotbunk.rollout import errors
from hotbunk.rollout.contract import Bucket, Manifest
from hotbunk.rollout.intake import Intake


class WholeUpdate:
    """The tensors of a manifest side by side in a nameless file: it goes with its last user.

    Needs as much host memory as they are large, for the length of an update.

    :param sizes: bytes of each tensor, in the manifest's order.
    :param offsets: where each of them begins.
    :param nbytes: of the whole.
    :param name: what the kernel calls the file, for whoever looks at a process's descriptors.
    :raises HostOutOfMemory: there is not so much.
    """

    def __init__(
        self,
        manifest: Manifest,
        sizes: Sequence[int],
        offsets: Sequence[int],
        nbytes: int,
        name: str,
    ) -> None:
        free = int(psutil.virtual_memory().available)
        if nbytes > free:
            raise errors.HostOutOfMemory(nbytes, free)
        self.specs = manifest.tensors
        self.sizes, self.offsets = list(sizes), list(offsets)
        self.intake = Intake(manifest, self.sizes)
        self._descriptor = os.memfd_create(name)
        os.ftruncate(self._descriptor, max(nbytes, 1))
        self.data = mmap.mmap(self._descriptor, max(nbytes, 1))
        self.memory = memoryview(self.data)

    @property
    def path(self) -> str:
        """How another process of this host opens it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.release()
        self.data.close()
        os.close(self._descriptor)

    def write(self, bucket: Bucket) -> None:
        """Copy a bucket's pieces to their places. :raises TransferFailed: a bad table."""
        data = bucket.data
        if isinstance(data, torch.Tensor):
            data = data.detach().cpu().contiguous().numpy()
        source = memoryview(data).cast("B")
        for entry in self.intake.check(bucket, source.nbytes):
            at = self.offsets[entry.index] + entry.start
            piece = source[entry.offset : entry.offset + entry.nbytes]
            self.memory[at : at + entry.nbytes] = piece
