"""The receiving side of a weight update, bytewise: check, write, verify."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from hotbunk.rollout.backends.oracle.model import ITEMSIZE, Parameter, WeightGroup
from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    Bucket,
    BucketEntry,
    Manifest,
    ScopeKind,
    TensorSpec,
)
from hotbunk.rollout.errors import (
    DuplicateName,
    IncompleteUpdate,
    ShapeMismatch,
    TiedMismatch,
    TransferFailed,
    UnknownNames,
    UnsupportedTarget,
    UpdateRefused,
    VerifyFailed,
)
from hotbunk.rollout.fingerprint import KIND, fingerprint_bytes


def check_manifest(
    manifest: Manifest, groups: Mapping[str, WeightGroup], fed: Collection[str]
) -> None:
    """May this be applied to these groups? Looks at the offer only.

    :raises UpdateRefused: in the form that says why.
    """
    if manifest.fingerprint not in (KIND, "none"):
        raise UpdateRefused(f"fingerprints of kind {manifest.fingerprint!r} cannot be checked")
    scope = manifest.scope
    allowed = {ADAPTER_PREFIX + scope.name} if scope.kind is ScopeKind.ADAPTER else set(fed)
    for spec in manifest.tensors:
        if spec.group in groups and spec.group not in allowed:
            raise UnsupportedTarget(
                f"weight group {spec.group!r} cannot be updated",
                where=spec.name,
                remedy=f"this update may carry {', '.join(sorted(allowed)) or 'nothing'}",
            )
    _check_names(manifest, groups)
    for spec in manifest.tensors:
        group = groups[spec.group]
        _check_shape(spec, group.parameters[group.owner[spec.name]])
    if scope.kind is ScopeKind.PARTIAL:
        if not manifest.tensors:
            raise UpdateRefused("a partial update without a tensor")
        return
    sent = {(spec.group, groups[spec.group].owner[spec.name]) for spec in manifest.tensors}
    missing = [p for g in sorted(allowed) for p in groups[g].parameters if (g, p) not in sent]
    if missing:
        raise IncompleteUpdate(missing)


def _check_names(manifest: Manifest, groups: Mapping[str, WeightGroup]) -> None:
    seen: set[str] = set()
    unknown, twice = set(), set()
    for spec in manifest.tensors:
        owner = groups[spec.group].owner if spec.group in groups else {}
        for name in spec.names:
            if name in seen:
                twice.add(name)
            seen.add(name)
            # An alias that is not tied here would leave the engine's own tensor without content.
            if name not in owner or owner[name] != owner.get(spec.name):
                unknown.add(name)
    if unknown:
        raise UnknownNames(unknown)
    if twice:
        raise DuplicateName(twice)


def _check_shape(spec: TensorSpec, have: Parameter) -> None:
    size = math.prod(spec.shape) * ITEMSIZE.get(spec.dtype, 0)
    if (spec.shape, spec.dtype) != (have.shape, have.dtype) or spec.nbytes != size:
        raise ShapeMismatch(
            spec.name,
            f"{have.dtype}{list(have.shape)}, {have.nbytes} bytes",
            f"{spec.dtype}{list(spec.shape)}, {spec.nbytes} bytes",
        )


class Writer:
    """Writes the pieces of one update into groups and knows what is still missing."""

    def __init__(self, manifest: Manifest, groups: Mapping[str, WeightGroup]) -> None:
        self.buckets = 0
        self.nbytes = 0
        self._manifest = manifest
        self._groups = groups
        self._pieces: list[list[tuple[int, int]]] = [[] for _ in manifest.tensors]
        self._seconds = self._second_names()

    def write(self, bucket: Bucket) -> None:
        """Apply one bucket; nothing of it is kept.

        :raises TransferFailed: its table does not fit the offer or its own data.
        """
        with memoryview(bucket.data) as given, _bytewise(given) as data:
            if len(data) > self._manifest.bucket_bytes:
                raise TransferFailed(
                    f"bucket {self.buckets} has {len(data)} bytes and "
                    f"{self._manifest.bucket_bytes} were agreed on"
                )
            for entry in bucket.entries:
                self._write(entry, data)
        self.buckets += 1

    def finish(self) -> int:
        """All pieces are in; the number of manifest entries applied.

        :raises TransferFailed: some bytes never came.
        :raises TiedMismatch: one tensor came twice, under two names, with two contents.
        """
        short = [
            spec.name
            for spec, pieces in zip(self._manifest.tensors, self._pieces, strict=True)
            if sum(end - start for start, end in pieces) != spec.nbytes
        ]
        if short:
            raise TransferFailed(
                f"the stream ended before {', '.join(sorted(short)[:5])} was whole"
            )
        for index, content in self._seconds.items():
            spec = self._manifest.tensors[index]
            group = self._groups[spec.group]
            if group.read(spec.name) != content:
                raise TiedMismatch((group.owner[spec.name], spec.name))
        return len(self._manifest.tensors)

    def verify(self, sent: Mapping[str, int]) -> None:
        """Compare what lies in the arenas with what was sent.

        :raises VerifyFailed: with the names that differ or were never vouched for.
        """
        wrong = [
            spec.name
            for spec in self._manifest.tensors
            if sent.get(spec.name) != fingerprint_bytes(self._groups[spec.group].read(spec.name))
        ]
        if wrong:
            raise VerifyFailed(wrong)

    def _second_names(self) -> dict[int, bytearray]:
        """Tensors that share their storage with one sent before: kept apart until compared."""
        first: set[tuple[str, str]] = set()
        seconds = {}
        for index, spec in enumerate(self._manifest.tensors):
            key = spec.group, self._groups[spec.group].owner[spec.name]
            if key in first:
                seconds[index] = bytearray(spec.nbytes)
            first.add(key)
        return seconds

    def _write(self, entry: BucketEntry, data: memoryview) -> None:
        where = f"bucket {self.buckets}"
        if not 0 <= entry.index < len(self._manifest.tensors):
            raise TransferFailed(f"the table names tensor {entry.index}", where=where)
        spec, pieces = self._manifest.tensors[entry.index], self._pieces[entry.index]
        end = entry.start + entry.nbytes
        if entry.nbytes < 0 or entry.start < 0 or end > spec.nbytes:
            raise TransferFailed(
                f"bytes {entry.start} to {end} of {spec.name!r}, which has {spec.nbytes}",
                where=where,
            )
        if entry.offset < 0 or entry.offset + entry.nbytes > len(data):
            raise TransferFailed(f"the piece of {spec.name!r} lies outside the data", where=where)
        if _overlaps(pieces, entry.start, end):
            raise TransferFailed(f"bytes of {spec.name!r} came twice", where=where)
        pieces.append((entry.start, end))
        piece = data[entry.offset : entry.offset + entry.nbytes]
        if entry.index in self._seconds:
            self._seconds[entry.index][entry.start : end] = piece
        else:
            self._groups[spec.group].write(spec.name, entry.start, piece)
        self.nbytes += entry.nbytes


def _bytewise(view: memoryview) -> memoryview:
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view cannot be cast


def _overlaps(pieces: Iterable[tuple[int, int]], start: int, end: int) -> bool:
    return any(start < b and a < end for a, b in pieces)
