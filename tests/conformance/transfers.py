"""An in-memory transfer, and the ways in which a sender can be broken or hostile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import msgspec

from hotbunk.rollout.contract import (
    FULL,
    ITEMSIZE,
    ArenaHandle,
    Bucket,
    BucketEntry,
    Manifest,
    ReceiverLayout,
    Scope,
    TensorSpec,
    Transfer,
    Version,
)
from hotbunk.rollout.errors import TransferFailed, UpdateFailed, UpdateRefused
from hotbunk.rollout.fingerprint import KIND, fingerprint_bytes
from hotbunk.rollout.process.grid import bytes_of

Tensors = Sequence[tuple[TensorSpec, bytes]]

SPOILED = 0xCC  # what a bucket holds after it was acknowledged


class MemoryTransfer(Transfer):
    """Sends tensors that are at hand, in buckets of any size.

    One buffer is lent again and again and spoiled in between, so a receiver that keeps a view into
    it is found out. ``events`` tells what the receiver asked for, in order.
    """

    def __init__(
        self,
        tensors: Tensors,
        *,
        version: Version,
        scope: Scope = FULL,
        bucket_bytes: int = 1 << 20,
        fingerprint: str = KIND,
    ) -> None:
        self.manifest = Manifest(
            version, tuple(spec for spec, _ in tensors), scope, bucket_bytes, fingerprint
        )
        self.events: list[str] = []
        self.aborted_with: list[BaseException] = []
        self._contents = [content for _, content in tensors]
        self._left_out = [False] * len(self._contents)

    def content(self, index: int) -> bytes:
        """Of the manifest's tensor of that number, without sending it."""
        return self._contents[index]

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        self.events.append("accept")
        wanted = {} if layout is None else layout.tensors
        for n, spec in enumerate(self.manifest.tensors):
            place = next((wanted[name] for name in spec.names if name in wanted), None)
            if place is not None and place.dtype != spec.dtype:
                raise UpdateRefused(f"{spec.name!r} would have to be cast, and this sender cannot")
            if layout is not None:
                self._left_out[n] = place is None
            if place is not None and place.slices:
                rows = bytes_of(spec.shape, ITEMSIZE[spec.dtype], place.slices)
                self._contents[n] = b"".join(self._contents[n][at : at + size] for at, size in rows)
        return False

    async def buckets(self) -> AsyncIterator[Bucket]:
        buffer = bytearray(self.manifest.bucket_bytes)
        for k, entries in enumerate(self._packed()):
            used = 0
            for entry in entries:
                piece = self._contents[entry.index][entry.start : entry.start + entry.nbytes]
                buffer[entry.offset : entry.offset + entry.nbytes] = piece
                used = entry.offset + entry.nbytes
            self.events.append(f"bucket {k}")
            yield await self.spoil(k, Bucket(memoryview(buffer)[:used], tuple(entries)))
            buffer[:] = bytes([SPOILED]) * len(buffer)

    async def spoil(self, k: int, bucket: Bucket) -> Bucket:
        """Bucket ``k`` as it goes out; hostile senders override this."""
        return bucket

    async def fingerprints(self) -> Mapping[str, int]:
        self.events.append("fingerprints")
        if self.manifest.fingerprint == "none":
            return {}
        return {
            spec.name: fingerprint_bytes(content)
            for n, (spec, content) in enumerate(
                zip(self.manifest.tensors, self._contents, strict=True)
            )
            if not self._left_out[n]
        }

    async def commit(self) -> None:
        self.events.append("commit")

    async def decline(self) -> None:
        self.events.append("decline")

    async def abort(self, error: BaseException) -> None:
        self.events.append("abort")
        self.aborted_with.append(error)

    @property
    def bytes_moved(self) -> bool:
        """Whether a bucket was ever handed out."""
        return any(event.startswith("bucket") for event in self.events)

    def _packed(self) -> list[list[BucketEntry]]:
        """The tables: tensors in order, cut wherever a bucket is full."""
        room = self.manifest.bucket_bytes
        tables: list[list[BucketEntry]] = []
        offset = room
        for index, content in enumerate(self._contents):
            if self._left_out[index]:
                continue
            start = 0
            while start < len(content):
                if offset == room:
                    tables.append([])
                    offset = 0
                nbytes = min(room - offset, len(content) - start)
                tables[-1].append(BucketEntry(index, start, nbytes, offset))
                start, offset = start + nbytes, offset + nbytes
        return tables


Hook = Callable[[str], Awaitable[object]]


class Hooked(MemoryTransfer):
    """Awaits ``hook`` with the phase it is in, before it does what the receiver asks for.

    Phases, in order: ``accept``, ``bucket 0``, ``bucket 1``, ... ``fingerprints``, ``commit``.
    """

    hook: Hook | None = None

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        await self._reach("accept")
        return await super().accept(layout, arena)

    async def spoil(self, k: int, bucket: Bucket) -> Bucket:
        await self._reach(f"bucket {k}")
        return bucket

    async def fingerprints(self) -> Mapping[str, int]:
        await self._reach("fingerprints")
        return await super().fingerprints()

    async def commit(self) -> None:
        await self._reach("commit")
        await super().commit()

    @property
    def last_bucket(self) -> str:
        """The phase of the last bucket."""
        return f"bucket {len(self._packed()) - 1}"

    async def _reach(self, phase: str) -> None:
        if self.hook is not None:
            await self.hook(phase)


class Silent(MemoryTransfer):
    """Offers tensors, sends no bucket, and says that all is well."""

    def _packed(self) -> list[list[BucketEntry]]:
        return []


class _Hostile(MemoryTransfer):
    """Goes wrong at bucket ``at`` (negative: counted from the last)."""

    def __init__(
        self,
        tensors: Tensors,
        *,
        at: int = 0,
        version: Version,
        scope: Scope = FULL,
        bucket_bytes: int = 1 << 20,
        fingerprint: str = KIND,
    ) -> None:
        super().__init__(
            tensors,
            version=version,
            scope=scope,
            bucket_bytes=bucket_bytes,
            fingerprint=fingerprint,
        )
        count = len(self._packed())
        self.at = at % count if count else 0

    async def spoil(self, k: int, bucket: Bucket) -> Bucket:
        return await self.break_it(bucket) if k == self.at else bucket

    async def break_it(self, bucket: Bucket) -> Bucket:
        """What happens to the bucket."""
        raise NotImplementedError


class Truncated(_Hostile):
    """A bucket ends before its table does."""

    async def break_it(self, bucket: Bucket) -> Bucket:
        return Bucket(bucket.data[: len(bucket.data) - 1], bucket.entries)


class Corrupted(_Hostile):
    """One bit flips on the way."""

    async def break_it(self, bucket: Bucket) -> Bucket:
        bucket.data[len(bucket.data) // 2] ^= 1
        return bucket


class Missing(_Hostile):
    """A bucket never comes; the stream goes on without it."""

    async def break_it(self, bucket: Bucket) -> Bucket:
        return Bucket(b"", ())


class Raising(_Hostile):
    """The sender is gone."""

    async def break_it(self, bucket: Bucket) -> Bucket:
        raise TransferFailed("the sender is gone")


class Hanging(_Hostile):
    """The sender stops sending and never says why. ``reached`` is set when it does."""

    reached: asyncio.Event | None = None

    async def break_it(self, bucket: Bucket) -> Bucket:
        if self.reached is not None:
            self.reached.set()
        await asyncio.get_running_loop().create_future()
        return bucket


class WrongIndex(_Hostile):
    """A table names a tensor that was never offered."""

    async def break_it(self, bucket: Bucket) -> Bucket:
        return _with_first(bucket, index=len(self.manifest.tensors))


class NegativeIndex(_Hostile):
    """A table names tensor -1."""

    async def break_it(self, bucket: Bucket) -> Bucket:
        return _with_first(bucket, index=-1)


class WrongStart(_Hostile):
    """A table writes past the end of a tensor."""

    async def break_it(self, bucket: Bucket) -> Bucket:
        first = bucket.entries[0]
        return _with_first(bucket, start=self.manifest.tensors[first.index].nbytes)


class WrongOffset(_Hostile):
    """A table reads past the end of its bucket."""

    async def break_it(self, bucket: Bucket) -> Bucket:
        return _with_first(bucket, offset=len(bucket.data))


class Overlapping(_Hostile):
    """A table writes the same bytes twice."""

    async def break_it(self, bucket: Bucket) -> Bucket:
        return Bucket(bucket.data, (*bucket.entries, bucket.entries[0]))


class RefusedElsewhere(MemoryTransfer):
    """Another rank refuses the offer."""

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        await super().accept(layout, arena)
        raise UpdateRefused("rank 1 refused the offer")


class FailedElsewhere(MemoryTransfer):
    """Every byte arrives here, and another rank votes against the commit."""

    async def commit(self) -> None:
        await super().commit()
        raise UpdateFailed("rank 1 failed")


HOSTILE: tuple[type[_Hostile], ...] = (
    Truncated,
    Corrupted,
    Missing,
    WrongIndex,
    NegativeIndex,
    WrongStart,
    WrongOffset,
    Overlapping,
)
"""Senders that lie; ``Raising`` and ``Hanging`` fail openly."""


def without(tensors: Tensors, *names: str) -> list[tuple[TensorSpec, bytes]]:
    """The tensors but for these names."""
    return [(spec, content) for spec, content in tensors if not set(names) & set(spec.names)]


def untied(tensors: Tensors) -> list[tuple[TensorSpec, bytes]]:
    """Every name of every tie as a tensor of its own, with the same content."""
    return [
        (msgspec.structs.replace(spec, name=name, aliases=()), content)
        for spec, content in tensors
        for name in spec.names
    ]


def _with_first(
    bucket: Bucket, *, index: int | None = None, start: int | None = None, offset: int | None = None
) -> Bucket:
    first = bucket.entries[0]
    bad = BucketEntry(
        first.index if index is None else index,
        first.start if start is None else start,
        first.nbytes,
        first.offset if offset is None else offset,
    )
    return Bucket(bucket.data, (bad, *bucket.entries[1:]))
