"""A transfer under watch: the dirty mark is set before the first byte can be written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from hotbunk.rollout.contract import ArenaHandle, Bucket, ReceiverLayout, Transfer
from hotbunk.rollout.errors import SessionError
from hotbunk.rollout.transfer import Begin, Run, Write


class WatchedTransfer(Transfer):
    """Hands a backend its transfer, and tells the replica when bytes begin to flow.

    ``on_first_byte`` runs synchronously, before the first bucket is handed out (or, for an update
    without bytes, before the end of the stream is seen), so no write can come before the mark. Where
    the sender writes into the arena itself, it runs before the first bucket is asked for. ``inner``
    is for an engine that must know its own kind of transfer again.
    """

    def __init__(self, inner: Transfer, on_first_byte: Callable[[], None]) -> None:
        self.manifest = inner.manifest
        self.accepted = False
        self.drained = False
        self.committed = False
        self.expected: dict[str, int] = {}
        self.inner = inner
        self._in_place = False
        self._mark: Callable[[], None] | None = on_first_byte

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        if self.accepted:
            raise SessionError("the update was accepted twice")
        self._in_place = await self.inner.accept(layout, arena)
        self.accepted = True
        return self._in_place

    async def buckets(self) -> AsyncIterator[Bucket]:
        if not self.accepted:
            raise SessionError("buckets were asked for before the update was accepted")
        if self._in_place:
            self._first_byte()
        async for bucket in self.inner.buckets():
            self._first_byte()
            yield bucket
        self._first_byte()
        self.drained = True

    async def take(
        self, write: Write, *, begin: Begin | None = None, run: Run = asyncio.to_thread
    ) -> None:
        if not self.accepted:
            raise SessionError("buckets were asked for before the update was accepted")
        if self._in_place:
            self._first_byte()

        async def first() -> None:
            self._first_byte()
            if begin is not None:
                await begin()

        await self.inner.take(write, begin=first, run=run)
        self._first_byte()
        self.drained = True

    async def fingerprints(self) -> Mapping[str, int]:
        if not self.drained:
            raise SessionError("fingerprints come after the last bucket")
        self.expected = dict(await self.inner.fingerprints())
        return self.expected

    async def commit(self) -> None:
        if not self.drained:
            raise SessionError("commit was voted before the last bucket was taken")
        await self.inner.commit()
        self.committed = True

    async def decline(self) -> None:
        await self.inner.decline()

    async def abort(self, error: BaseException) -> None:
        await self.inner.abort(error)

    def _first_byte(self) -> None:
        if self._mark is not None:
            self._mark()
            self._mark = None
