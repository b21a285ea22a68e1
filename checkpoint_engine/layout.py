"""What a receiver rank wants of an offer, checked, and how that is cut into buckets.

All of it follows from the manifest and the layout alone: no tensor is looked at, so it is worked
out once, and the same for every sync of the same model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from hotbunk.rollout.contract import ITEMSIZE, BucketEntry, Placement, ReceiverLayout, TensorSpec
from hotbunk.rollout.errors import ShapeMismatch, UpdateRefused
from hotbunk.rollout.intake import FLOATS

ALIGN = 64  # bytes; where a piece may start in a bucket
SMALLEST = 64  # bytes; below this no element is sure to fit in a bucket


class Want(NamedTuple):
    """One tensor as a receiver wants it. Equal wants are served by the same bytes."""

    spec: int  # index into Manifest.tensors
    dtype: str
    slices: tuple[tuple[int, int], ...]
    nbytes: int


def wants(specs: Sequence[TensorSpec], layout: ReceiverLayout | None) -> tuple[Want, ...]:
    """What to send, in order; without a layout every tensor whole.

    :raises ShapeMismatch: the layout wants something that the tensor is not.
    """
    found = []
    for index, spec in enumerate(specs):
        if layout is None:
            found.append(Want(index, spec.dtype, (), spec.nbytes))
            continue
        places = [layout.tensors[name] for name in spec.names if name in layout.tensors]
        for place in places:
            _check(spec, place)
        if places:
            first = places[0]
            nbytes = math.prod(first.shape) * ITEMSIZE[first.dtype]
            found.append(Want(index, first.dtype, first.slices, nbytes))
    return tuple(found)


def _check(spec: TensorSpec, place: Placement) -> None:
    cast = {spec.dtype, place.dtype} <= FLOATS
    shape = spec.shape
    if place.slices:
        inside = len(place.slices) == len(spec.shape) and all(
            start >= 0 and length >= 0 and start + length <= size
            for (start, length), size in zip(place.slices, spec.shape, strict=True)
        )
        shape = tuple(length for _, length in place.slices) if inside else ()
        if not inside:
            raise ShapeMismatch(spec.name, f"slices {place.slices}", f"{list(spec.shape)}")
    if place.shape != shape or place.dtype not in ITEMSIZE:
        raise ShapeMismatch(spec.name, f"{place.dtype}{list(place.shape)}", f"{list(shape)}")
    if place.dtype != spec.dtype and not cast:
        raise ShapeMismatch(spec.name, place.dtype, f"{spec.dtype}, which is not cast to it")


def room(wanted: int, want: Sequence[Want]) -> int:
    """Bytes to allocate for a bucket: never more than the whole stream needs."""
    whole = 0
    for one in want:
        whole = -(-whole // ALIGN) * ALIGN + one.nbytes
    return max(min(wanted, whole), SMALLEST)


def cut(want: Sequence[Want], size: int) -> tuple[tuple[BucketEntry, ...], ...]:
    """The tables of all buckets of ``size`` bytes. Tensors are cut at element boundaries."""
    tables: list[tuple[BucketEntry, ...]] = []
    table: list[BucketEntry] = []
    used = 0
    for one in want:
        element, start = ITEMSIZE[one.dtype], 0
        while True:
            offset = -(-used // ALIGN) * ALIGN
            count = min(one.nbytes - start, (size - offset) // element * element)
            if count > 0 or (one.nbytes == 0 and offset <= size):
                table.append(BucketEntry(one.spec, start, count, offset))
                used, start = offset + count, start + count
            if start == one.nbytes:
                break
            tables.append(tuple(table))
            table, used = [], 0
    if table:
        tables.append(tuple(table))
    return tuple(tables)


def places_in(
    specs: Sequence[TensorSpec],
    want: Sequence[Want],
    layout: ReceiverLayout,
    arena_bytes: int,
) -> tuple[tuple[int, ...], ...] | None:
    """Where each wanted tensor lies in the receiver's arena: offsets, several where names do.

    None: it cannot be written in place, because a place is not published, two names of a tensor
    want different bytes, or tensors lie over one another (the receiver then compares contents).

    :raises UpdateRefused: a place outside the arena, or one that its element type cannot have.
    """
    found: list[tuple[int, ...]] = []
    spans: list[tuple[int, int]] = []
    writable = True
    for one in want:
        spec = specs[one.spec]
        offsets = []
        for name in spec.names:
            place = layout.tensors.get(name)
            if place is None:
                continue
            if place.offset < 0 or (place.dtype, place.slices) != (one.dtype, one.slices):
                writable = False
                continue
            if place.offset + one.nbytes > arena_bytes or place.offset % ITEMSIZE[one.dtype]:
                raise UpdateRefused(
                    f"{name!r} would lie at {place.offset}..+{one.nbytes} of an arena of "
                    f"{arena_bytes} bytes"
                )
            offsets.append(place.offset)
        found.append(tuple(dict.fromkeys(offsets)))
        if one.nbytes:
            spans += [(offset, offset + one.nbytes) for offset in found[-1]]
    spans.sort()
    apart = all(end <= low for (_, end), (low, _) in itertools.pairwise(spans))
    return tuple(found) if writable and apart else None
