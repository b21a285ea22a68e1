"""Weights on the move: the offer, the buckets, and the receiver's side of one sync."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from hotbunk.rollout.uncut import uncut
from hotbunk.rollout.vocabulary import FULL, TARGET, Scope, Version

# Bytes of one element, by the name that travels (torch's, without its prefix).
ITEMSIZE: Mapping[str, int] = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1
    ),
    "complex128": 16,
}


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of an update. ``aliases`` are further names bound to the same content (ties).

    ``dtype`` is a name of :data:`ITEMSIZE`; ``nbytes`` is that size times the elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    group: str = TARGET
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every name this content is bound to."""
        return (self.name, *self.aliases)


class Manifest(msgspec.Struct, frozen=True):
    """The offer: everything a receiver needs in order to say yes or no before a byte moves."""

    version: Version
    tensors: tuple[TensorSpec, ...]
    scope: Scope = FULL
    bucket_bytes: int = 32 << 20
    fingerprint: str = "none"  # kind of the fingerprints sent after the last bucket, or none
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)  # ``lora_alpha``, say

    @property
    def total_bytes(self) -> int:
        """Payload bytes, padding not counted."""
        return sum(t.nbytes for t in self.tensors)


class Placement(msgspec.Struct, frozen=True):
    """Where a receiver keeps one tensor: element type and shape there, and arena offset in bytes.

    ``slices`` is ``(start, length)`` for every dimension of the offered tensor where only a part of
    it is wanted; ``shape`` is then the part's.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int = -1  # in the receiver's arena; -1 is not published
    slices: tuple[tuple[int, int], ...] = ()


class ReceiverLayout(msgspec.Struct, frozen=True):
    """Which names a receiver rank wants, and as what: casts happen at the source.

    A tensor none of whose names is here is not sent to that rank; names nobody offers mean nothing.
    """

    tensors: Mapping[str, Placement]


class ArenaHandle(msgspec.Struct, frozen=True):
    """The memory that a layout's offsets point into, so that a sender may write there itself.

    Travels by the transport's own means: ``fd`` (kind ``file``) as a descriptor over a socket,
    ``handle`` (kinds ``cuda``, ``acl``) as the driver's exported bytes. The receiver owns it.
    """

    kind: str
    nbytes: int
    fd: int = -1
    handle: bytes = b""


class BucketEntry(msgspec.Struct, frozen=True):
    """A piece of a tensor in a bucket: bytes ``[start, start + nbytes)`` of its contiguous form."""

    index: int  # into Manifest.tensors
    start: int
    nbytes: int
    offset: int  # in the bucket


class Bucket(msgspec.Struct, frozen=True):
    """One contiguous buffer and a table. Lent: valid until the next bucket is asked for.

    ``data`` is anything with the buffer protocol, or a device tensor of bytes. It is None where the
    pieces already lie in the receiver's arena (``offset`` of an entry then means nothing).
    """

    data: Any
    entries: tuple[BucketEntry, ...]


# What :meth:`Transfer.take` is given.
Write = Callable[[Bucket], None]
Begin = Callable[[], Awaitable[None]]
Run = Callable[[Callable[[], Any]], Awaitable[Any]]


class Transfer(ABC):
    """One receiver rank's side of one sync: accept, take buckets, compare, vote.

    Runs in the process that owns the weights. The order is ``manifest`` -> :meth:`accept` ->
    :meth:`buckets` to its end -> :meth:`fingerprints` -> :meth:`commit`, with :meth:`abort` at any
    point instead. Accept and commit return once *all* ranks of the replica have decided so.
    """

    manifest: Manifest

    @abstractmethod
    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        """Agree to receive; whether the sender will write into ``arena`` itself.

        ``layout`` gives the element types wanted; None: as in the manifest. A sender that can reach
        the arena writes when buckets are asked for, never before, and then every bucket's ``data``
        is None.

        :raises UpdateRefused: another rank refused; nothing was written anywhere.
        """

    @abstractmethod
    def buckets(self) -> AsyncIterator[Bucket]:
        """The buckets, in order. Taking the next one acknowledges the last.

        :raises TransferFailed: the sender is gone or sent nonsense.
        """

    async def take(
        self, write: Write, *, begin: Begin | None = None, run: Run = asyncio.to_thread
    ) -> None:
        """Take every bucket of :meth:`buckets`, in order, each written in a thread.

        The same as a loop over them, and faster where the transport need not come back to the
        event loop for each. Cancelled, it returns when the write under way has ended.

        :param write: called in the thread; the bucket is lent until it returns.
        :param begin: awaited once, when the first bucket has come and before it is written.
        :param run: runs a function of no arguments in the thread, and gives back what it returns.
        :raises TransferFailed: as :meth:`buckets`; and whatever ``begin`` and ``write`` raise.
        """
        async for bucket in self.buckets():
            if begin is not None:
                await begin()
                begin = None
            await uncut(run(partial(write, bucket)))

    @abstractmethod
    async def fingerprints(self) -> Mapping[str, int]:
        """Per tensor name, the fingerprint of what was sent; empty if the manifest says none."""

    @abstractmethod
    async def commit(self) -> None:
        """Vote to commit; returns when every rank has.

        :raises UpdateFailed: another rank failed: this replica is poisoned.
        """

    @abstractmethod
    async def decline(self) -> None:
        """Need nothing: the offered version is already here. Instead of :meth:`accept`."""

    @abstractmethod
    async def abort(self, error: BaseException) -> None:
        """Tell the sender that this rank gave up, and why. Idempotent; never raises."""


class Ticket(msgspec.Struct, frozen=True):
    """What travels to a replica so that it can open a :class:`Transfer` where the weights live.

    ``transport`` is an entry-point name; ``address`` means something to that transport alone, and is
    the same for all ``ranks`` of a replica: each opens its own end, with its own ``rank``.
    ``published``: no sender waits there, so it opens as often as asked, and ranks that read the same
    are held together by whoever drives them.
    """

    transport: str
    address: str
    rank: int = 0
    ranks: int = 1
    published: bool = False
