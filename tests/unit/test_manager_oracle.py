"""A sync over several replicas, on oracles in virtual time: nobody opens or releases too early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import Outcome, ReleaseKV, SyncPolicy
from hotbunk.checkpoint_engine.transports.base import Offer
from hotbunk.conformance.backends.oracle_kit import ask, load, running
from hotbunk.conformance.rig import check_spans
from hotbunk.conformance.transfers import MemoryTransfer
from hotbunk.rollout.backends.oracle import FaultPlan, decode_token
from hotbunk.rollout.backends.oracle.faults import Action, Fault
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.contract import (
    Deployment,
    FinishReason,
    TensorSpec,
    Ticket,
    UpdateReport,
    Version,
)
from hotbunk.rollout.errors import SyncFailed
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.replica import Replica

pytestmark = pytest.mark.anyio


class Weights:
    """A trainer's weights of a version; a transport that carries them needs no bytes of a tensor."""

    def __init__(self, step: int) -> None:
        self.step = step

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec, _ in weights_at(self.step))

    def tensors(self) -> Any:
        raise AssertionError("the transport of this test asks for none")


class Carrier:
    """A transport whose tickets say which weights to take."""

    async def offer(self, source: Any, manifest: Any, *, ranks: Any, **more: Any) -> Any:
        class Carried(Offer):
            tickets = tuple(Ticket("memory", str(source.step)) for _ in ranks)

            async def serve(self) -> None:
                return None

            async def close(self) -> None:
                return None

        return Carried()


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

    async def resume_generation(self, **more: Any) -> None:
        self.note("opened")
        await super().resume_generation(**more)

    async def release_kv_cache(self, **more: Any) -> Any:
        done = await super().release_kv_cache(**more)
        self.note("released")
        return done


@asynccontextmanager
async def pool(
    faults: dict[int, tuple[str, Fault]], **options: Any
) -> AsyncIterator[tuple[CheckpointEngineManager, list[Noting]]]:
    """A manager over three replicas with weights 0.1; ``faults`` by replica."""
    notes: list[tuple[str, str, float]] = []
    async with AsyncExitStack() as stack:
        handles = []
        for n in range(3):
            plan = FaultPlan()
            replica, _ = await stack.enter_async_context(running(faults=plan))
            replica.name = f"r{n}"
            await load(replica, 1)
            if n in faults:
                plan.at(*faults[n])
            handles.append(Noting(replica, notes))
        manager = CheckpointEngineManager(
            handles,
            Carrier(),  # type: ignore[arg-type]
            deployment=Deployment.STANDALONE,
            policy=SyncPolicy(**options),
        )
        yield manager, handles


async def test_nobody_opens_before_the_slowest_has_acknowledged_h12() -> None:
    """Replica 2 acknowledges 50 s late; requests that came meanwhile wait, and get the new weights."""
    late = {2: ("update/commit", Fault(Action.DELAY, seconds=50.0))}
    async with pool(late) as (manager, handles):
        running_ones = [ask(h.replica, f"old{n}", 500) for n, h in enumerate(handles)]
        for one in running_ones:
            await one.started()
        syncing = asyncio.create_task(
            manager.update_weights(Weights(2), Version(0, 2))  # type: ignore[arg-type]
        )
        await asyncio.sleep(10)
        held = [ask(h.replica, f"new{n}", 5) for n, h in enumerate(handles)]
        await asyncio.sleep(10)
        assert not any(one.done for one in held), "a replica opened before all had acknowledged"
        report = await syncing
        assert report.ok
        acknowledged = [at for what, _, at in handles[0].notes if what == "acknowledged"]
        opened = [at for what, _, at in handles[0].notes if what == "opened"]
        assert len(acknowledged) == len(opened) == 3
        assert max(acknowledged) <= min(opened)
        for one in held:
            done = await one.result()
            assert {decode_token(t).version for t in done.token_ids} == {Version(0, 2)}
        for one in running_ones:
            done = await one.result()
            check_spans(done)
            assert (done.finish_reason, done.retryable) == (FinishReason.ABORT, True)


async def test_no_kv_leaves_under_a_request_that_runs_k5() -> None:
    """Each replica stands still before its KV goes, also for who comes late."""
    slow = {1: ("pause", Fault(Action.DELAY, seconds=5.0))}
    async with pool(slow, release_kv=ReleaseKV.ALWAYS) as (manager, handles):
        early = [ask(h.replica, f"early{n}", 900) for n, h in enumerate(handles)]
        for one in early:
            await one.started()
        syncing = asyncio.create_task(
            manager.update_weights(Weights(2), Version(0, 2))  # type: ignore[arg-type]
        )
        late = []
        for moment in range(8):
            await asyncio.sleep(1)
            late += [ask(h.replica, f"l{moment}{n}", 4) for n, h in enumerate(handles)]
        assert (await syncing).ok
        released = [at for what, _, at in handles[0].notes if what == "released"]
        assert len(released) == 3
        for one in early:
            assert (await one.result()).finish_reason is FinishReason.ABORT
        for one in late:  # an oracle that runs over released KV crashes
            assert len((await one.result()).token_ids) == 4
        for handle in handles:
            await handle.replica.check_invariants()


async def test_a_failed_replica_keeps_no_new_label_and_the_others_have_it_v8() -> None:
    """A fault at the last moment: the version is unchanged where the update did not commit."""
    broken = {1: ("update/verify", Fault(Action.RAISE, RuntimeError("a kernel broke")))}
    async with pool(broken) as (manager, handles):
        with pytest.raises(SyncFailed, match="r1") as caught:
            await manager.update_weights(Weights(2), Version(0, 2))  # type: ignore[arg-type]
        outcomes = {o.replica: o.outcome for o in caught.value.report.outcomes}  # type: ignore[attr-defined]
        assert outcomes == {
            "r0": Outcome.COMMITTED,
            "r1": Outcome.POISONED,
            "r2": Outcome.COMMITTED,
        }
        for n, handle in enumerate(handles):
            versions = (await handle.status()).versions
            assert versions.get("target") == (None if n == 1 else Version(0, 2))
        report = await manager.update_weights(Weights(3), Version(0, 3))  # type: ignore[arg-type]
        assert report.ok, "a full resend did not heal it"
