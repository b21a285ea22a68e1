"""A published set as a stream of buckets: read piece by piece into one buffer, cast on the way."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping

from hotbunk.checkpoint_engine.published import OpenSet
from hotbunk.rollout.contract import (
    ITEMSIZE,
    Bucket,
    BucketEntry,
    ReceiverLayout,
    TensorSpec,
)
from hotbunk.rollout.errors import SessionError, ShapeMismatch, TransferFailed, VerifyFailed
from hotbunk.rollout.intake import FLOATS

ALIGN = 64  # bytes; where a piece may start in a bucket
SMALLEST = 64  # bytes; below this no element is sure to fit
LARGEST = 1 << 40  # bytes; a bucket size above this is a broken record
_CHUNK = 1 << 20  # bytes read at a time where they must be cast


class SetReader:
    """One walk over an open set. Runs in a thread; torch is needed only for casts.

    :param layout: which tensors the receiver wants, and as what; None: all, as they are. Slices
        are refused: a part cannot be checked against the fingerprint of the whole.
    :raises ShapeMismatch: it wants something that cannot be made of what is there.
    """

    def __init__(self, held: OpenSet, layout: ReceiverLayout | None) -> None:
        manifest = held.manifest
        if not SMALLEST <= manifest.bucket_bytes <= LARGEST:
            raise TransferFailed(f"buckets of {manifest.bucket_bytes} bytes")
        self.number = 0
        self.ended = False
        self._held = held
        self._specs = manifest.tensors
        # Tensors to hand out, by their place in the manifest, and the element type of each.
        self._wanted = {
            index: dtype
            for index, spec in enumerate(self._specs)
            if (dtype := _wanted(spec, layout)) is not None
        }
        self._room = self._bucket_size(manifest.bucket_bytes)
        self._buckets: Iterator[Bucket] | None = None
        self._verify = manifest.fingerprint != "none"
        self._read: dict[str, int] = {}  # of what is cast: as read, and as handed out
        self._cast: dict[str, int] = {}

    def start(self) -> None:
        """:raises SessionError: the buckets were taken before."""
        if self._buckets is not None:
            raise SessionError("the buckets of this update were taken before")
        self._buckets = self._run()

    def next(self) -> Bucket | None:
        """The next bucket, or None at the end. Overwrites the last one."""
        assert self._buckets is not None
        bucket = next(self._buckets, None)
        if bucket is None:
            self.ended = True
        else:
            self.number += 1
        return bucket

    def fingerprints(self) -> Mapping[str, int]:
        """What the receiver must find in its memory.

        :raises VerifyFailed: what was cast was not what the trainer published.
        """
        if not self._verify:
            return {}
        said = self._held.record.fingerprints
        names = {self._specs[index].name for index in self._wanted}
        absent = names - said.keys()
        wrong = {name for name, found in self._read.items() if found != said.get(name)}
        if absent or wrong:
            raise VerifyFailed(absent | wrong, where=f"set {self._held.name}")
        return {name: self._cast.get(name, said[name]) for name in names}

    def _bucket_size(self, wanted: int) -> int:
        whole = 0
        for index, dtype in self._wanted.items():
            nbytes = math.prod(self._specs[index].shape) * ITEMSIZE[dtype]
            whole = -(-whole // ALIGN) * ALIGN + nbytes
        return max(min(wanted, whole), SMALLEST)

    def _run(self) -> Iterator[Bucket]:
        view = memoryview(mmap.mmap(-1, self._room))  # zeroed page by page; see DiskTransport.write
        table: list[BucketEntry] = []
        used = 0
        for index, dtype in self._wanted.items():
            element, start = ITEMSIZE[dtype], 0
            size = math.prod(self._specs[index].shape) * element
            while True:
                offset = -(-used // ALIGN) * ALIGN
                count = min(size - start, (self._room - offset) // element * element)
                if count > 0 or (size == 0 and offset <= self._room):
                    self._fill(index, start, view[offset : offset + count])
                    table.append(BucketEntry(index, start, count, offset))
                    used, start = offset + count, start + count
                if start == size:
                    break
                yield Bucket(view[:used], tuple(table))
                table, used = [], 0
        if table:
            yield Bucket(view[:used], tuple(table))

    def _fill(self, index: int, start: int, into: memoryview) -> None:
        spec, dtype = self._specs[index], self._wanted[index]
        if spec.dtype == dtype:
            self._held.read(index, start, into)
        else:
            self._fill_cast(index, start, into)

    def _fill_cast(self, index: int, start: int, into: memoryview) -> None:
        import torch

        from hotbunk.rollout.binding import dtype_from
        from hotbunk.rollout.fingerprint import MASK
        from hotbunk.rollout.kernels import copy_many, fingerprint

        spec, dtype = self._specs[index], self._wanted[index]
        name, have, want = spec.name, ITEMSIZE[spec.dtype], ITEMSIZE[dtype]
        self._read.setdefault(name, 0)
        self._cast.setdefault(name, 0)
        staging = memoryview(bytearray(min(_CHUNK, len(into) // want * have)))
        done = 0  # bytes of ``into``
        while done < len(into):
            elements = min(len(staging) // have, (len(into) - done) // want)
            raw = staging[: elements * have]
            at = (start + done) // want * have
            self._held.read(index, at, raw)
            source = torch.frombuffer(raw, dtype=dtype_from(spec.dtype))
            piece = into[done : done + elements * want]
            target = torch.frombuffer(piece, dtype=dtype_from(dtype))
            copy_many([(target, source)])
            if self._verify:
                self._read[name] = (self._read[name] + fingerprint(source, at)) & MASK
                self._cast[name] = (self._cast[name] + fingerprint(target, start + done)) & MASK
            done += len(piece)


def _wanted(spec: TensorSpec, layout: ReceiverLayout | None) -> str | None:
    """The element type a tensor is handed out as; None: nobody wants it."""
    if layout is None:
        return spec.dtype
    places = [layout.tensors[name] for name in spec.names if name in layout.tensors]
    for place in places:
        cast = {place.dtype, spec.dtype} <= FLOATS
        if place.shape != spec.shape or (place.dtype != spec.dtype and not cast):
            raise ShapeMismatch(
                spec.name, f"{place.dtype}{list(place.shape)}", f"{spec.dtype}{list(spec.shape)}"
            )
    return places[0].dtype if places else None
