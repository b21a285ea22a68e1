"""The receiving side's checks, for every backend: an offer before a byte, a bucket before a write.

Nothing here touches tensors; a backend says what it has, and writes only what passed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from hotbunk.rollout import errors
from hotbunk.rollout.contract import ITEMSIZE, Bucket, BucketEntry, Manifest, Placement, ScopeKind

# Types between which a cast is a rounding. Quantised contents need scales, not a cast.
FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


def check_offer(
    manifest: Manifest,
    known: Mapping[str, Placement],
    required: Collection[Collection[str]],
    *,
    castable: bool = True,
) -> None:
    """May this offer be accepted by an engine that has the tensors ``known``?

    ``required`` are the contents a full update (or one of a whole adapter) must cover, each as the
    set of names tied to it: one of them is enough. ``castable``: the engine, or a layout it
    publishes, takes one float type for another.

    :raises DuplicateName, UnknownNames, ShapeMismatch, IncompleteUpdate: nothing was written.
    """
    seen: set[str] = set()
    twice = {n for spec in manifest.tensors for n in spec.names if n in seen or seen.add(n)}  # type: ignore[func-returns-value]
    if twice:
        raise errors.DuplicateName(twice)
    unknown = seen - known.keys()
    if unknown:
        raise errors.UnknownNames(unknown)
    for spec in manifest.tensors:
        size = ITEMSIZE.get(spec.dtype, 0) * math.prod(spec.shape)
        if spec.nbytes != size or spec.dtype not in ITEMSIZE:
            raise errors.ShapeMismatch(
                spec.name, f"{size} bytes by its shape", f"{spec.dtype} in {spec.nbytes} bytes"
            )
        for name in spec.names:
            have = known[name]
            cast = castable and {have.dtype, spec.dtype} <= FLOATS
            if have.shape != spec.shape or (have.dtype != spec.dtype and not cast):
                raise errors.ShapeMismatch(
                    name,
                    f"{have.dtype}{list(have.shape)}",
                    f"{spec.dtype}{list(spec.shape)}",
                )
    if manifest.scope.kind in (ScopeKind.FULL, ScopeKind.ADAPTER):
        absent = {name for names in required if not seen.intersection(names) for name in names}
        if absent:
            raise errors.IncompleteUpdate(absent)
    elif not seen:
        raise errors.IncompleteUpdate({"any tensor at all"})


class Intake:
    """Counts what arrives: every byte of every tensor once, in order, inside its bucket.

    :param sizes: bytes of each manifest entry as the receiver asked for it.
    """

    def __init__(self, manifest: Manifest, sizes: Collection[int]) -> None:
        self._names = [spec.name for spec in manifest.tensors]
        self._sizes = list(sizes)
        self._received = [0] * len(self._sizes)
        self.nbytes = 0
        self.buckets = 0

    def check(self, bucket: Bucket, data_bytes: int | None) -> tuple[BucketEntry, ...]:
        """The bucket's entries, if every one of them may be written.

        ``data_bytes`` is the size of the bucket's data; None: the sender wrote the pieces itself.

        :raises TransferFailed: a hostile or broken table; nothing of this bucket was written.
        """
        progress = dict[int, int]()
        for entry in bucket.entries:
            if not 0 <= entry.index < len(self._sizes):
                raise errors.TransferFailed(
                    f"bucket {self.buckets} names tensor {entry.index} of {len(self._sizes)}"
                )
            name, size = self._names[entry.index], self._sizes[entry.index]
            at = progress.get(entry.index, self._received[entry.index])
            if entry.start != at or entry.nbytes < 0 or at + entry.nbytes > size:
                raise errors.TransferFailed(
                    f"bucket {self.buckets} puts bytes {entry.start}..+{entry.nbytes} into "
                    f"{name!r}, which has {size} and received {at}"
                )
            inside = data_bytes is None or 0 <= entry.offset <= data_bytes - entry.nbytes
            if not inside:
                raise errors.TransferFailed(
                    f"bucket {self.buckets} is cut short: {name!r} lies at "
                    f"{entry.offset}..+{entry.nbytes} of {data_bytes} bytes"
                )
            progress[entry.index] = at + entry.nbytes
        for index, received in progress.items():
            self._received[index] = received
        self.buckets += 1
        self.nbytes += sum(entry.nbytes for entry in bucket.entries)
        return bucket.entries

    def finish(self) -> int:
        """How many tensors arrived. :raises TransferFailed: some did not, or not wholly."""
        short = {
            name
            for name, got, size in zip(self._names, self._received, self._sizes, strict=True)
            if got != size
        }
        if short:
            raise errors.TransferFailed(
                f"the stream ended before {len(short)} tensor(s): {errors.shown(short)}"
            )
        return len(self._names)
