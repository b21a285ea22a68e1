"""Replicas that are elsewhere, as the cases drive them; and those that live on from case to case."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from hotbunk.rollout.contract import (
    FULL,
    ArenaHandle,
    BackendStatus,
    Bucket,
    Engine,
    GenerateRequest,
    ReceiverLayout,
    Scope,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.http.driven import DrivenEngine, relayed
from hotbunk.rollout.process import ProcessHandle, ReplicaSpec, start

OWNER = "conformance"  # of the pauses that the suite's own replica asks for


class Driven(DrivenEngine):
    """A replica in a process of its own."""

    handle: ProcessHandle

    def __init__(self, spec: ReplicaSpec, transport: str) -> None:
        super().__init__(
            spec.name,
            owner=OWNER,
            transport=transport,
            deadline=spec.deadlines.update,
            where=spec.name,
        )
        self._spec = spec

    async def start(self) -> None:
        self.handle = await start(self._spec)
        self.capabilities = relayed(self.handle.capabilities)

    async def close(self) -> None:
        if hasattr(self, "handle"):
            await self.handle.close()


class Relabelling(Engine):
    """Mixed into an engine whose replica lives on, and only takes versions that rise.

    ``incarnation`` is added to those of the suite.
    """

    incarnation = 0

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        there = Relabelled(transfer, self._there)
        report = await super().update_weights(  # type: ignore[safe-super]
            there, version=there.manifest.version, scope=there.manifest.scope
        )
        return msgspec.structs.replace(report, version=version)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if request.version is not None:
            request = msgspec.structs.replace(request, version=self._there(request.version))
        async for chunk in super().generate(request):  # type: ignore[safe-super]
            yield msgspec.structs.replace(chunk, version=self._here(chunk.version))

    async def status(self) -> BackendStatus:
        said = await super().status()  # type: ignore[safe-super]
        versions = {name: self._here(version) for name, version in said.versions.items()}
        return msgspec.structs.replace(said, versions=versions)

    def _there(self, version: Version) -> Version:
        return Version(version.incarnation + self.incarnation, version.step)

    def _here(self, version: Version) -> Version:
        return Version(version.incarnation - self.incarnation, version.step)


class Relabelled(Transfer):
    """A transfer under other versions."""

    def __init__(self, inner: Transfer, there: Any) -> None:
        manifest, self._inner = inner.manifest, inner
        base = manifest.scope.base
        scope = msgspec.structs.replace(manifest.scope, base=None if base is None else there(base))
        self.manifest = msgspec.structs.replace(
            manifest, version=there(manifest.version), scope=scope
        )

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        return await self._inner.accept(layout, arena)

    def buckets(self) -> AsyncIterator[Bucket]:
        return self._inner.buckets()

    async def fingerprints(self) -> Mapping[str, int]:
        return await self._inner.fingerprints()

    async def commit(self) -> None:
        await self._inner.commit()

    async def decline(self) -> None:
        await self._inner.decline()

    async def abort(self, error: BaseException) -> None:
        await self._inner.abort(error)
