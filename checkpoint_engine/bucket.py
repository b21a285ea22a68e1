"""Packing tensors into buckets: one contiguous buffer and a table.

Exact for everything a model can hold: tensors and rows larger than a bucket (cut at element
boundaries), 0-d and empty tensors, views of any stride, mixed element types in any order (each
piece starts aligned), odd bucket sizes, an empty stream, tensors on another device. Casts happen
piece by piece, into the bucket. Small tensors are copied many at a time: live bytes are one bucket,
at most one tensor of the source, and small ones that add up to a sixteenth of a bucket at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from hotbunk.rollout.binding import dtype_from
from hotbunk.rollout.contract import Bucket, BucketEntry, ReceiverLayout, TensorSpec
from hotbunk.rollout.errors import ConfigError, ShapeMismatch, TransferFailed
from hotbunk.rollout.fingerprint import MASK
from hotbunk.rollout.kernels import copy_many, fingerprints

ALIGN = 64  # bytes; where a piece may start in a bucket
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
        self._layout = layout
        self._with_fingerprints = fingerprints
        # Copies to do, and what to fingerprint after them: name, piece, the byte it starts at.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._packed: list[tuple[str, torch.Tensor, int]] = []
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
        table: list[BucketEntry] = []
        used = 0
        for index, spec in enumerate(self._specs):
            flat, dtype = self._flat(spec, next(tensors, None))
            element, size, start = dtype.itemsize, flat.numel() * dtype.itemsize, 0
            if self._with_fingerprints:
                self.fingerprints[spec.name] = 0
            self._held += flat.nbytes
            wait = flat.nbytes <= small and self._held <= most_held
            while True:
                offset = -(-used // ALIGN) * ALIGN
                count = min(size - start, (room - offset) // element * element)
                if count > 0 or (size == 0 and offset <= room):
                    piece = self._buffer[offset : offset + count]
                    first, last = start // element, (start + count) // element
                    self._copies.append((piece.view(dtype), flat[first:last]))
                    if self._with_fingerprints:
                        self._packed.append((spec.name, piece, start))
                    table.append(BucketEntry(index, start, count, offset))
                    used, start = offset + count, start + count
                    self.payload += count
                if start == size:
                    break
                self._copy()
                yield Bucket(self._buffer[:used], tuple(table))
                table, used = [], 0
            if not wait:
                self._copy()
            del flat  # before the source gathers the next one
        if next(tensors, None) is not None:
            raise TransferFailed(f"the source has more than the {len(self._specs)} tensors it said")
        if table:
            self._copy()
            yield Bucket(self._buffer[:used], tuple(table))

    def _copy(self) -> None:
        """Do what is to be copied, and let go of the source's tensors."""
        copy_many(self._copies)
        sums = fingerprints([(piece, start) for _, piece, start in self._packed])
        for (name, _, _), one in zip(self._packed, sums, strict=True):
            self.fingerprints[name] = (self.fingerprints[name] + one) & MASK
        self._copies, self._packed, self._held = [], [], 0

    def _flat(
        self, spec: TensorSpec, tensor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.dtype]:
        """The tensor's elements in order, and the element type they travel as."""
        if tensor is None:
            raise TransferFailed(f"the source ended before {spec.name!r}")
        if tuple(tensor.shape) != spec.shape:
            raise ShapeMismatch(spec.name, f"{list(spec.shape)} in the offer", str(tensor.shape))
        dtype = tensor.dtype
        if self._layout is not None and spec.name in self._layout.tensors:
            dtype = dtype_from(self._layout.tensors[spec.name].dtype)
        return tensor.detach().reshape(-1), dtype
