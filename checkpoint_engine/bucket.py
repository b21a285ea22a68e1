"""Packing tensors into buckets: one contiguous buffer and a table.

Exact for everything a model can hold: tensors and rows larger than a bucket (cut at element
boundaries), 0-d and empty tensors, views of any stride, mixed element types in any order (each
piece starts aligned), odd bucket sizes, an empty stream, tensors on another device. Casts happen
piece by piece, into the bucket. Small tensors are copied many at a time: live bytes are one bucket,
at most one tensor of the source, and small ones that add up to a sixteenth of a bucket at most.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch

from hotbunk.rollout.binding import dtype_from, dtype_name
from hotbunk.rollout.contract import Bucket, BucketEntry, ReceiverLayout, TensorSpec
from hotbunk.rollout.errors import ConfigError, ShapeMismatch, TransferFailed
from hotbunk.rollout.fingerprint import MASK
from hotbunk.rollout.kernels import PieceCopies, materialized

ALIGN = 64  # bytes; where a piece may start in a bucket
BucketPlan = tuple[tuple[BucketEntry, ...], int]  # a bucket's table, and the bytes it fills
SMALLEST = 64  # bytes; below this no element is sure to fit
_SMALL = 64 << 10  # bytes; a call of its own costs a smaller tensor more than the copy


def check_bucket_bytes(wanted: int) -> None:
    """:raises ConfigError: too small to hold an element."""
    if wanted < SMALLEST:
        raise ConfigError(f"a bucket of {wanted} bytes is too small", remedy=f"use >= {SMALLEST}")


def bucket_size(wanted: int, specs: Sequence[TensorSpec], layout: ReceiverLayout | None) -> int:
    """Bytes to allocate for a bucket: never more than the whole stream needs."""
    whole = 0
    for spec in specs:
        size = spec.nbytes
        if layout is not None and spec.name in layout.tensors:
            elements = math.prod(spec.shape)
            size = elements * dtype_from(layout.tensors[spec.name].dtype).itemsize
        whole = -(-whole // ALIGN) * ALIGN + size
    return max(min(wanted, whole), SMALLEST)


@functools.lru_cache(maxsize=4)
def pack_plan(tensors: tuple[tuple[int, int], ...], room: int) -> tuple[BucketPlan, ...]:
    """Where every piece goes, for tensors of ``(bytes, bytes an element)`` and buckets of ``room``.

    Sizes decide it alone, so one sync after another uses the same plan.
    """
    plans: list[BucketPlan] = []
    table: list[BucketEntry] = []
    used = 0
    for index, (size, element) in enumerate(tensors):
        start, placed = 0, False
        while not placed or start < size:
            offset = -(-used // ALIGN) * ALIGN
            count = min(size - start, (room - offset) // element * element)
            if count > 0 or (size == 0 and offset <= room):
                table.append(BucketEntry(index, start, count, offset))
                used, start, placed = offset + count, start + count, True
            if not placed or start < size:
                plans.append((tuple(table), used))
                table, used = [], 0
    if table:
        plans.append((tuple(table), used))
    return tuple(plans)


class Packer:
    """Packs one walk of a source into a buffer, bucket by bucket.

    :param buffer: flat uint8 tensor, reused for every bucket.
    :param layout: element types the receiver wants; None keeps the source's.
    :param fingerprints: whether to fingerprint each tensor on its way.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        tensors: Iterator[torch.Tensor],
        buffer: torch.Tensor,
        *,
        layout: ReceiverLayout | None = None,
        fingerprints: bool = False,
    ) -> None:
        self.fingerprints: dict[str, int] = {}
        self.payload = 0  # bytes packed so far, padding not counted
        self._specs = specs
        self._buffer = buffer
        self._with_fingerprints = fingerprints
        self._casts = layout is not None
        named = {} if layout is None else layout.tensors
        self._dtypes = [_dtype(named[s.name].dtype if s.name in named else s.dtype) for s in specs]
        self._copies = PieceCopies(buffer)
        self._waiting: list[BucketEntry] = []  # collected, and not yet copied
        self._held = 0  # bytes of the source that the copies keep alive
        self._buckets = self._run(tensors)

    def next(self) -> Bucket | None:
        """The next bucket, or None at the end. Overwrites the last one.

        :raises ShapeMismatch: a tensor is not what its spec said.
        :raises TransferFailed: the source yields fewer tensors than it said, or more.
        """
        return next(self._buckets, None)

    @torch.no_grad()
    def _run(self, tensors: Iterator[torch.Tensor]) -> Iterator[Bucket]:
        room = self._buffer.numel()
        small, most_held = min(_SMALL, room // 64), room // 16
        plan = pack_plan(
            tuple(
                (math.prod(spec.shape) * dtype.itemsize, dtype.itemsize)
                for spec, dtype in zip(self._specs, self._dtypes, strict=True)
            ),
            room,
        )
        tensor: torch.Tensor | None = None
        left = 0  # bytes of it that are not packed yet
        for table, used in plan:
            for entry in table:
                if entry.start == 0:
                    tensor = None  # before the source gathers the next one
                    tensor = self._next(entry.index, tensors)
                    left = tensor.numel() * self._dtypes[entry.index].itemsize
                    self._held += tensor.nbytes
                assert tensor is not None
                place = (entry.start, entry.nbytes, entry.offset)
                self._copies.add(tensor, self._dtypes[entry.index], place)
                self._waiting.append(entry)
                self.payload += entry.nbytes
                left -= entry.nbytes
                if not left and (tensor.nbytes > small or self._held > most_held):
                    self._copy()
            if not left:
                tensor = None
            self._copy()
            yield Bucket(self._buffer[:used], table)
        if next(tensors, None) is not None:
            raise TransferFailed(f"the source has more than the {len(self._specs)} tensors it said")

    def _copy(self) -> None:
        """Do what is to be copied, and let go of the source's tensors."""
        self._copies.run()
        if self._with_fingerprints:
            pieces = [(entry.start, entry.nbytes, entry.offset) for entry in self._waiting]
            sums = self._copies.fingerprints(pieces)
            for entry, one in zip(self._waiting, sums, strict=True):
                name = self._specs[entry.index].name
                self.fingerprints[name] = (self.fingerprints.get(name, 0) + one) & MASK
        self._waiting, self._held = [], 0

    def _next(self, index: int, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        """The tensor of a spec."""
        spec, tensor = self._specs[index], next(tensors, None)
        if tensor is None:
            raise TransferFailed(f"the source ended before {spec.name!r}")
        if tensor.shape != spec.shape:
            raise ShapeMismatch(spec.name, f"{list(spec.shape)} in the offer", str(tensor.shape))
        if not self._casts and tensor.dtype is not self._dtypes[index]:
            raise ShapeMismatch(spec.name, f"{spec.dtype} in the offer", dtype_name(tensor.dtype))
        return materialized(tensor)  # once, whatever the number of its pieces


_dtype = functools.cache(dtype_from)
