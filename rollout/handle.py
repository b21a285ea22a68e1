"""The trainer's remote control of a replica. A handle holds no truth: the replica does.

Handles speak in tickets, never in transfers: the bytes are opened where the weights live.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Protocol

from hotbunk.rollout.contract import (
    FULL,
    AbortReport,
    Cache,
    Capabilities,
    Digests,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    Ticket,
    TokenChunk,
    UpdateReport,
    Version,
)
from hotbunk.rollout.gate import CALLER
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import ReplicaStatus


class ReplicaHandle(Protocol):
    """The replica's verbs, from wherever the trainer is. Errors are the replica's own."""

    @property
    def name(self) -> str:
        """The replica's name, unique in its pool."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What its backend declares."""
        ...

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport: ...
    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        keep_kv: bool = False,
    ) -> MemoryReport: ...
    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport: ...
    async def resume_kv_cache(self) -> MemoryReport: ...
    async def update_weights(
        self,
        source: Ticket,
        *,
        version: Version,
        scope: Scope = FULL,
        deadline: float | None = None,
    ) -> UpdateReport: ...
    async def sleep(
        self,
        level: int = 2,
        *,
        mode: PauseMode = PauseMode.ABORT,
        clear_cache: bool = True,
        keep_kv: bool = False,
    ) -> MemoryReport: ...
    async def wake_up(self, tags: Collection[str] | None = None) -> MemoryReport: ...
    async def pause_generation(
        self,
        mode: PauseMode = PauseMode.ABORT,
        *,
        clear_cache: bool = True,
        reject: bool = False,
        owner: str = CALLER,
        deadline: float | None = None,
        min_start_version: Version | None = None,
    ) -> PauseReport: ...
    async def resume_generation(self, *, owner: str = CALLER) -> None: ...
    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport: ...
    async def reset_caches(self, which: Collection[Cache] | None = None) -> None: ...
    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]: ...
    async def status(self) -> ReplicaStatus: ...
    async def digest(self, names: Collection[str] | None = None) -> Digests: ...
    async def memory(self) -> MemoryReport: ...
    async def close(self) -> None: ...


class LocalHandle:
    """A replica on this event loop."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @property
    def name(self) -> str:
        return self._replica.name

    @property
    def capabilities(self) -> Capabilities:
        return self._replica.capabilities

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        return await self._replica.resume(tags)

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        keep_kv: bool = False,
    ) -> MemoryReport:
        return await self._replica.release(tags, retention=retention, keep_kv=keep_kv)

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self._replica.release_kv_cache(keep_kv=keep_kv)

    async def resume_kv_cache(self) -> MemoryReport:
        return await self._replica.resume_kv_cache()

    async def update_weights(
        self,
        source: Ticket,
        *,
        version: Version,
        scope: Scope = FULL,
        deadline: float | None = None,
    ) -> UpdateReport:
        return await self._replica.update_weights(
            source, version=version, scope=scope, deadline=deadline
        )

    async def sleep(
        self,
        level: int = 2,
        *,
        mode: PauseMode = PauseMode.ABORT,
        clear_cache: bool = True,
        keep_kv: bool = False,
    ) -> MemoryReport:
        return await self._replica.sleep(level, mode=mode, clear_cache=clear_cache, keep_kv=keep_kv)

    async def wake_up(self, tags: Collection[str] | None = None) -> MemoryReport:
        return await self._replica.wake_up(tags)

    async def pause_generation(
        self,
        mode: PauseMode = PauseMode.ABORT,
        *,
        clear_cache: bool = True,
        reject: bool = False,
        owner: str = CALLER,
        deadline: float | None = None,
        min_start_version: Version | None = None,
    ) -> PauseReport:
        return await self._replica.pause_generation(
            mode,
            clear_cache=clear_cache,
            reject=reject,
            owner=owner,
            deadline=deadline,
            min_start_version=min_start_version,
        )

    async def resume_generation(self, *, owner: str = CALLER) -> None:
        await self._replica.resume_generation(owner=owner)

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        return await self._replica.abort(request_ids)

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        await self._replica.reset_caches(which)

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        return self._replica.generate(request)

    async def status(self) -> ReplicaStatus:
        return await self._replica.status()

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        return await self._replica.digest(names)

    async def memory(self) -> MemoryReport:
        return await self._replica.memory()

    async def close(self) -> None:
        await self._replica.close()
