"""A published set as a stream of buckets: read piece by piece into one buffer, cast on the way."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from hotbunk.checkpoint_engine import layout as wanted
from hotbunk.checkpoint_engine.layout import Want
from hotbunk.checkpoint_engine.published import OpenSet
from hotbunk.checkpoint_engine.transports.slicing import Checked, Part, Read
from hotbunk.rollout.contract import ITEMSIZE, Bucket, ReceiverLayout
from hotbunk.rollout.errors import SessionError, TransferFailed, VerifyFailed

if TYPE_CHECKING:
    import torch

LARGEST = 1 << 40  # bytes; a bucket size above this is a broken record
_CHUNK = 1 << 20  # bytes read at a time where they must be cast


class SetReader:
    """One walk over an open set. Runs in a thread; torch is needed only for casts and parts.

    Of a tensor that the receiver wants only a part of, only that part is read: exactly, or, where
    it is verified, the blocks that it lies in.

    :param layout: which tensors the receiver wants, and as what; None: all, as they are.
    :raises ShapeMismatch: it wants something that cannot be made of what is there.
    """

    def __init__(self, held: OpenSet, layout: ReceiverLayout | None) -> None:
        manifest = held.manifest
        if not wanted.SMALLEST <= manifest.bucket_bytes <= LARGEST:
            raise TransferFailed(f"buckets of {manifest.bucket_bytes} bytes")
        self.number = 0
        self.ended = False
        self._held = held
        self._specs = manifest.tensors
        self._want = {one.spec: one for one in wanted.wants(self._specs, layout)}
        self._room = wanted.room(manifest.bucket_bytes, tuple(self._want.values()))
        self._buckets: Iterator[Bucket] | None = None
        self._verify = manifest.fingerprint != "none"
        self._read: dict[str, int] = {}  # of what is cast whole: as read
        self._made: dict[str, int] = {}  # of what is cast, or a part: as handed out
        self._open: tuple[int, Read] | None = None

    def start(self) -> None:
        """:raises SessionError: the buckets were taken before."""
        if self._buckets is not None:
            raise SessionError("the buckets of this update were taken before")
        self._buckets = self._run()

    def next(self) -> Bucket | None:
        """The next bucket, or None at the end. Overwrites the last one.

        :raises VerifyFailed: a part of a tensor is not what the trainer published.
        """
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
        names = {self._specs[index].name for index in self._want}
        absent = names - said.keys()
        wrong = {name for name, found in self._read.items() if found != said.get(name)}
        if absent or wrong:
            raise VerifyFailed(absent | wrong, where=f"set {self._held.name}")
        return {name: self._made.get(name, said[name]) for name in names}

    def _run(self) -> Iterator[Bucket]:
        view = memoryview(mmap.mmap(-1, self._room))  # zeroed page by page; see DiskTransport.write
        for table in wanted.cut(tuple(self._want.values()), self._room):
            used = 0
            for entry in table:
                used = entry.offset + entry.nbytes
                self._fill(self._want[entry.index], entry.start, view[entry.offset : used])
            yield Bucket(view[:used], table)

    def _fill(self, want: Want, start: int, into: memoryview) -> None:
        """Bytes of what is wanted of a tensor, from ``start``."""
        spec = self._specs[want.spec]
        if self._open is None or self._open[0] != want.spec:
            self._open = (want.spec, self._reader(want))
        if spec.dtype != want.dtype:
            self._fill_cast(want, start, into)
            return
        self._open[1](start, into)
        if want.slices and self._verify:
            import torch

            data = torch.frombuffer(into, dtype=torch.uint8) if into else torch.empty(0)
            self._add(self._made, spec.name, data, start)

    def _reader(self, want: Want) -> Read:
        tensor: Read = partial(self._held.read, want.spec)
        if not want.slices:
            return tensor
        spec = self._specs[want.spec]
        if self._verify:
            sums, block = self._held.blocks(want.spec)
            tensor = Checked(spec, tensor, sums, block, f"set {self._held.name}").read
        return Part(spec, want.slices).reader(tensor)

    def _fill_cast(self, want: Want, start: int, into: memoryview) -> None:
        import torch

        from hotbunk.rollout.binding import dtype_from
        from hotbunk.rollout.kernels import copy_many

        assert self._open is not None
        spec, dtype = self._specs[want.spec], want.dtype
        have, made = ITEMSIZE[spec.dtype], ITEMSIZE[dtype]
        if self._verify:
            self._made.setdefault(spec.name, 0)
        staging = memoryview(bytearray(min(_CHUNK, len(into) // made * have)))
        done = 0  # bytes of ``into``
        while done < len(into):
            elements = min(len(staging) // have, (len(into) - done) // made)
            raw = staging[: elements * have]
            at = (start + done) // made * have
            self._open[1](at, raw)
            source = torch.frombuffer(raw, dtype=dtype_from(spec.dtype))
            piece = into[done : done + elements * made]
            target = torch.frombuffer(piece, dtype=dtype_from(dtype))
            copy_many([(target, source)])
            if self._verify:
                if not want.slices:  # of a part, its blocks were checked
                    self._add(self._read, spec.name, source, at)
                self._add(self._made, spec.name, target, start + done)
            done += len(piece)

    @staticmethod
    def _add(sums: dict[str, int], name: str, data: torch.Tensor, start: int) -> None:
        from hotbunk.rollout.fingerprint import MASK
        from hotbunk.rollout.kernels import fingerprint

        sums[name] = (sums.get(name, 0) + fingerprint(data, start)) & MASK
