"""Syncs that are fenced, cancelled or late: no KV too early, no bucket left, no fault."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import (
    Outcome,
    SyncPolicy,
)
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    Tag,
    Version,
)
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.memory import HostPool
from hotbunk.rollout.status import Health

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7, 8]
BUCKET = 65_536


# -- fences -----------------------------------------------------------------------------------


async def test_kv_that_does_not_fit_afterwards_fences_a_committed_replica(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny(seed=0))
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport())
    await manager.sleep_replicas()
    original = target.backend.resume

    async def full(tags: Any = None) -> Any:
        if Tag.KV_CACHE in tags:
            raise errors.ResumeOutOfMemory("kv_cache", 1 << 30, 4096)
        return await original(tags)

    target.backend.resume = full
    report = await kit.failed(manager.update_weights(kit.source(tiny(seed=1)), Version(0, 1)))
    outcome = report.outcomes[0]
    assert (outcome.outcome, outcome.error_type) == (Outcome.FENCED, "ResumeOutOfMemory")
    assert outcome.version == Version(0, 1)
    status = await target.status()
    assert (status.versions, status.servable) == ({"target": Version(0, 1)}, False)
    assert status.is_sleeping
    target.backend.resume = original  # the other tenant has gone
    again = await manager.update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    assert again.outcomes[0].update is not None
    assert again.outcomes[0].update.skipped
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(tiny(seed=1), PROMPT)


@pytest.mark.parametrize(
    "error", [errors.HostOutOfMemory(5, 3), RuntimeError("no room for the optimizer")]
)
@pytest.mark.parametrize("asleep", [True, False])
async def test_a_trainer_that_does_not_let_go_fences_and_kv_stays_unmapped(
    tiny: Any, kit: Any, replica: Any, error: Exception, asleep: bool
) -> None:
    target, log = await replica(tiny(seed=0)), list[str]()
    manager = CheckpointEngineManager([kit.recording(target, log)], NaiveTransport())
    if asleep:
        await manager.sleep_replicas()

    async def let_go() -> None:
        raise error

    source = kit.source(tiny(seed=1))
    report = await kit.failed(manager.update_weights(source, Version(0, 1), let_go=let_go))
    outcome = report.outcomes[0]
    assert outcome.outcome is Outcome.FENCED
    assert "the trainer did not let go" in outcome.error
    assert str(error) in outcome.error
    assert "wake_up kv_cache" not in log
    status = await target.status()
    assert status.is_paused
    assert status.versions == {"target": Version(0, 1)}
    await manager.update_weights(source, Version(0, 1))
    assert not (await target.status()).is_paused
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(tiny(seed=1), PROMPT)


async def test_a_fence_of_an_earlier_sync_ends_with_the_next_one_although_it_slept_between(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny(seed=0))
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport())

    async def let_go() -> None:
        raise errors.HostOutOfMemory(5, 3)

    source = kit.source(tiny(seed=1))
    await kit.failed(manager.update_weights(source, Version(0, 1), let_go=let_go))
    await kit.failed(manager.update_weights(kit.source(tiny("qwen3")), Version(0, 2)))
    assert (await target.status()).is_paused, "a refused sync does not lift the fence of another"
    await manager.sleep_replicas()
    await manager.update_weights(source, Version(0, 2))
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(tiny(seed=1), PROMPT)


# -- cut short --------------------------------------------------------------------------------


@pytest.mark.parametrize("asleep", [True, False])
async def test_cancelled_in_the_middle_leaves_a_poisoned_replica_and_no_bucket(
    tiny: Any, kit: Any, replica: Any, pool: HostPool, asleep: bool
) -> None:
    target, source = await replica(tiny(seed=0)), kit.slow(kit.source(tiny(seed=1)))
    manager = CheckpointEngineManager(
        [LocalHandle(target)], NaiveTransport(pool), policy=SyncPolicy(bucket_bytes=4096)
    )
    if asleep:
        await manager.sleep_replicas()
    sync = asyncio.ensure_future(manager.update_weights(source, Version(0, 1)))
    await asyncio.to_thread(source.touched.wait, 10)
    sync.cancel()
    await asyncio.sleep(0.05)
    # The packing thread still writes: its buffer may not be taken away under it.
    assert pool.audit().resident("bucket") > 0
    source.go.set()
    with pytest.raises(asyncio.CancelledError):
        await sync
    assert not pool.arenas()
    status = await target.status()
    assert (status.health, status.groups) == (Health.POISONED, {"target": "DIRTY"})
    assert status.is_paused, "nobody may start on half-written weights"
    await target.check_invariants()
    good = await manager.update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    assert good.ok
    assert list((await kit.complete(target, PROMPT)).token_ids) == kit.golden(tiny(seed=1), PROMPT)


async def test_a_write_that_is_under_way_ends_before_the_sync_does(
    tiny: Any, kit: Any, replica: Any, pool: HostPool
) -> None:
    """The engine's thread still reads the bucket: it may not be taken away under it."""
    target = await replica(tiny(seed=0))
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport(pool))
    go, writing, seen = threading.Event(), threading.Event(), list[bool]()
    command = target.backend._thread.call

    def held(call: Any) -> Any:
        if getattr(call, "args", ()) and call.args[0] is not None:  # a bucket to be written

            def slow() -> Any:
                writing.set()
                go.wait(20)
                result = call()
                seen.append(bool(pool.arenas()))
                return result

            return command(slow)
        return command(call)

    target.backend._thread.call = held
    sync = asyncio.ensure_future(manager.update_weights(kit.source(tiny(seed=1)), Version(0, 1)))
    await asyncio.to_thread(writing.wait, 10)
    sync.cancel()
    await asyncio.sleep(0.05)
    assert pool.arenas()
    assert not sync.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await sync
    assert seen == [True]
    assert not pool.arenas()
    assert (await target.status()).health is Health.POISONED


@pytest.mark.parametrize("asleep", [True, False])
async def test_cancelled_before_a_byte_leaves_everything_as_it_was(
    tiny: Any, kit: Any, replica: Any, asleep: bool
) -> None:
    class Stuck(NaiveTransport):
        async def offer(self, *args: Any, **kw: Any) -> Any:
            reached.set()
            await asyncio.Event().wait()

    reached = asyncio.Event()
    target = await replica(tiny(seed=0))
    manager = CheckpointEngineManager([LocalHandle(target)], Stuck())
    if asleep:
        await manager.sleep_replicas()
    before = await target.status()
    sync = asyncio.ensure_future(manager.update_weights(kit.source(tiny(seed=1)), Version(0, 1)))
    await reached.wait()
    sync.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sync
    after = await target.status()
    assert (after.groups, after.kv, after.is_sleeping) == (
        before.groups,
        before.kv,
        before.is_sleeping,
    )
    assert [p.owner for p in after.pauses] == [p.owner for p in before.pauses]


@pytest.mark.parametrize("asleep", [True, False])
async def test_cancelled_after_the_commit_keeps_the_version_and_maps_no_kv(
    tiny: Any, kit: Any, replica: Any, asleep: bool
) -> None:
    target, log = await replica(tiny(seed=0)), list[str]()
    manager = CheckpointEngineManager([kit.recording(target, log)], NaiveTransport())
    if asleep:
        await manager.sleep_replicas()
    letting = asyncio.Event()

    async def let_go() -> None:
        letting.set()
        await asyncio.Event().wait()

    source = kit.source(tiny(seed=1))
    sync = asyncio.ensure_future(manager.update_weights(source, Version(0, 1), let_go=let_go))
    await letting.wait()
    sync.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sync
    assert "wake_up kv_cache" not in log
    status = await target.status()
    assert status.versions == {"target": Version(0, 1)}
    assert status.groups == {"target": "RESIDENT(0.1)"}
    assert (status.is_sleeping, status.is_paused) == (asleep, asleep)
    if not asleep:
        done = await kit.complete(target, PROMPT)
        assert list(done.token_ids) == kit.golden(tiny(seed=1), PROMPT)


async def test_a_source_slower_than_the_deadline_poisons_and_the_bucket_goes_back(
    tiny: Any, kit: Any, replica: Any, pool: HostPool
) -> None:
    target, source = await replica(tiny(seed=0)), kit.slow(kit.source(tiny(seed=1)))
    policy = SyncPolicy(bucket_bytes=4096, deadline=0.2)
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport(pool), policy=policy)
    sync = asyncio.ensure_future(kit.failed(manager.update_weights(source, Version(0, 1))))
    await asyncio.to_thread(source.touched.wait, 10)
    await asyncio.sleep(0.4)
    source.go.set()
    report = await sync
    outcome = report.outcomes[0]
    assert (outcome.outcome, outcome.error_type) == (Outcome.POISONED, "DeadlineExceeded")
    assert not pool.arenas()


async def test_buckets_are_given_back_after_success_refusal_and_failure(
    tiny: Any, kit: Any, replica: Any, pool: HostPool
) -> None:
    target = await replica(tiny(seed=0))
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport(pool))

    class Breaking(kit.slow):  # type: ignore[misc]
        def tensors(self) -> Iterator[Any]:
            yield from list(self.inner.tensors())[:2]
            raise RuntimeError("broke")

    good = kit.source(tiny(seed=1))
    await manager.update_weights(good, Version(0, 1))
    assert not pool.arenas()
    await kit.failed(manager.update_weights(kit.source(tiny("qwen3")), Version(0, 2)))
    assert not pool.arenas()
    await kit.failed(
        manager.update_weights(Breaking(good), Version(0, 2), policy=SyncPolicy(bucket_bytes=512))
    )
    assert not pool.arenas()
