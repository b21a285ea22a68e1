"""Packing tensors into buckets: one contiguous buffer and a table.

Exact for everything a model can hold: tensors and rows larger than a bucket (cut at element
boundaries), 0-d and empty tensors, views of any stride, mixed element types in any order (each
piece starts aligned), odd bucket sizes, an empty stream, tensors on another device. Casts happen
piece by piece, into the bucket: live bytes are one bucket and at most one tensor of the source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from hotbunk.rollout.binding import dtype_from
from hotbunk.rollout.contract import Bucket, BucketEntry, ReceiverLayout, TensorSpec
from hotbunk.rollout.errors import ConfigError, ShapeMismatch, TransferFailed
from hotbunk.rollout.fingerprint import MASK
from hotbunk.rollout.kernels import fingerprint

ALIGN = 64  # bytes; where a piece may start in a bucket
SMALLEST = 64  # bytes; below this no element is sure to fit


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
        table: list[BucketEntry] = []
        used = 0
        for index, spec in enumerate(self._specs):
            flat, dtype = self._flat(spec, next(tensors, None))
            element, size, start = dtype.itemsize, flat.numel() * dtype.itemsize, 0
            if self._with_fingerprints:
                self.fingerprints[spec.name] = 0
            while True:
                offset = -(-used // ALIGN) * ALIGN
                count = min(size - start, (room - offset) // element * element)
                if count > 0 or (size == 0 and offset <= room):
                    piece = self._buffer[offset : offset + count]
                    first, last = start // element, (start + count) // element
                    piece.view(dtype).copy_(flat[first:last])
                    if self._with_fingerprints:
                        self.fingerprints[spec.name] += fingerprint(piece, start)
                        self.fingerprints[spec.name] &= MASK
                    table.append(BucketEntry(index, start, count, offset))
                    used, start = offset + count, start + count
                    self.payload += count
                if start == size:
                    break
                yield Bucket(self._buffer[:used], tuple(table))
                table, used = [], 0
            del flat  # before the source gathers the next one
        if next(tensors, None) is not None:
            raise TransferFailed(f"the source has more than the {len(self._specs)} tensors it said")
        if table:
            yield Bucket(self._buffer[:used], tuple(table))

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
