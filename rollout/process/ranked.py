"""Several ranks as one engine: copies of the model, each whole in one rank or cut over several.

What is asked goes to every rank, and is over when every rank has answered. Requests go to the copy
that has fewest, to its first rank: what ranks of a copy say to each other is the engine's own affair.
A rank that fails in an update fails all; one that dies takes all with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from hotbunk.rollout.contract import (
    FULL,
    AbortReport,
    BackendStatus,
    Cache,
    Digests,
    Engine,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    Tag,
    Ticket,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
    parse_tags,
)
from hotbunk.rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    HotbunkError,
    ReleaseIncomplete,
    ReleaseUndone,
    ReplicaLost,
    SessionError,
    shown,
)
from hotbunk.rollout.process import union, verbs
from hotbunk.rollout.process.grid import Grid
from hotbunk.rollout.process.rank import Rank
from hotbunk.rollout.process.ranked_update import RankedTransfer
from hotbunk.rollout.watch import WatchedTransfer


class RankedEngine(Engine):
    """See the module. Its ranks are started and closed with it."""

    def __init__(self, ranks: Sequence[Rank], grid: Grid | None = None) -> None:
        self._ranks = list(ranks)
        self._grid = grid or Grid(data=len(self._ranks))
        if self._grid.size != len(self._ranks):
            raise ConfigError(f"{len(self._ranks)} ranks are not {self._grid}")
        self._leaders = [copy[0] for copy in self._grid.copies()]
        self._load = dict.fromkeys(self._leaders, 0)  # requests
        self._lost = ""
        # How what is away went: a resume that fails half-way is undone in the same way.
        self._away: dict[Tag, verbs.EngineRelease] = {}
        for number, rank in enumerate(self._ranks):
            rank.on_lost = partial(self._lost_rank, number)

    # -- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every rank.

        :raises DeadlineExceeded: some did not start in time; it says which did (H14).
        :raises ConfigError: the model is to be cut, and the backend's ranks hold whole ones.
        """
        starting = [asyncio.ensure_future(rank.start()) for rank in self._ranks]
        try:
            results = await asyncio.gather(*starting, return_exceptions=True)
        except BaseException:
            await self.close()
            raise
        failed = {n: e for n, e in enumerate(results) if e is not None}
        if failed:
            await self.close()
            number, error = next(iter(failed.items()))
            there = [str(n) for n in range(len(self._ranks)) if n not in failed]
            said = (
                f"ready were the ranks {shown(there) or 'none'}, "
                f"and not {shown([str(n) for n in failed])}"
            )
            if isinstance(error, DeadlineExceeded):
                raise DeadlineExceeded(
                    f"starting {len(self._ranks)} ranks",
                    error.seconds,
                    where=f"rank {number}",
                    remedy=f"{said}; {error.remedy}",
                ) from error
            raise _at(number, error)
        caps = self._ranks[0].capabilities
        if self._grid.shards > 1 and not caps.sharded:
            await self.close()
            raise ConfigError(
                f"backend {caps.backend!r} cannot be cut into {self._grid.shards} parts: "
                f"{caps.sharded.how}",
                remedy="use data_parallel",
            )
        self.capabilities = dataclasses.replace(caps, ranks=len(self._ranks))

    async def close(self) -> None:
        self._lost = self._lost or "closed"
        await asyncio.gather(*(rank.close() for rank in self._ranks), return_exceptions=True)

    def _lost_rank(self, number: int, why: str) -> None:
        if not self._lost:
            self._lost = f"rank {number}: {why}"
            if self.on_lost is not None:
                self.on_lost(self._lost)

    # -- memory -------------------------------------------------------------------------------

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        """In all ranks or in none."""
        wanted = parse_tags(tags)
        back = [tag for tag in wanted if tag in self._away]

        async def undo(rank: Rank) -> None:
            for tag in reversed(back):
                await rank.call("release", msgspec.structs.replace(self._away[tag], tags=[tag]))

        try:
            report = await self._memory("resume", verbs.Tags([*wanted]), undo)
        except _Undone as undone:
            raise undone.error from None
        for tag in back:
            del self._away[tag]
        return report

    async def resume_kv_cache(self) -> MemoryReport:
        return await self.resume([Tag.KV_CACHE])

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
        keep_kv: bool = False,
    ) -> MemoryReport:
        """In all ranks or in none.

        :raises ReleaseUndone: one could not, and what others had discarded cannot come back.
        """
        wanted = parse_tags(tags)
        args = verbs.EngineRelease([*wanted], retention, overrides, keep_kv)
        here = [tag for tag in wanted if tag not in self._away]
        keeps = {retention, *(overrides or {}).values()} <= {Retention.BACKUP, Retention.RESIDENT}

        async def undo(rank: Rank) -> None:
            await rank.call("resume", verbs.Tags([*here]))

        try:
            report = await self._memory("release", args, undo)
        except ReleaseIncomplete:
            self._went(here, args)
            raise
        except _Undone as undone:
            if Tag.WEIGHTS in here and not keeps:
                raise ReleaseUndone(undone.error) from undone.error
            raise undone.error from None
        self._went(here, args)
        return report

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self.release([Tag.KV_CACHE], keep_kv=keep_kv)

    def _went(self, tags: Collection[Tag], args: verbs.EngineRelease) -> None:
        self._away.update(dict.fromkeys(tags, args))

    async def _memory(self, verb: str, args: Any, undo: Any) -> MemoryReport:
        """A memory verb of all ranks. Where one fails and others did not, theirs is undone.

        :raises _Undone: with what the one met, if anything had to be undone.
        :raises EngineFailed: it cannot be undone: what is mapped differs from rank to rank.
        """
        results = await self._results(verb, args)
        failed = {n: r for n, r in enumerate(results) if isinstance(r, BaseException)}
        if not failed:
            return union.memory(results)
        number, error = _worst(failed)
        if isinstance(error, ReplicaLost):
            raise _at(number, error)
        # These have released, if not every byte.
        short = {n: e for n, e in failed.items() if isinstance(e, ReleaseIncomplete)}
        if len(short) == len(failed):
            raise _at(number, error)
        number, error = _worst({n: e for n, e in failed.items() if n not in short})
        done = [n for n in range(len(self._ranks)) if n not in failed or n in short]
        for other in done:
            try:
                await undo(self._ranks[other])
            except HotbunkError as stuck:
                raise EngineFailed(
                    f"{verb} failed in rank {number} ({error}), and rank {other} cannot be led "
                    f"back: {stuck}"
                ) from stuck
        if done and isinstance(error, HotbunkError) and not isinstance(error, EngineFailed):
            raise _Undone(error.at(f"rank {number}"))
        raise _at(number, error)

    # -- weights ------------------------------------------------------------------------------

    async def open_transfer(self, ticket: Ticket) -> Transfer:
        """Every rank opens its own end; see :class:`RankedTransfer`."""
        return await RankedTransfer.open(self._ranks, self._grid, ticket)

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        inner = transfer.inner if isinstance(transfer, WatchedTransfer) else transfer
        if not isinstance(inner, RankedTransfer):
            raise SessionError("the ranks open their own ends of an update: it takes a ticket")
        await transfer.accept(None)
        async for _ in transfer.buckets():
            pass
        await transfer.fingerprints()
        await transfer.commit()
        return union.update(inner.reports, inner.wanted, len(inner.manifest.tensors))

    # -- generation ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        number = min(self._leaders, key=self._load.__getitem__)
        self._load[number] += 1
        try:
            async with aclosing(self._ranks[number].generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        except HotbunkError as error:
            error.at(f"rank {number}")
            raise
        finally:
            self._load[number] -= 1

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        return union.pause(
            await self._all("pause_generation", verbs.EnginePause(mode, clear_cache))
        )

    async def resume_generation(self) -> None:
        """In all ranks or in none, also where it is given up because one of them hangs."""
        calls = self._calls("resume_generation")
        try:
            results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        except asyncio.CancelledError:
            await self._shut(n for n, call in enumerate(calls) if _came_back(call))
            raise
        failed = {n: r for n, r in enumerate(results) if isinstance(r, BaseException)}
        if failed:
            await self._shut(n for n in range(len(calls)) if n not in failed)
            raise _at(*_worst(failed))

    async def _shut(self, numbers: Iterable[int]) -> None:
        """Let these ranks stand still again; nothing is lost by it."""
        keep = verbs.EnginePause(PauseMode.KEEP, clear_cache=False)
        await asyncio.gather(
            *(self._ranks[n].call("pause_generation", keep) for n in numbers),
            return_exceptions=True,
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        ids = None if request_ids is None else [*request_ids]
        return union.abort(await self._all("abort", verbs.RequestIds(ids)), ids)

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        await self._all("reset_caches", verbs.Caches(None if which is None else [*which]))

    # -- looking ------------------------------------------------------------------------------

    async def status(self) -> BackendStatus:
        """Of all ranks together; a version only where all hold it."""
        return union.status(await self._all("status"))

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        """Of whole tensors, over every rank. Where two differ the value is -1, which no content has."""
        args = verbs.Names(None if names is None else [*names])
        return union.digest(await self._all("digest", args), self._grid)

    async def memory(self) -> MemoryReport:
        return union.memory(await self._all("memory"))

    # -- inside -------------------------------------------------------------------------------

    def _calls(self, verb: str, args: Any = None) -> list[asyncio.Future[Any]]:
        """One of every rank, begun."""
        if self._lost:
            raise ReplicaLost(self._lost, remedy="start the replica anew")
        return [asyncio.ensure_future(rank.call(verb, args)) for rank in self._ranks]

    async def _results(self, verb: str, args: Any = None) -> list[Any]:
        """What every rank answered or raised, once all have."""
        return list(await asyncio.gather(*self._calls(verb, args), return_exceptions=True))

    async def _all(self, verb: str, args: Any = None) -> list[Any]:
        results = await self._results(verb, args)
        failed = {n: r for n, r in enumerate(results) if isinstance(r, BaseException)}
        if failed:
            raise _at(*_worst(failed))
        return results


class _Undone(Exception):
    """What a rank met, when the others have been led back."""

    def __init__(self, error: HotbunkError) -> None:
        self.error = error
        super().__init__(str(error))


def _worst(failed: Mapping[int, BaseException]) -> tuple[int, BaseException]:
    """The failure to tell of: that a rank is lost, else that of the lowest rank."""
    lost = {n: e for n, e in failed.items() if isinstance(e, ReplicaLost)}
    return next(iter(sorted((lost or failed).items(), key=lambda item: item[0])))


def _came_back(call: asyncio.Future[Any]) -> bool:
    return call.done() and not call.cancelled() and call.exception() is None


def _at(number: int, error: BaseException) -> BaseException:
    return error.at(f"rank {number}") if isinstance(error, HotbunkError) else error
