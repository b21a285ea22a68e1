"""Oracles under a manager: a sync over several replicas in virtual time, without a tensor.

Weights travel by a number in the ticket; a handle of these opens it in the replica's place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.transports.base import Offer, Published, Transport
from hotbunk.conformance.backends.oracle_kit import load, running
from hotbunk.conformance.transfers import MemoryTransfer
from hotbunk.rollout.backends.oracle import FaultPlan
from hotbunk.rollout.backends.oracle.faults import Fault
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.contract import (
    Deployment,
    TensorSpec,
    Ticket,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.replica import Replica


class Weights:
    """A trainer's weights of a version; a transport that carries them needs no bytes of a tensor."""

    def __init__(self, step: int) -> None:
        self.step = step

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec, _ in weights_at(self.step))

    def tensors(self) -> Any:
        raise AssertionError("the transport of these tests asks for none")


class TensorWeights(Weights):
    """The same with their tensors, for transports that move bytes. Every group an oracle has."""

    def tensors(self) -> Iterator[Any]:
        import torch

        from hotbunk.rollout.binding import dtype_from

        for spec, content in weights_at(self.step):
            raw = torch.tensor(list(content), dtype=torch.uint8)
            yield raw.view(dtype_from(spec.dtype)).reshape(spec.shape)


class _Carried(Offer):
    def __init__(self, step: int, replicas: int) -> None:
        self.tickets = tuple(Ticket("memory", str(step)) for _ in range(replicas))

    async def serve(self) -> None:
        """The receivers help themselves."""

    async def close(self) -> None:
        """Nothing is held."""


class Carrier(Transport):
    """A transport whose tickets say which weights to take. ``offers`` and ``sets`` count them."""

    name = "memory"

    def __init__(self) -> None:
        self.offers = 0
        self.sets = 0

    async def offer(self, source: Any, manifest: Any, *, ranks: Any = (1,), **more: Any) -> Offer:
        self.offers += 1
        return _Carried(source.step, len(ranks))

    async def publish(self, source: Any, manifest: Any) -> Published:
        self.sets += 1
        return Published(manifest, Ticket("memory", str(source.step), published=True))

    @staticmethod
    async def open(ticket: Ticket) -> Transfer:
        raise AssertionError("handles of this kit open tickets themselves")


class Noting(LocalHandle):
    """A handle that opens such tickets, and notes who did what and when."""

    def __init__(self, replica: Replica, notes: list[tuple[str, str, float]]) -> None:
        super().__init__(replica)
        self.replica = replica
        self.notes = notes

    def note(self, what: str) -> None:
        self.notes.append((what, self.name, asyncio.get_running_loop().time()))

    async def update_weights(
        self, source: Ticket, *, version: Version, **more: Any
    ) -> UpdateReport:
        transfer = MemoryTransfer(weights_at(int(source.address)), version=version)
        report = await self.replica.update_weights(transfer, version=version)
        self.note("acknowledged")
        return report

    async def pause_generation(self, *args: Any, **more: Any) -> Any:
        done = await super().pause_generation(*args, **more)
        self.note("paused")
        return done

    async def resume_generation(self, **more: Any) -> None:
        self.note("opened")
        await super().resume_generation(**more)

    async def release_kv_cache(self, **more: Any) -> Any:
        self.note("releases")
        done = await super().release_kv_cache(**more)
        self.note("released")
        return done


@asynccontextmanager
async def pool(
    faults: Mapping[int, tuple[str, Fault]] | None = None,
    *,
    replicas: int = 3,
    deployment: Deployment = Deployment.STANDALONE,
    **options: Any,
) -> AsyncIterator[tuple[CheckpointEngineManager, list[Noting]]]:
    """A manager over replicas with weights 0.1; ``faults`` by replica, ``options`` of the policy."""
    notes: list[tuple[str, str, float]] = []
    async with AsyncExitStack() as stack:
        handles = []
        for n in range(replicas):
            plan = FaultPlan()
            replica, _ = await stack.enter_async_context(running(faults=plan))
            replica.name = f"r{n}"
            await load(replica, 1)
            if faults and n in faults:
                plan.at(*faults[n])
            handles.append(Noting(replica, notes))
        manager = CheckpointEngineManager(
            handles, Carrier(), deployment=deployment, policy=SyncPolicy(**options)
        )
        yield manager, handles
        await manager.close()
