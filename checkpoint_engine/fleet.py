"""The replicas of one manager, and the verbs that go to all of them. No weights here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from hotbunk.checkpoint_engine.members import Members
from hotbunk.checkpoint_engine.turns import Turns
from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    AbortReport,
    MemoryReport,
    PauseMode,
    PauseReport,
    Version,
)
from hotbunk.rollout.gate import CALLER, SYNC
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import ReplicaStatus

T = TypeVar("T")


class Fleet:
    """Replicas by name. Holds no truth about one that the replica does not hold itself."""

    def __init__(self, replicas: Sequence[ReplicaHandle], *, free_cache_engine: bool) -> None:
        self.free_cache_engine = free_cache_engine
        self._members = Members(replicas)
        self._turns = Turns()  # verbs that change replicas

    @property
    def replicas(self) -> list[ReplicaHandle]:
        """Every replica there is now."""
        return self._members.handles()

    @property
    def version(self) -> Version | None:
        """The newest version that some replica committed, or that was published for all."""
        return self._members.current

    @property
    def syncing(self) -> bool:
        """Whether replicas are being changed right now: one that does not answer may be busy."""
        return self._turns.busy

    # -- who is there -------------------------------------------------------------------------

    def routable(self) -> tuple[ReplicaHandle, ...]:
        """Replicas that serve the current version; under ``lazy``, at most ``max_lag`` steps less.

        One that was removed never is among them.
        """
        return self._members.routable()

    def serves(self) -> Mapping[str, Version | None]:
        """The version each replica serves, by name. None: as far as is known it serves none."""
        return self._members.serves()

    async def add_replica(self, handle: ReplicaHandle) -> None:
        """Take one more in. It is routable from the first sync on that brings it up to date.

        :raises UsageError: the name is taken.
        """
        self._members.add(handle)
        self._members.saw(await handle.status())

    async def remove_replica(self, name: str, *, drain: float = 0.0) -> ReplicaHandle:
        """Take one out, and turn away who comes to it still. It is not closed.

        ``drain``: seconds that running requests may take to finish; then they are aborted.

        :raises UsageError: no replica of that name.
        """
        handle = self._members.remove(name)
        mode = PauseMode.WAIT if drain else PauseMode.ABORT
        try:
            await handle.pause_generation(mode, reject=True, deadline=drain or None)
        except errors.RequestsInFlight:
            await handle.pause_generation(PauseMode.ABORT, reject=True)
        except errors.ReplicaLost:
            pass  # nobody comes to it any more
        return handle

    def forget_replica(self, name: str) -> None:
        """One that is dead leaves; nobody is asked. Idempotent: what was known of it is forgotten."""
        if self._members.get(name) is not None:
            self._members.remove(name)

    async def adopt(self) -> Version | None:
        """Take the replicas' word for what they hold, as a restarted manager must; the newest."""
        for status in await self.statuses():
            self._members.saw(status)
        return self.version

    def next_version(self, step: int) -> Version:
        """The version of a trainer's step: a new incarnation if the trainer went back."""
        newest = self.version
        if newest is None:
            return Version(0, step)
        return Version(newest.incarnation + (step <= newest.step), step)

    async def statuses(self) -> list[ReplicaStatus]:
        """Every replica's own word. A restarted manager continues from here."""
        return list(await asyncio.gather(*(h.status() for h in self.replicas)))

    async def newest_version(self) -> Version | None:
        """The highest version any replica ever committed: where a restarted trainer continues."""
        said = await self.statuses()
        held = [v for s in said for v in (*s.versions.values(), *s.newest.values())]
        return max(held, default=None)

    # -- the single steps, for loops that sync in their own way -------------------------------

    async def pause_replicas(
        self,
        mode: PauseMode = PauseMode.ABORT,
        *,
        clear_cache: bool = True,
        owner: str = CALLER,
        deadline: float | None = None,
    ) -> dict[str, PauseReport]:
        """Hold generation shut everywhere; returns when no step runs anywhere."""
        return await self._all(
            lambda h: h.pause_generation(
                mode, clear_cache=clear_cache, owner=owner, deadline=deadline
            )
        )

    async def resume_generation_replicas(self, *, owner: str = CALLER) -> None:
        """End the owner's pause everywhere."""
        await self._all(lambda h: h.resume_generation(owner=owner))

    async def abort_replicas(
        self, request_ids: Sequence[str] | None = None
    ) -> dict[str, AbortReport]:
        """End these requests wherever they are. Does not wait for a sync, nor hold anybody up."""
        return await self._all(lambda h: h.abort(request_ids))

    async def release_kv_replicas(self, *, keep_kv: bool = False) -> dict[str, MemoryReport]:
        """Give KV memory back, once *every* replica stands still; weights stay."""
        if not self.free_cache_engine:
            return {h.name: MemoryReport(emulated="no-op") for h in self.replicas}
        async with self._turns.fleet(), self._still():
            return await self._all(lambda h: h.release_kv_cache(keep_kv=keep_kv))

    async def resume_kv_replicas(self) -> dict[str, MemoryReport]:
        """Map KV memory again, empty."""
        if not self.free_cache_engine:
            return {h.name: MemoryReport(emulated="no-op") for h in self.replicas}
        async with self._turns.fleet():
            return await self._all(lambda h: h.resume_kv_cache())

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Every replica stands still inside; who froze requests finds them frozen."""

        async def pause(handle: ReplicaHandle) -> None:
            held = (await handle.status()).pauses
            keep = any(pause.mode is PauseMode.KEEP for pause in held)
            mode = PauseMode.KEEP if keep else PauseMode.WAIT
            await handle.pause_generation(mode, clear_cache=False, owner=SYNC)

        try:
            await self._all(pause)
            yield
        finally:
            await self._all(lambda h: h.resume_generation(owner=SYNC))

    async def _all(self, verb: Callable[[ReplicaHandle], Awaitable[T]]) -> dict[str, T]:
        """The verb on every replica. :raises: the first failure, after every one was tried."""
        handles = self.replicas
        results = await asyncio.gather(*(verb(h) for h in handles), return_exceptions=True)
        done: dict[str, T] = {}
        for handle, result in zip(handles, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            done[handle.name] = result
        return done
