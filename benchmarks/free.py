"""Replicas and a transport that cost nothing, so that what is left is the manager's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from hotbunk.checkpoint_engine.transports.base import Offer, Transport
from hotbunk.rollout.contract import (
    TARGET,
    BackendStatus,
    Capabilities,
    Manifest,
    MemoryReport,
    PauseMode,
    PauseReport,
    TensorSpec,
    Ticket,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.lifecycle import KV
from hotbunk.rollout.status import Health, ReplicaStatus

_MEMORY = MemoryReport()
_PAUSED = PauseReport(PauseMode.ABORT)


class FreeHandle:
    """A replica's verbs, each of which returns at once and says what it should."""

    capabilities = Capabilities("free")

    def __init__(self, name: str) -> None:
        self.name = name
        self._status = ReplicaStatus(
            name=name,
            health=Health.OK,
            groups={TARGET: "RESIDENT(0.0)"},
            versions={TARGET: Version()},
            kv=KV.RESIDENT,
            pauses=(),
            held=(),
            running=(),
            is_paused=False,
            is_sleeping=False,
            servable=True,
            backend=BackendStatus(),
        )

    async def status(self) -> ReplicaStatus:
        return self._status

    async def pause_generation(self, *_: Any, **__: Any) -> PauseReport:
        return _PAUSED

    async def resume_generation(self, **_: Any) -> None:
        pass

    async def release_kv_cache(self, **_: Any) -> MemoryReport:
        return _MEMORY

    async def resume_kv_cache(self) -> MemoryReport:
        return _MEMORY

    async def update_weights(self, source: Ticket, *, version: Version, **_: Any) -> UpdateReport:
        held = {TARGET: version}
        self._status = msgspec.structs.replace(self._status, versions=held)
        return UpdateReport(version, applied=1)

    async def memory(self) -> MemoryReport:
        return _MEMORY

    async def close(self) -> None:
        pass

    def __getattr__(self, verb: str) -> Any:
        raise AttributeError(f"a sync of these needs no {verb}")


class FreeTransport(Transport):
    """Tickets at once, and nothing to serve."""

    name = "free"

    async def offer(
        self, source: object, manifest: Manifest, *, ranks: Sequence[int] = (1,), **_: object
    ) -> Offer:
        return _Nothing(len(ranks))

    @staticmethod
    async def open(ticket: Ticket) -> Transfer:
        raise AssertionError("nobody opens these")


class _Nothing(Offer):
    def __init__(self, replicas: int) -> None:
        self.tickets = tuple(Ticket("free", str(n)) for n in range(replicas))

    async def serve(self) -> None:
        pass

    async def close(self) -> None:
        pass


class FreeSource:
    """One tensor that nobody reads."""

    def specs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("w", (1,), "float32", 4),)

    def tensors(self) -> Iterator[Any]:
        return iter(())
