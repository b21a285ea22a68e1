"""The contract over a handle: what a replica here drives, through the replica over there."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

import msgspec

from hotbunk.rollout.contract import (
    FULL,
    AbortReport,
    BackendStatus,
    Cache,
    Capabilities,
    Digests,
    Engine,
    Gate,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.errors import ReplicaLost
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.http.relay import relay
from hotbunk.rollout.status import Health


class DrivenEngine(Engine):
    """The replica over there keeps every rule by itself, for whoever else asks it.

    ``handle`` is set by a subclass's ``start``.

    :param backend: its name, until it has said what it can do.
    :param owner: of the pauses that the driver here asks for.
    :param transport: transfers that arrive here are offered on by it, within ``deadline`` seconds.
    :param where: it is, for errors.
    """

    handle: ReplicaHandle

    def __init__(
        self, backend: str, *, owner: str, transport: str, deadline: float, where: str
    ) -> None:
        self.capabilities = Capabilities(backend)
        self._pauses_as = owner
        self._transport = transport
        self._deadline = deadline
        self._where = where

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        return await self.handle.resume(tags)

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
        keep_kv: bool = False,
    ) -> MemoryReport:
        """``overrides`` stay here: the replica over there knows itself what no sync feeds."""
        return await self.handle.release(tags, retention=retention, keep_kv=keep_kv)

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self.handle.release_kv_cache(keep_kv=keep_kv)

    async def resume_kv_cache(self) -> MemoryReport:
        return await self.handle.resume_kv_cache()

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        return await relay(self.handle, transfer, self._transport, self._deadline)

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        return self.handle.generate(request)

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        return await self.handle.pause_generation(
            mode, clear_cache=clear_cache, owner=self._pauses_as
        )

    async def resume_generation(self) -> None:
        await self.handle.resume_generation(owner=self._pauses_as)

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        return await self.handle.abort(request_ids)

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        await self.handle.reset_caches(which)

    async def status(self) -> BackendStatus:
        """The engine's own, with the replica's pauses, and versions of what is resident.

        :raises ReplicaLost: the replica says that it is.
        """
        said = await self.handle.status()
        if said.health is Health.LOST:
            raise ReplicaLost("it is lost over there", where=self._where)
        resident = {
            name: version
            for name, version in said.versions.items()
            if said.groups.get(name, "").startswith("RESIDENT")
        }
        return msgspec.structs.replace(said.backend, paused=said.is_paused, versions=resident)

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        return await self.handle.digest(names)

    async def memory(self) -> MemoryReport:
        return await self.handle.memory()


def relayed(said: Capabilities) -> Capabilities:
    """What the replica over there declares, as it holds for whoever drives it from here.

    Its ranks are its own business: what goes there is relayed as from one sender. A relay may break
    before their first byte: they are whole then, and what keeps others out is a pause.
    """
    gate = Gate.ENGINE_PAUSE if said.gate is Gate.IN_ENGINE else said.gate
    return dataclasses.replace(said, ranks=1, gate=gate)
