"""One update's buckets, written where routes lead: in place where a part lies in one piece.

A *box* is the part of a checkpoint tensor that a rank holds, ``(start, length)`` for every
dimension. Where a tensor's pieces all hold the same box, in contiguous memory, the sender is asked
for that box alone, and its bytes go straight there. Any other tensor is asked for whole, collected
in host memory, and scattered from there; only those take memory of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hotbunk.rollout import errors
from hotbunk.rollout.arena import Arena
from hotbunk.rollout.backends.vllm.routes import Piece, Route
from hotbunk.rollout.binding import dtype_name
from hotbunk.rollout.contract import (
    ITEMSIZE,
    TARGET,
    Bucket,
    Manifest,
    Placement,
    Scope,
    ScopeKind,
    TensorSpec,
)
from hotbunk.rollout.intake import Intake
from hotbunk.rollout.kernels import as_bytes, copy_many, fingerprint, fingerprints

Box = tuple[tuple[int, int], ...]


def open_groups(manifest: Manifest, scope: Scope) -> None:
    """:raises UpdateRefused: an update of what is not mapped, say a draft model."""
    if scope.kind not in (ScopeKind.FULL, ScopeKind.PARTIAL):
        raise errors.Unsupported(f"{scope.kind.value} updates", "vllm")
    others = {spec.group for spec in manifest.tensors} - {TARGET}
    if others:
        raise errors.UnsupportedTarget(f"no weight group named {errors.shown(others)}")


def box_of(piece: Piece, shape: tuple[int, ...]) -> Box | None:
    """The box that a piece holds of a contiguous tensor of this shape; None: it is no box."""
    if len(piece.shape) != len(shape):
        return None
    box, offset = [], piece.offset
    strides = torch.empty(shape, device="meta").stride()
    for size, its, stride, whole in zip(piece.shape, piece.stride, strides, shape, strict=True):
        start, offset = divmod(offset, stride) if stride else (0, offset)
        if (size > 1 and its != stride) or start + size > whole:
            return None
        box.append((start, size))
    return tuple(box)


def direct_box(route: Route) -> Box | None:
    """The box that can be written in place; None: the tensor is to be sent whole."""
    boxes = {box_of(piece, route.shape) for piece in route.pieces}
    lies = all(piece.into.is_contiguous() for piece in route.pieces)
    return boxes.pop() if lies and len(boxes) == 1 else None


def slices_of(route: Route) -> Box:
    """What tells a rank's part from those of others; empty: it holds all of the tensor."""
    whole = tuple((0, size) for size in route.shape)
    boxes = {box_of(piece, route.shape) for piece in route.pieces}
    if boxes == {whole} or route.elements == math.prod(route.shape):
        return ()
    if None in boxes:  # no box, but still these elements: by where they begin
        return tuple((piece.offset, math.prod(piece.shape)) for piece in route.pieces)
    return tuple(span for box in sorted(b for b in boxes if b is not None) for span in box)


def placement_of(route: Route, arena: Arena | None) -> Placement:
    """What the sender is asked for, and where it lies in the arena, if it lies there once."""
    dtype, box = dtype_name(route.dtype), direct_box(route)
    if box is None:
        return Placement(dtype, route.shape)
    offset = -1
    if arena is not None and len(route.pieces) == 1:
        at = route.pieces[0].into.data_ptr() - arena.address
        offset = at if 0 <= at < max(arena.size, 1) else -1
    whole = tuple((0, size) for size in route.shape)
    shape = tuple(size for _, size in box)
    return Placement(dtype, shape, offset, () if box == whole else box)


class Slots:
    """Where each of these tensors goes. The same for every update that offers the same.

    Of each tensor: its routes; bytes that are expected; flat bytes of the places it is written to, or
    nothing where it is collected first; and the name of an earlier tensor whose place it shares.
    """

    def __init__(self, specs: Sequence[TensorSpec], routes: Mapping[str, Route]) -> None:
        self.routes: list[list[Route]] = []
        self.sizes: list[int] = []
        self.places: list[list[torch.Tensor] | None] = []
        self.earlier: list[str] = []
        taken: dict[object, str] = {}
        for spec in specs:
            distinct = {tuple(p.key for p in routes[n].pieces): routes[n] for n in spec.names}
            its = list(distinct.values())
            self.earlier.append(next((taken[key] for key in distinct if key in taken), ""))
            for key in distinct:
                taken.setdefault(key, spec.name)
            self.routes.append(its)
            boxes = {direct_box(route) for route in its}
            box = boxes.pop() if len(boxes) == 1 else None
            lies = None if box is None else [as_bytes(p.into) for r in its for p in r.pieces]
            self.places.append(lies)
            count = math.prod(spec.shape if box is None else (size for _, size in box))
            self.sizes.append(count * ITEMSIZE[dtype_name(its[0].dtype)])


class Landing:
    """Writes one update's buckets, and says whether what lies there is what was sent.

    :param slots: of these tensors over these routes, where they are known already.
    """

    def __init__(
        self, manifest: Manifest, routes: Mapping[str, Route], slots: Slots | None = None
    ) -> None:
        slots = slots or Slots(manifest.tensors, routes)
        self._specs = manifest.tensors
        self._routes, self._earlier, self._sizes = slots.routes, slots.earlier, slots.sizes
        # Of each entry, flat bytes: the places it goes to, or memory of its own.
        self._places: list[list[torch.Tensor]] = []
        self._whole: dict[int, torch.Tensor] = {}
        for index, (spec, lies) in enumerate(zip(self._specs, slots.places, strict=True)):
            if lies is None:
                dtype = self._routes[index][0].dtype
                self._whole[index] = torch.empty(spec.shape, dtype=dtype)
                lies = [as_bytes(self._whole[index])]
            self._places.append(lies)
        self._broken: set[str] = set()
        self._landed: dict[str, int] = {}  # fingerprints of those that were sent whole
        self._got = [0] * len(self._sizes)
        self.intake = Intake(manifest, self._sizes)

    @torch.no_grad()
    def write(self, bucket: Bucket) -> None:
        """Copy a bucket's pieces in.

        :raises TransferFailed: a broken table.
        :raises TiedMismatch: two contents for one place.
        """
        data = bucket.data
        if data is None:  # the sender wrote it
            self.intake.check(bucket, None)
            return
        if not isinstance(data, torch.Tensor):
            view = memoryview(data).cast("B")
            if view.readonly:  # torch wants buffers that it could write to
                view = memoryview(bytearray(view))
            data = torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for entry in self.intake.check(bucket, data.numel()):
            piece = data[entry.offset : entry.offset + entry.nbytes]
            first = self._earlier[entry.index]
            for place in self._places[entry.index]:
                part = place[entry.start : entry.start + entry.nbytes]
                if not first or entry.index in self._whole:
                    copies.append((part, piece))
                elif not torch.equal(part, piece.to(part.device)):
                    raise errors.TiedMismatch({first, self._specs[entry.index].name})
            self._got[entry.index] += entry.nbytes
        copy_many(copies)
        for index in {entry.index for entry in bucket.entries}:
            if index in self._whole and self._got[index] == self._sizes[index]:
                self._scatter(index)

    def finish(self) -> int:
        """How many tensors arrived. :raises TransferFailed: some did not, or not wholly."""
        for index in [n for n, size in enumerate(self._sizes) if not size and n in self._whole]:
            self._scatter(index)
        return self.intake.finish()

    @torch.no_grad()
    def differing(self, expected: Mapping[str, int]) -> list[str]:
        """Names whose content in the engine is not what was sent."""
        held = [
            (spec.name, place)
            for index, spec in enumerate(self._specs)
            if spec.name not in self._landed
            for place in self._places[index]
        ]
        found = fingerprints([(place, 0) for _, place in held])
        pairs = [(name, one) for (name, _), one in zip(held, found, strict=True)]
        pairs += self._landed.items()
        wrong = {name for name, one in pairs if one != expected.get(name)}
        return sorted(wrong | self._broken)

    def _scatter(self, index: int) -> None:
        """A tensor is whole: put it where it belongs, and see that it is there."""
        tensor, name = self._whole.pop(index), self._specs[index].name
        for route in self._routes[index]:
            if not self._earlier[index]:
                route.write(tensor)
            elif not _lies(route, tensor):
                raise errors.TiedMismatch({self._earlier[index], name})
            if not _lies(route, tensor):
                self._broken.add(name)
        self._landed[name] = fingerprint(tensor)
        self._places[index] = []


def _lies(route: Route, tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are where they belong."""
    return all(
        torch.equal(
            as_bytes(piece.into.contiguous()),
            as_bytes(piece.of(tensor).to(piece.into.device).contiguous()),
        )
        for piece in route.pieces
    )
