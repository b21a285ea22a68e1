"""The receiving side of a weight update, bytewise: check, write, verify."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar

from hotbunk.rollout.backends.oracle.model import WeightGroup
from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    Bucket,
    Manifest,
    Placement,
    ScopeKind,
    TensorSpec,
)
from hotbunk.rollout.errors import (
    TiedMismatch,
    TransferFailed,
    UnknownNames,
    UnsupportedTarget,
    UpdateRefused,
    VerifyFailed,
)
from hotbunk.rollout.fingerprint import KIND, fingerprint_bytes
from hotbunk.rollout.intake import Intake, check_offer


def check_manifest(
    manifest: Manifest, groups: Mapping[str, WeightGroup], fed: Collection[str]
) -> None:
    """May this be applied to these groups? Looks at the offer only.

    An adapter update must carry its adapter whole; a full one every group in ``fed``.

    :raises UpdateRefused: in the form that says why.
    """
    if manifest.fingerprint not in (KIND, "none"):
        raise UpdateRefused(f"fingerprints of kind {manifest.fingerprint!r} cannot be checked")
    scope = manifest.scope
    whole = {ADAPTER_PREFIX + scope.name} if scope.kind is ScopeKind.ADAPTER else set(fed)
    for spec in manifest.tensors:
        if spec.group in groups and spec.group not in whole:
            raise UnsupportedTarget(
                f"weight group {spec.group!r} cannot be updated",
                where=spec.name,
                remedy=f"this update may carry {', '.join(sorted(whole)) or 'nothing'}",
            )
    known = {
        name: Placement(p.dtype, p.shape)
        for group in whole
        for p in groups[group].parameters.values()
        for name in p.names
    }
    required = [p.names for group in whole for p in groups[group].parameters.values()]
    check_offer(manifest, known, required, castable=False)
    strays = set()
    for spec in manifest.tensors:
        owner = groups[spec.group].owner if spec.group in groups else {}
        strays |= set(spec.names) - owner.keys()
    if strays:
        raise UnknownNames(strays)


class Writer:
    """Writes the pieces of one update into groups; nothing of a bucket is kept.

    ``verified``: what a comparison with fingerprints says, as reports have it.
    """

    verified: ClassVar[str] = "applied"

    def __init__(self, manifest: Manifest, groups: Mapping[str, WeightGroup]) -> None:
        self.intake = Intake(manifest, [spec.nbytes for spec in manifest.tensors])
        self._manifest = manifest
        self._groups = groups
        # Per tensor, the parameters it is written to: each once, whoever comes first. A tensor
        # for one that was served already is kept aside until it can be compared.
        self._first: list[list[str]] = []
        self._aside: dict[int, tuple[str, bytearray]] = {}
        served: set[tuple[str, str]] = set()
        for index, spec in enumerate(manifest.tensors):
            owner = groups[spec.group].owner
            wanted = dict.fromkeys(owner[name] for name in spec.names)
            self._first.append([p for p in wanted if (spec.group, p) not in served])
            for p in wanted.keys() - self._first[-1]:
                self._aside[index] = (p, bytearray(spec.nbytes))
            served |= {(spec.group, p) for p in wanted}

    def write(self, bucket: Bucket) -> None:
        """Apply one bucket.

        :raises TransferFailed: its table does not fit the offer or its own data.
        """
        lent = bucket.data  # a tensor of the host lends its bytes, and needs no torch here
        lent = lent.numpy() if hasattr(lent, "numpy") else lent
        with memoryview(lent) as given, _bytewise(given) as data:
            if len(data) > self._manifest.bucket_bytes:
                raise TransferFailed(
                    f"a bucket of {len(data)} bytes came and "
                    f"{self._manifest.bucket_bytes} were agreed on"
                )
            for entry in self.intake.check(bucket, len(data)):
                piece = data[entry.offset : entry.offset + entry.nbytes]
                group = self._groups[self._manifest.tensors[entry.index].group]
                for parameter in self._first[entry.index]:
                    self._place(group, parameter, entry.start, piece)
                if entry.index in self._aside:
                    content = self._aside[entry.index][1]
                    content[entry.start : entry.start + entry.nbytes] = piece

    def _place(self, group: WeightGroup, parameter: str, start: int, piece: memoryview) -> None:
        group.write(parameter, start, piece)

    def flip_a_bit(self, bucket: Bucket) -> None:
        """Corrupt something that this bucket brought, and that no later one brings again."""
        for entry in bucket.entries:
            group = self._groups[self._manifest.tensors[entry.index].group]
            for parameter in self._first[entry.index]:
                if entry.nbytes:
                    held = group.read(parameter)[entry.start]
                    group.write(parameter, entry.start, bytes([held ^ 1]))
                    return

    def finish(self) -> int:
        """All pieces are in; the number of manifest entries applied.

        :raises TransferFailed: some bytes never came.
        :raises TiedMismatch: one tensor came twice, under two names, with two contents.
        """
        applied = self.intake.finish()
        for index, (parameter, content) in self._aside.items():
            spec = self._manifest.tensors[index]
            if self._groups[spec.group].read(parameter) != content:
                raise TiedMismatch((parameter, spec.name))
        return applied

    def verify(self, sent: Mapping[str, int]) -> None:
        """Compare what lies in the arenas with what was sent.

        :raises VerifyFailed: with the names that differ or were never vouched for.
        """
        wrong = [
            name
            for spec in self._manifest.tensors
            for name in spec.names
            if sent.get(spec.name) != fingerprint_bytes(self._groups[spec.group].read(name))
        ]
        if wrong:
            raise VerifyFailed(wrong)


class DeltaWriter(Writer):
    """Writes a delta: each byte says which bits of the base's change. A tie comes once."""

    verified: ClassVar[str] = "transfer"

    def __init__(self, manifest: Manifest, groups: Mapping[str, WeightGroup]) -> None:
        super().__init__(manifest, groups)
        if self._aside:
            raise UpdateRefused("a delta changes a tied tensor once: by one of its names")
        self._came = {name: bytearray(spec.nbytes) for spec, name in self._places()}

    def _place(self, group: WeightGroup, parameter: str, start: int, piece: memoryview) -> None:
        base = group.read(parameter)[start:]
        changed = bytes(old ^ new for old, new in zip(base, piece, strict=False))
        group.write(parameter, start, changed)
        self._came[parameter][start : start + len(piece)] = piece

    def verify(self, sent: Mapping[str, int]) -> None:
        """Compare what came with what was sent: what lies in the arenas is another thing."""
        wrong = [
            spec.name
            for spec, name in self._places()
            if sent.get(spec.name) != fingerprint_bytes(self._came[name])
        ]
        if wrong:
            raise VerifyFailed(wrong)

    def _places(self) -> Iterator[tuple[TensorSpec, str]]:
        """Each tensor offered, and each parameter it is written to."""
        for spec, places in zip(self._manifest.tensors, self._first, strict=True):
            yield from ((spec, name) for name in places)


def _bytewise(view: memoryview) -> memoryview:
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view cannot be cast
