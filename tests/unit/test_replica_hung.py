"""Hung, dead and crashing engines: typed errors, in time, and nobody waits in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hotbunk.conformance.backends.oracle_kit import ask, load, now, running
from hotbunk.conformance.rig import expect
from hotbunk.conformance.transfers import Hanging
from hotbunk.rollout.backends.oracle import FaultPlan
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.contract import (
    FinishReason,
    PauseMode,
    Retention,
    Version,
)
from hotbunk.rollout.errors import (
    DeadlineExceeded,
    EngineFailed,
    ReplicaLost,
    WeightsPoisoned,
)
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Deadlines, Health

pytestmark = pytest.mark.anyio


VERBS: dict[str, Callable[[Replica], Awaitable[object]]] = {
    "release/unmap": lambda r: r.release(),
    "release/backup": lambda r: r.release(retention=Retention.BACKUP),
    "resume/map": lambda r: r.resume(),
    "resume/restore": lambda r: r.resume(),
}


@pytest.mark.parametrize("point", VERBS)
async def test_a_memory_verb_that_hangs_loses_the_replica(point: str) -> None:
    """What is mapped is unknown: a deadline, then only a restart heals."""
    faults = FaultPlan().hangs(point)
    async with running(faults=faults) as (replica, _):
        error = await expect(DeadlineExceeded, VERBS[point](replica))
        assert error.seconds == replica.deadlines.memory
        assert replica.health is Health.LOST
        for verb in (replica.release(), replica.resume(), replica.pause_generation()):
            await expect(ReplicaLost, verb)
        await expect(ReplicaLost, ask(replica, "x").task)
        assert (await replica.status()).health is Health.LOST


@pytest.mark.parametrize("point", VERBS)
async def test_a_memory_verb_that_crashes_loses_the_replica(point: str) -> None:
    faults = FaultPlan().raises(point, RuntimeError("illegal access"))
    async with running(faults=faults) as (replica, _):
        error = await expect(EngineFailed, VERBS[point](replica))
        assert "illegal access" in str(error)
        assert "RuntimeError" in error.remote_traceback
        assert replica.health is Health.LOST


@pytest.mark.parametrize("point", ["release/unmap", "pause", "update/accept"])
async def test_an_engine_that_cannot_be_cancelled_is_lost(point: str) -> None:
    faults = FaultPlan().hangs(point, stubborn=True)
    async with running(faults=faults) as (replica, _):
        verb = load(replica, 1) if point.startswith("update") else replica.sleep(2)
        await expect(ReplicaLost, verb)
        assert replica.health is Health.LOST


async def test_a_hung_update_ends_at_its_deadline() -> None:
    """It can be cancelled: DIRTY after a byte, unchanged before; the replica lives (N7)."""
    faults = FaultPlan()
    async with running(faults=faults) as (replica, _):
        await load(replica, 1)
        for point, health in (("update/accept", Health.OK), ("update/bucket", Health.POISONED)):
            faults.hangs(point)
            began = now()
            await expect(DeadlineExceeded, load(replica, 2))
            assert now() - began == pytest.approx(replica.deadlines.update)
            assert replica.health is health
        await load(replica, 2)
        assert replica.health is Health.OK


@pytest.mark.parametrize(
    "point", ["update/post_load", "update/verify", "update/commit", "update/label"]
)
async def test_the_label_moves_last(point: str) -> None:
    """Whatever breaks, however late: no label, no token, on replica and engine (V8)."""
    faults = FaultPlan().raises(point, RuntimeError("boom"))
    async with running(faults=faults) as (replica, engine):
        await expect(EngineFailed, load(replica, 1))
        status = await replica.status()
        assert status.versions == status.backend.versions == {}
        assert engine.groups["target"].version is None
        await expect(WeightsPoisoned, ask(replica, "x").task)
        await load(replica, 1)
        assert (await ask(replica, "y").task).token_ids


async def test_status_and_abort_answer_while_a_verb_hangs() -> None:
    """Neither waits for the lock; the next verb does, and gets its turn (H11, N12)."""
    async with running() as (replica, _):
        await load(replica, 1)
        held_by = Hanging(weights_at(2), version=Version(0, 2), at=0)
        held_by.reached = asyncio.Event()
        update = asyncio.create_task(
            replica.update_weights(held_by, version=Version(0, 2), deadline=100.0)
        )
        await held_by.reached.wait()
        waiting, other = ask(replica, "held"), asyncio.create_task(replica.resume())
        await asyncio.sleep(1)
        began = now()
        status = await replica.status()
        assert status.held == ("held",)
        assert (await replica.abort(["held"])).aborted == ("held",)
        assert (await waiting.task).finish_reason is FinishReason.ABORT
        assert now() == began
        assert not other.done()
        await expect(DeadlineExceeded, update)
        await other


@pytest.mark.parametrize("silently", [False, True])
async def test_status_answers_for_a_dead_engine(silently: bool) -> None:
    faults = FaultPlan()
    async with running(faults=faults) as (replica, _):
        faults.dies("digest", silently=silently)
        await expect((DeadlineExceeded if silently else EngineFailed), replica.digest())
        status = await replica.status()
        assert status.backend.busy
        assert status.groups["target"] == "RESIDENT(0.0)"


async def test_a_stubborn_status_is_waited_for_no_longer_than_that() -> None:
    async with running(faults=FaultPlan()) as (replica, engine):
        engine.faults.hangs("status", stubborn=True, nth=0)
        began = now()
        assert (await replica.status()).backend.busy
        assert now() - began <= replica.deadlines.inspect + replica.deadlines.grace


async def test_a_crash_while_generating_is_typed() -> None:
    """The reader is told by a typed error with the engine's own words; so is the next caller."""
    async with running(faults=FaultPlan().raises("step", OSError("xid 31"), nth=3)) as (replica, _):
        request = ask(replica, "x")
        error = await expect(EngineFailed, request.task)
        assert "xid 31" in str(error)
        assert len(request.tokens) == 3
        await expect(EngineFailed, ask(replica, "y").task)


async def test_losing_a_replica_frees_who_waits() -> None:
    faults = FaultPlan()
    async with running(faults=faults) as (replica, _):
        frozen = await ask(replica, "frozen").started()
        await replica.pause_generation(PauseMode.KEEP)
        held = ask(replica, "held")
        await asyncio.sleep(1)
        faults.hangs("release/unmap")
        await expect(DeadlineExceeded, replica.release())
        began = now()
        for request in (frozen, held):
            done = await request.task
            assert done.finish_reason is FinishReason.ABORT
            assert done.retryable
        assert now() == began
        assert frozen.tokens


async def test_waiting_for_a_hung_verb_is_bounded() -> None:
    limits = Deadlines(update=10, memory=5)
    async with running(deadlines=limits) as (replica, _):
        transfer = Hanging(weights_at(1), version=Version(0, 1), at=0)
        hung = asyncio.create_task(
            replica.update_weights(transfer, version=Version(0, 1), deadline=1000)
        )
        await asyncio.sleep(1)
        began = now()
        await expect(DeadlineExceeded, replica.resume())
        assert now() - began == pytest.approx(15)
        hung.cancel()
        await asyncio.wait({hung})


async def test_a_verb_that_waited_finds_the_replica_lost() -> None:
    """It does not begin on an engine that was lost while it waited for its turn."""
    faults = FaultPlan().hangs("release/unmap")
    async with running(faults=faults) as (replica, engine):
        first = asyncio.create_task(replica.release())
        await asyncio.sleep(1)
        second = asyncio.create_task(replica.resume())
        await expect(DeadlineExceeded, first)
        await expect(ReplicaLost, second)
        assert "resume/map" not in engine.faults.seen
