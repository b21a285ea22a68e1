"""An engine whose ranks hold parts of a model, byte by byte, and compute nothing.

It shows what a cut engine owes a weight sync (its slices and no others, nothing before all ranks have
accepted, a digest that adds up to the whole model's), without an engine that is cut. Memory, faults
and pauses are the oracle's. Where a rank is in the grid its environment says, or ``place`` does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import AsyncIterator, Collection, Iterator
from typing import Any, NamedTuple

from hotbunk.rollout.backends.oracle import Device, FaultPlan, OracleEngine
from hotbunk.rollout.backends.oracle.options import parse_options
from hotbunk.rollout.capabilities import NATIVE, unsupported
from hotbunk.rollout.contract import (
    FULL,
    ITEMSIZE,
    TARGET,
    Digests,
    GenerateRequest,
    MemoryReport,
    Placement,
    ReceiverLayout,
    Scope,
    TensorSpec,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.errors import (
    IncompleteUpdate,
    Unsupported,
    VerifyFailed,
    WeightsNotResident,
)
from hotbunk.rollout.fingerprint import KIND, MASK, fingerprint_bytes
from hotbunk.rollout.intake import Intake
from hotbunk.rollout.process.grid import Grid, Place, Slices, bytes_of
from hotbunk.rollout.registry import BACKENDS
from hotbunk.rollout.registry import register as register_factory

NAME = "holder"


class Cut(NamedTuple):
    """A tensor and how it is shared out: along ``dim`` (None: every tensor rank has all of it), in
    pipeline stage ``stage`` (of two; with fewer ranks a stage has several). ``heads``: pieces that stay
    whole, so with fewer of them than ranks some ranks hold the same."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim: int | None = None
    stage: int = 0
    heads: int = 0
    tied: tuple[str, ...] = ()


MODEL = (
    Cut("embed.weight", "float32", (12, 5), 0, 0, tied=("head.weight",)),
    Cut("layers.0.q.weight", "bfloat16", (12, 7), 0),
    Cut("layers.0.k.weight", "bfloat16", (6, 7), 0, heads=2),
    Cut("layers.0.o.weight", "bfloat16", (7, 12), 1),
    Cut("layers.0.experts", "float32", (3, 4, 12), 2),
    Cut("layers.0.norm", "float32", (7,)),
    Cut("layers.0.scale", "float32", ()),
    Cut("layers.1.up.weight", "float16", (13, 3), 0, 1),
    Cut("layers.1.none", "float32", (0, 12), 1, 1),
    Cut("layers.1.norm", "float32", (7,), None, 1),
)


_NO = unsupported("it takes whole models only")


def part_of(cut: Cut, grid: Grid, place: Place) -> Slices | None:
    """What the rank at ``place`` holds of a tensor: (), slices, or None, nothing."""
    if cut.stage * grid.pipeline // 2 != place.pipeline:
        return None
    if cut.dim is None or grid.tensor == 1:
        return ()
    size = cut.shape[cut.dim]
    pieces = cut.heads or grid.tensor
    mine = place.tensor * pieces // grid.tensor if cut.heads else place.tensor
    # As even as it goes: 13 rows over 3 ranks are 4, 4 and 5.
    first, last = mine * size // pieces, (mine + 1) * size // pieces
    return tuple(
        (first, last - first) if dim == cut.dim else (0, length)
        for dim, length in enumerate(cut.shape)
    )


def content(name: str, step: int, nbytes: int) -> bytes:
    """The bytes of a tensor at training step ``step``."""
    return hashlib.shake_128(f"held {name}@{step}".encode()).digest(nbytes)


def whole(step: int) -> list[tuple[TensorSpec, bytes]]:
    """The trainer's weights at ``step``."""
    specs = [
        TensorSpec(c.name, c.shape, c.dtype, _nbytes(c.shape, c.dtype), aliases=c.tied)
        for c in MODEL
    ]
    return [(spec, content(spec.name, step, spec.nbytes)) for spec in specs]


def fingerprints(step: int) -> dict[str, int]:
    """Of the whole model's tensors, by their first names."""
    return {spec.name: fingerprint_bytes(data) for spec, data in whole(step)}


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * ITEMSIZE[dtype]


def register() -> None:
    """Make the backend known in this process (``setup=`` of a replica)."""
    register_factory(BACKENDS, NAME, f"{__name__}:create")


def create(
    *,
    faults: FaultPlan | None = None,
    device: Device | None = None,
    rank: int | None = None,
    grid: Grid | None = None,
    **options: Any,
) -> Holder:
    """A rank. Without ``rank`` and ``grid``: those of its process's environment."""
    if grid is None:
        said = os.environ.get("HOTBUNK_GRID", "1,1,1")
        grid = Grid(*map(int, said.split(",")))
        rank = int(os.environ.get("HOTBUNK_RANK", "0"))
    return Holder(
        grid, rank or 0, parse_options(options), device or Device(), faults or FaultPlan()
    )


class Holder(OracleEngine):
    """One rank. ``parts`` are its bytes, by tensor; ``writes`` counts those of each update."""

    def __init__(self, grid: Grid, rank: int, *oracle: Any) -> None:
        super().__init__(*oracle)
        place = grid.place(rank)
        self.capabilities = dataclasses.replace(
            self.capabilities,
            backend=NAME,
            sharded=NATIVE,
            partial=_NO,
            adapter=_NO,
            delta=_NO,
            groups={TARGET: True},
        )
        for other in self.groups.keys() - {TARGET}:
            del self.groups[other]
        held = {cut.name: (cut, part_of(cut, grid, place)) for cut in MODEL}
        self.cuts = {n: cut for n, (cut, part) in held.items() if part is not None}
        self.slices = {n: part for n, (_, part) in held.items() if part}
        self.parts: dict[str, bytearray] = {}
        self.writes: list[int] = []
        for spec, data in whole(0):
            if spec.name in self.cuts:
                rows = self._rows(spec.name)
                self.parts[spec.name] = bytearray(b"".join(data[at : at + n] for at, n in rows))

    @property
    def layout(self) -> ReceiverLayout:
        """What this rank takes of an offer."""
        places: dict[str, Placement] = {}
        for name, cut in self.cuts.items():
            slices = self.slices.get(name, ())
            shape = tuple(length for _, length in slices) if slices else cut.shape
            places |= dict.fromkeys((name, *cut.tied), Placement(cut.dtype, shape, slices=slices))
        return ReceiverLayout(places)

    async def release(self, tags: Collection[str] | None = None, **more: Any) -> MemoryReport:
        report = await super().release(tags, **more)
        group = self.groups[TARGET]
        if not group.mapped and group.backup is None:
            for part in self.parts.values():
                part[:] = bytes(len(part))
        return report

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        manifest, group = transfer.manifest, self.groups[TARGET]
        self._require_quiet("update_weights")
        if not group.mapped:
            raise WeightsNotResident(TARGET, "released")
        index = {name: n for n, spec in enumerate(manifest.tensors) for name in spec.names}
        absent = self.cuts.keys() - index.keys()
        if absent:
            raise IncompleteUpdate(absent)
        await self.faults.reach("update/accept")
        await transfer.accept(self.layout)
        mine = {index[name]: name for name in self.cuts}
        intake = Intake(
            manifest,
            [len(self.parts[mine[n]]) if n in mine else 0 for n in range(len(manifest.tensors))],
        )
        async for bucket in transfer.buckets():
            group.loaded, group.dirty, group.version = False, True, None
            corrupt = await self.faults.reach("update/bucket")
            data = memoryview(bucket.data)
            for entry in intake.check(bucket, len(data)):
                piece = data[entry.offset : entry.offset + entry.nbytes]
                self.parts[mine[entry.index]][entry.start : entry.start + entry.nbytes] = piece
            if corrupt:
                next(part for part in self.parts.values() if part)[0] ^= 1
        intake.finish()
        self.writes.append(intake.nbytes)
        await self.faults.reach("update/verify")
        sent = await transfer.fingerprints()
        if manifest.fingerprint == KIND:
            found = {name: fingerprint_bytes(self.parts[name]) for name in self.cuts}
            wrong = {name for name, value in found.items() if sent.get(name) != value}
            if wrong:
                raise VerifyFailed(wrong)
        await self.faults.reach("update/commit")
        await transfer.commit()
        await self.faults.reach("update/label")
        group.loaded, group.dirty, group.version = True, False, version
        return UpdateReport(
            version,
            applied=len(self.cuts),
            nbytes=intake.nbytes,
            buckets=intake.buckets,
            verified="applied" if manifest.fingerprint == KIND else "none",
        )

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        await self.faults.reach("digest")
        mine = [n for n in self.cuts if names is None or n in names]
        return Digests(
            {name: self._at_its_place(name) for name in mine},
            KIND,
            slices={name: self.slices[name] for name in mine if name in self.slices},
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        raise Unsupported("generate", NAME, "its ranks hold parts and compute nothing")
        yield

    def _rows(self, name: str) -> list[tuple[int, int]]:
        cut = self.cuts[name]
        return bytes_of(cut.shape, ITEMSIZE[cut.dtype], self.slices.get(name, ()))

    def _at_its_place(self, name: str) -> int:
        total = used = 0
        for at, nbytes in self._rows(name):
            total += fingerprint_bytes(self.parts[name][used : used + nbytes], at)
            used += nbytes
        return total & MASK


class HeldWeights:
    """The trainer's weights at ``step`` as tensors."""

    def __init__(self, step: int) -> None:
        self._content = whole(step)

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec, _ in self._content)

    def tensors(self) -> Iterator[Any]:
        import torch

        from hotbunk.rollout.binding import dtype_from

        for spec, data in self._content:
            raw = torch.tensor(list(data), dtype=torch.uint8)
            yield raw.view(dtype_from(spec.dtype)).reshape(spec.shape)
