"""Fingerprints of tensors in blocks, so that who reads a part can check it without the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotbunk.rollout.contract import BucketEntry, TensorSpec
from hotbunk.rollout.fingerprint import MASK
from hotbunk.rollout.kernels import fingerprints

BLOCK = 1 << 20  # bytes; what a reader of parts reads too much is less than two of these


class BlockSums:
    """Of each tensor's blocks, from buckets in any order. A tensor's own is the sum of its blocks'."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self.blocks = [[0] * -(-spec.nbytes // BLOCK) for spec in specs]

    def add(self, bucket: torch.Tensor, entries: Sequence[BucketEntry]) -> None:
        """The pieces of one bucket."""
        places: list[tuple[int, int]] = []
        pieces: list[tuple[torch.Tensor, int]] = []
        for entry in entries:
            start, end = entry.start, entry.start + entry.nbytes
            while start < end:
                stop = min((start // BLOCK + 1) * BLOCK, end)
                at = entry.offset + start - entry.start
                places.append((entry.index, start // BLOCK))
                pieces.append((bucket[at : at + stop - start], start))
                start = stop
        for (index, number), one in zip(places, fingerprints(pieces), strict=True):
            self.blocks[index][number] = (self.blocks[index][number] + one) & MASK

    def whole(self) -> dict[str, int]:
        """By name."""
        pairs = zip(self._specs, self.blocks, strict=True)
        return {spec.name: sum(sums) & MASK for spec, sums in pairs}
