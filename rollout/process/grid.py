"""Which rank of a replica holds what: data x pipeline x tensor parallel, tensor innermost.

Ranks of one data-parallel *copy* hold the model together; copies hold the same. What is true of
the whole model is a union over a copy's ranks, and must be equal in all copies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from hotbunk.rollout.contract import Manifest, Placement, ReceiverLayout, TensorSpec
from hotbunk.rollout.errors import IncompleteUpdate, UnknownNames, UpdateRefused, shown
from hotbunk.rollout.fingerprint import MASK

Slices = tuple[tuple[int, int], ...]  # (start, length) for every dimension; () is all of it
DIFFERENT = -1  # of a tensor that is not the same in all copies; no content has it


class Place(NamedTuple):
    """Where a rank is in the grid."""

    data: int
    pipeline: int
    tensor: int


class Grid(msgspec.Struct, frozen=True):
    """How many ranks there are, each way."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.data * self.shards

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.pipeline * self.tensor

    def place(self, rank: int) -> Place:
        """:raises ValueError: no such rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} of {self.size}")
        rest, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rest, self.pipeline)
        return Place(data, pipeline, tensor)

    def rank(self, place: Place) -> int:
        """The rank at a place. :raises ValueError: it is outside."""
        for at, size in zip(place, (self.data, self.pipeline, self.tensor), strict=True):
            if not 0 <= at < size:
                raise ValueError(f"{place} is outside of {self}")
        return (place.data * self.pipeline + place.pipeline) * self.tensor + place.tensor

    def copies(self) -> list[range]:
        """The ranks of each copy. The first of each leads it: requests go there."""
        return [range(n, n + self.shards) for n in range(0, self.size, self.shards)]


# -- what ranks of a copy have together -------------------------------------------------------


def check_union(manifest: Manifest, layouts: Sequence[ReceiverLayout | None]) -> None:
    """Do the ranks of one copy want everything that is offered, and every element of it once?

    Equal slices in several ranks count once (replicated heads, norms).

    :raises UnknownNames: tensors that no rank wants.
    :raises IncompleteUpdate: tensors of which no rank wants some part.
    :raises UpdateRefused: slices that overlap and are not equal.
    """
    unknown: set[str] = set()
    holes: set[str] = set()
    for spec in manifest.tensors:
        wanted = {_slices(layout, spec) for layout in layouts} - {None}
        if not wanted:
            unknown.update(spec.names)
            continue
        covered = _covered(spec.shape, frozenset(s for s in wanted if s is not None))
        if covered > 1:
            raise UpdateRefused(
                f"ranks want overlapping parts of {spec.name!r}: {shown([str(s) for s in wanted])}"
            )
        if covered < 1:
            holes.update(spec.names)
    if unknown:
        raise UnknownNames(unknown)
    if holes:
        raise IncompleteUpdate(holes)


def wanted_of(manifest: Manifest, layout: ReceiverLayout | None) -> int:
    """How many of the offered tensors a rank takes a part of."""
    return sum(_slices(layout, spec) is not None for spec in manifest.tensors)


def _slices(layout: ReceiverLayout | None, spec: TensorSpec) -> Slices | None:
    if layout is None:
        return ()
    places: list[Placement] = [layout.tensors[n] for n in spec.names if n in layout.tensors]
    if not places:
        return None
    whole = tuple((0, size) for size in spec.shape)
    return () if places[0].slices == whole else places[0].slices


@lru_cache(maxsize=4096)  # a model has many tensors and few ways to cut them
def _covered(shape: tuple[int, ...], parts: frozenset[Slices]) -> int:
    """How often the least covered element is covered (0, 1), or 2 where some is more than once."""
    whole = tuple((0, size) for size in shape)
    boxes = [part or whole for part in parts]
    if len(boxes) == 1:
        return int(boxes[0] == whole)
    cuts = [
        sorted({0, size, *(edge for b in boxes for edge in (b[dim][0], sum(b[dim])))})
        for dim, size in enumerate(shape)
    ]
    least = 1
    for cell in itertools.product(*(itertools.pairwise(c) for c in cuts)):
        count = sum(
            all(s <= low and high <= s + n for (low, high), (s, n) in zip(cell, box, strict=True))
            for box in boxes
        )
        if count > 1:
            return 2
        least = min(least, count)
    return least


def union_of(
    parts: Sequence[Mapping[str, int]], slices: Sequence[Mapping[str, Slices]]
) -> dict[str, int]:
    """Fingerprints of whole tensors from those of a copy's ranks, each of its part at its place.

    A rank that has no part of a tensor does not name it; where equal parts differ, or one rank has
    the whole and another a slice, the value is :data:`DIFFERENT`.
    """
    found: dict[str, dict[Slices, int]] = {}
    broken = set()
    for values, its in zip(parts, slices, strict=True):
        for name, value in values.items():
            known = found.setdefault(name, {})
            if known.setdefault(its.get(name, ()), value) != value or value == DIFFERENT:
                broken.add(name)
    broken |= {name for name, known in found.items() if len(known) > 1 and () in known}
    return {
        name: DIFFERENT if name in broken else sum(known.values()) & MASK
        for name, known in found.items()
    }


def bytes_of(shape: Sequence[int], itemsize: int, slices: Slices) -> list[tuple[int, int]]:
    """Where the rows of a slice lie in the whole tensor's contiguous form: (start, bytes) each."""
    if not slices:
        return [(0, math.prod(shape) * itemsize)]
    inner = len(shape)
    while inner > 0 and slices[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    if inner == 0:
        return [(0, math.prod(shape) * itemsize)]
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    start, length = slices[inner - 1]
    run = length * strides[inner - 1]
    first = start * strides[inner - 1]
    outer = [range(s, s + n) for s, n in slices[: inner - 1]]
    return [
        (first + sum(at * strides[dim] for dim, at in enumerate(index)), run)
        for index in itertools.product(*outer)
    ]
