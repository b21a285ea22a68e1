"""What a walk of a source fills: streams of buckets, their takers, and copies kept for the next time.

Receivers that want the same bytes share a stream. A stream's buckets are cut once, and the copies
of a bucket are compiled once and run again in every sync whose tensors lie where they lay.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from hotbunk.checkpoint_engine.layout import Want, cut
from hotbunk.rollout.contract import BucketEntry
from hotbunk.rollout.kernels import CopyPlan, native_kernels


class Taker:
    """A receiver rank in a stream. It takes ``granted`` buckets without being asked again.

    ``target`` is its arena where the walk writes in place, with the places of each wanted tensor.
    """

    def __init__(
        self,
        window: int,
        target: torch.Tensor | None = None,
        places: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.window = window
        self.granted = 0
        self.gone = False
        self.target = target
        self.places = places


class Stream:
    """Receivers that get the same buckets, of at most ``room`` bytes.

    :param batch: bytes of source tensors that are held before they are copied (default: ``room``).
    :param halves: where buckets are packed; none if every taker is written in place.
    """

    def __init__(
        self,
        want: tuple[Want, ...],
        room: int,
        takers: Sequence[Taker],
        halves: Sequence[torch.Tensor],
        *,
        batch: int | None = None,
    ) -> None:
        self.want = want
        self.room = room
        self.batch = room if batch is None else batch
        self.takers = list(takers)
        self.halves = list(halves)
        self.table = cut(want, room)
        self.cached = self._fits_the_cache()

    @property
    def key(self) -> Hashable:
        """What a plan is made for, but for the tensors."""
        lie = [t.data_ptr() for t in self.halves]
        lie += [m.target.data_ptr() for m in self._in_place()]  # type: ignore[union-attr]
        return (self.want, self.room, self.batch, tuple(lie))

    def _fits_the_cache(self) -> bool:
        """Whether a bucket can wait in the processor's cache for who reads it."""
        kernels = native_kernels()
        on_host = bool(self.halves) and all(half.is_cpu for half in self.halves)
        if kernels is None or not on_host or any(self._in_place()):
            return False
        return sum(half.nbytes for half in self.halves) <= kernels.cache

    def alive(self) -> bool:
        """Whether anybody still wants it."""
        return any(not m.gone for m in self.takers)

    def _in_place(self) -> list[Taker]:
        return [m for m in self.takers if m.target is not None and not m.gone]

    def targets(self, number: int, position: int, entry: BucketEntry) -> Iterator[torch.Tensor]:
        """Every place of a piece: bytes in the half, and bytes in each arena."""
        if self.halves:
            half = self.halves[number % len(self.halves)]
            yield half[entry.offset : entry.offset + entry.nbytes]
        for taker in self._in_place():
            assert taker.target is not None
            for place in taker.places[position]:
                yield taker.target[place + entry.start : place + entry.start + entry.nbytes]


class Identity(NamedTuple):
    """A tensor that is the same as last time lies where it lay, in the same form."""

    address: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Identity:
        return Identity(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


class Held(NamedTuple):
    """A piece to copy."""

    position: int  # in Stream.want
    entry: BucketEntry
    tensor: torch.Tensor


class Batch:
    """Copies that are done together, and what is fingerprinted after them: by address alone."""

    def __init__(
        self, identities: list[Identity], plan: CopyPlan, sums: list[tuple[int, int, int]]
    ) -> None:
        self.identities = identities
        self.plan = plan
        self.sums = sums  # address, bytes, start


class Plans:
    """Compiled batches of one stream, kept from sync to sync. Holds no tensor of the source."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._batches: dict[int, Batch] = {}
        self.reused = 0
        self.compiled = 0

    def use(self, key: Hashable) -> None:
        """Forget everything unless it was made for the same."""
        if key != self._key:
            self._key, self._batches = key, {}

    def find(self, number: int, held: Sequence[Held]) -> Batch | None:
        batch = self._batches.get(number)
        if batch is None or len(batch.identities) != len(held):
            return None
        for identity, piece in zip(batch.identities, held, strict=True):
            if identity != Identity.of(piece.tensor):
                return None
        self.reused += 1
        return batch

    def keep(self, number: int, batch: Batch) -> None:
        self._batches[number] = batch
