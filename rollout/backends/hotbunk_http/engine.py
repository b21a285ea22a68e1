"""The contract over a server: what a Replica here drives, through the server's own Replica."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

import msgspec

from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
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
from hotbunk.rollout.errors import ReplicaLost, SessionError
from hotbunk.rollout.http.relay import relay
from hotbunk.rollout.status import Health

OWNER = "hotbunk_http"  # of the pauses that the driver here asks for


class HttpEngine(Engine):
    """See the package. The server keeps every rule by itself, for whoever else asks it."""

    def __init__(self, options: HttpOptions) -> None:
        self.options = options
        self.capabilities = Capabilities("hotbunk_http")
        self.handle: HttpHandle

    async def start(self) -> None:
        """Connect.

        :raises SessionError: the server sleeps, which its driver here could not know.
        """
        self.handle = await HttpHandle.connect(self.options)
        status = await self.handle.status()
        if status.is_sleeping:
            await self.handle.close()
            raise SessionError(
                "the server sleeps", where=self.options.url, remedy="wake it up, then connect"
            )
        # Its ranks are its own business: what goes there is relayed as from one sender. A relay
        # that breaks here may leave the server whole: then its pause is what keeps others out.
        said = self.handle.capabilities
        gate = Gate.ENGINE_PAUSE if said.gate is Gate.IN_ENGINE else said.gate
        self.capabilities = dataclasses.replace(said, backend="hotbunk_http", ranks=1, gate=gate)

    async def close(self) -> None:
        if hasattr(self, "handle"):
            await self.handle.close()

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
        """``overrides`` stay here: the server's replica knows itself what no sync feeds."""
        return await self.handle.release(tags, retention=retention, keep_kv=keep_kv)

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self.handle.release_kv_cache(keep_kv=keep_kv)

    async def resume_kv_cache(self) -> MemoryReport:
        return await self.handle.resume_kv_cache()

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        deadline = self.options.deadlines.update
        return await relay(self.handle, transfer, self.options.relay, deadline)

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        return await self.handle.pause_generation(mode, clear_cache=clear_cache, owner=OWNER)

    async def resume_generation(self) -> None:
        await self.handle.resume_generation(owner=OWNER)

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        return await self.handle.abort(request_ids)

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        await self.handle.reset_caches(which)

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        return self.handle.generate(request)

    async def status(self) -> BackendStatus:
        said = await self.handle.status()
        if said.health is Health.LOST:
            raise ReplicaLost("the server is lost", where=self.options.url)
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
