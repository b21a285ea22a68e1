"""Several ranks as one engine, without processes: barriers, unions, and undo, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from hotbunk.conformance.backends.ranks import MAKE, OPENED, LocalRank, offer
from hotbunk.conformance.transfers import MemoryTransfer, Raising
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle import Device, FaultPlan, create
from hotbunk.rollout.backends.oracle.faults import Action, Fault
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.contract import (
    GenerateRequest,
    PauseMode,
    Retention,
    Sampling,
    Tag,
    Version,
    collect,
)
from hotbunk.rollout.process import union
from hotbunk.rollout.process.ranked import RankedEngine
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Health

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _nothing_recorded() -> None:
    OPENED.clear()
    MAKE.clear()


@asynccontextmanager
async def ranked(
    count: int = 3,
    *,
    faults: dict[int, FaultPlan] | None = None,
    devices: dict[int, Device] | None = None,
    seed: int = 0,
    **options: Any,
) -> AsyncIterator[tuple[Replica, list[LocalRank]]]:
    ranks = [
        LocalRank(
            n,
            create(faults=(faults or {}).get(n), device=(devices or {}).get(n), **options),
            random.Random(f"{seed}/{n}"),
        )
        for n in range(count)
    ]
    replica = Replica(RankedEngine(ranks), name="r0")
    await replica.start()
    try:
        yield replica, ranks
    finally:
        await replica.close()


async def update(replica: Replica, step: int, count: int) -> Any:
    ticket = offer(weights_at(step), Version(0, step), count, bucket_bytes=16)
    return await replica.update_weights(ticket, version=Version(0, step))


def ask(replica: Replica, name: str, tokens: int = 10) -> asyncio.Task[Any]:
    request = GenerateRequest(name, (1, 2, 3), Sampling(0.0, max_tokens=tokens))
    return asyncio.create_task(collect(replica.generate(request)))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
async def test_each_rank_opens_its_own_end_and_gets_every_bucket_once_h20_h22(count: int) -> None:
    async with ranked(count) as (replica, ranks):
        assert replica.capabilities.ranks == count
        report = await update(replica, 1, count)
        assert sorted((t.rank, t.ranks) for t, _ in OPENED) == [(n, count) for n in range(count)]
        assert report.applied == len(weights_at(1))
        buckets = [e for e in OPENED[0][1].events if e.startswith("bucket")]
        assert len(buckets) > 3
        assert report.buckets == count * len(buckets)
        for _, transfer in OPENED:
            assert transfer.events == ["accept", *buckets, "fingerprints", "commit"]
        for rank in ranks:
            assert {g.version for g in rank.engine.groups.values()} == {Version(0, 1)}
        # The version that is there is verified in every rank, and not sent again.
        again = await update(replica, 1, count)
        assert (again.skipped, again.verified) == (True, "applied")
        assert [t.events for _, t in OPENED[count:]] == [["decline"]] * count


async def test_nobody_writes_before_all_have_accepted_and_none_commits_before_all_can() -> None:
    seen: list[tuple[str, int]] = []

    class Told(MemoryTransfer):
        async def accept(self, *args: Any, **more: Any) -> bool:
            said = await super().accept(*args, **more)
            seen.append(("accepted", 0))
            return said

        async def spoil(self, k: int, bucket: Any) -> Any:
            seen.append(("bucket", k))
            return bucket

        async def commit(self) -> None:
            seen.append(("commit", 0))
            await super().commit()

    MAKE.update(dict.fromkeys("0123", Told))
    for seed in range(10):
        seen.clear()
        async with ranked(4, seed=seed) as (replica, _):
            await update(replica, 1, 4)
        kinds = [kind for kind, _ in seen]
        assert kinds[:4] == ["accepted"] * 4
        assert kinds[-4:] == ["commit"] * 4
        assert set(kinds[4:-4]) == {"bucket"}


@pytest.mark.parametrize("reached", [(), (1,), (0, 1, 2)])
async def test_the_first_byte_in_any_rank_is_the_replicas_n7(reached: tuple[int, ...]) -> None:
    """Senders that are gone before it have changed nothing; ``reached``: ranks that got one."""
    async with ranked(3) as (replica, ranks):
        await update(replica, 1, 3)
        for n in range(3):
            MAKE[str(n)] = partial(Raising, at=1 if n in reached else 0)
        with pytest.raises(errors.TransferFailed, match="the sender is gone"):
            await update(replica, 2, 3)
        assert replica.health is (Health.POISONED if reached else Health.OK)
        if not reached:
            assert {g.version for r in ranks for g in r.engine.groups.values()} == {Version(0, 1)}
            assert await ask(replica, "after")
        MAKE.clear()
        await update(replica, 2, 3)
        assert replica.health is Health.OK


async def test_the_mark_is_set_before_any_rank_writes() -> None:
    marked: list[bool] = []

    class Looking(FaultPlan):
        async def reach(self, point: str) -> bool:
            if point == "update/bucket":
                marked.append(bool(replica._residency.poisoned()))
            return await super().reach(point)

    async with ranked(2, faults={0: Looking(), 1: Looking()}) as (replica, _):
        await update(replica, 1, 2)
    assert marked
    assert all(marked)


@pytest.mark.parametrize(
    "point,health",
    [
        ("update/accept", Health.OK),
        ("update/bucket", Health.POISONED),
        ("update/verify", Health.POISONED),
        ("update/commit", Health.POISONED),
        ("update/label", Health.POISONED),
    ],
)
@pytest.mark.parametrize("which", [0, 2])
async def test_one_rank_that_fails_fails_all(point: str, health: Health, which: int) -> None:
    """Before a byte nothing changes anywhere; after it the replica serves nobody until a resend."""
    faults = FaultPlan()
    async with ranked(3, faults={which: faults}) as (replica, ranks):
        await update(replica, 1, 3)
        faults.raises(point, RuntimeError("a kernel broke"))
        with pytest.raises(errors.EngineFailed, match=rf"r0: rank {which}.*a kernel broke"):
            await update(replica, 2, 3)
        assert replica.health is health
        for ticket, transfer in OPENED[3:]:
            if ticket.rank != which and point != "update/label":
                assert transfer.aborted_with, f"rank {ticket.rank}'s sender was not told"
                assert "commit" not in transfer.events
        if health is Health.OK:
            versions = {g.version for r in ranks for g in r.engine.groups.values()}
            assert versions == {Version(0, 1)}
            assert not any(t.bytes_moved for _, t in OPENED[3:])
            assert (await ask(replica, "a")).token_ids
        else:
            with pytest.raises(errors.WeightsPoisoned):
                await ask(replica, "a")
        await update(replica, 3, 3)
        assert replica.health is Health.OK
        done = await asyncio.gather(*(ask(replica, f"b{n}") for n in range(6)))
        assert {s.version for d in done for s in d.spans} == {Version(0, 3)}


async def test_ranks_that_are_sent_different_contents_do_not_commit() -> None:
    class Other(MemoryTransfer):
        def __init__(self, tensors: Any, **more: Any) -> None:
            first, *rest = tensors
            super().__init__([(first[0], bytes(len(first[1]))), *rest], **more)

    MAKE["1"] = Other
    async with ranked(2) as (replica, _):
        with pytest.raises(errors.VerifyFailed, match=r"embed\.weight"):
            await update(replica, 1, 2)
        assert replica.health is Health.POISONED
        MAKE.clear()
        await update(replica, 1, 2)
        assert replica.health is Health.OK


async def test_a_ticket_for_another_number_of_ranks_is_refused() -> None:
    async with ranked(3) as (replica, _):
        with pytest.raises(errors.SessionError, match=r"for 2 rank\(s\) and there are 3"):
            await update(replica, 1, 2)
        assert not OPENED
        with pytest.raises(errors.SessionError, match="takes a ticket"):
            await replica.update_weights(
                MemoryTransfer(weights_at(1), version=Version(0, 1)), version=Version(0, 1)
            )
        assert replica.health is Health.OK


async def test_a_cancelled_update_ends_in_every_rank_and_the_next_one_works() -> None:
    for moment in range(1, 12):
        async with ranked(3, seed=moment) as (replica, _):
            task = asyncio.create_task(update(replica, 1, 3))
            await asyncio.sleep(moment * 0.08)
            task.cancel()
            await asyncio.wait({task})
            await update(replica, 2, 3)
            assert replica.health is Health.OK


async def test_no_rank_wakes_on_a_stale_word_h8() -> None:
    """Pause and resume a hundred times, with ranks that answer late: all open, or all shut."""
    async with ranked(4) as (replica, ranks):
        draw = random.Random(8)
        for round_ in range(100):
            mode = draw.choice(list(PauseMode))
            tasks = [ask(replica, f"{round_}/{n}", draw.randint(1, 6)) for n in range(5)]
            await asyncio.sleep(draw.uniform(0, 0.05))
            await replica.pause_generation(mode)
            assert all(r.engine.scheduler.standing_still for r in ranks)
            steps = [r.engine.scheduler.steps for r in ranks]
            await asyncio.sleep(draw.uniform(0, 0.5))
            assert [r.engine.scheduler.steps for r in ranks] == steps, "a rank stepped in a pause"
            await replica.resume_generation()
            assert {r.engine.scheduler.mode for r in ranks} == {None}
            await asyncio.gather(*tasks)
            await replica.check_invariants()


@pytest.mark.parametrize("fault", [Fault(Action.RAISE, RuntimeError("broke")), Fault(Action.HANG)])
async def test_generation_that_one_rank_does_not_resume_is_resumed_in_none(fault: Fault) -> None:
    """Also where that rank hangs, and the call is given up: the others had long resumed."""
    plan = FaultPlan()
    async with ranked(3, faults={1: plan}) as (replica, ranks):
        await update(replica, 1, 3)
        await replica.pause_generation()
        plan.at("resume_generation", fault)
        with pytest.raises((errors.EngineFailed, errors.DeadlineExceeded)):
            await replica.resume_generation()
        assert all(r.engine.scheduler.standing_still for r in ranks)
        assert {r.engine.scheduler.mode for r in ranks if r is not ranks[1]} == {PauseMode.KEEP}
        await replica.resume_generation()
        assert (await ask(replica, "a")).token_ids


async def test_a_resume_that_fails_in_one_rank_is_undone_in_the_others() -> None:
    for retention in (Retention.BACKUP, Retention.DISCARD):
        device = Device()
        async with ranked(3, devices={1: device}) as (replica, ranks):
            await update(replica, 1, 3)
            await replica.release(retention=retention)
            device.refuse.add(Tag.KV_CACHE)
            with pytest.raises(errors.ResumeOutOfMemory, match="rank 1"):
                await replica.resume()
            assert [r.engine.device.resident() for r in ranks] == [0, 0, 0]
            backups = [r.engine.device.host_used for r in ranks]
            assert len(set(backups)) == 1
            assert bool(backups[0]) is (retention is Retention.BACKUP)
            assert replica.health is Health.OK
            await replica.resume()
            if retention is Retention.DISCARD:
                await update(replica, 2, 3)
            assert (await ask(replica, "a")).token_ids


async def test_a_backup_without_room_in_one_rank_is_undone_in_the_others() -> None:
    device = Device(host_capacity=10)
    async with ranked(3, devices={2: device}) as (replica, ranks):
        with pytest.raises(errors.HostOutOfMemory, match="rank 2"):
            await replica.release(retention=Retention.BACKUP)
        assert len({r.engine.device.resident() for r in ranks}) == 1
        assert (await ask(replica, "a")).token_ids


@pytest.mark.parametrize("which", [0, 2])
async def test_a_discard_that_one_rank_refuses_leaves_all_mapped_and_empty(which: int) -> None:
    """What others discarded cannot come back; nobody is lost, nobody serves, a full update heals."""
    plan = FaultPlan()
    async with ranked(3, faults={which: plan}) as (replica, ranks):
        await update(replica, 1, 3)
        resident = [r.engine.device.resident() for r in ranks]
        plan.raises("release/unmap", errors.RequestsInFlight(("x",), "release", 1.0))
        with pytest.raises(errors.ReleaseUndone, match=f"rank {which}") as caught:
            await replica.sleep(2)
        assert isinstance(caught.value.__cause__, errors.RequestsInFlight)
        assert [r.engine.device.resident() for r in ranks] == resident
        status = await replica.status()
        assert (replica.health, status.is_sleeping, status.versions) == (Health.OK, False, {})
        assert set(status.groups.values()) == {"EMPTY"}
        with pytest.raises(errors.WeightsNotLoaded):
            await ask(replica, "a")
        await replica.check_invariants()
        assert not (await update(replica, 1, 3)).skipped
        assert {s.version for s in (await ask(replica, "b")).spans} == {Version(0, 1)}
        # With backups the same refusal changes nothing at all.
        plan.raises("release/unmap", errors.RequestsInFlight(("x",), "release", 1.0))
        with pytest.raises(errors.RequestsInFlight, match=f"rank {which}"):
            await replica.sleep(1)
        assert (await ask(replica, "c")).token_ids
        await replica.sleep(2)
        assert {r.engine.device.resident() for r in ranks} == {0}


async def test_a_rank_that_crashes_in_a_release_makes_the_replica_lost() -> None:
    plan = FaultPlan()
    async with ranked(3, faults={1: plan}) as (replica, _):
        plan.raises("release/unmap", RuntimeError("the driver crashed"))
        with pytest.raises(errors.EngineFailed, match=r"rank 1.*the driver crashed"):
            await replica.release(retention=Retention.DISCARD)
        assert replica.health is Health.LOST


async def test_requests_go_to_the_rank_with_fewest() -> None:
    async with ranked(3) as (replica, ranks):
        tasks = [ask(replica, f"a{n}", 400) for n in range(6)]
        await asyncio.sleep(0.1)
        assert [len(r.engine.scheduler.running) for r in ranks] == [2, 2, 2]
        status = await replica.status()
        assert set(status.backend.running) == {f"a{n}" for n in range(6)}
        gone = [task for task, n in zip(tasks, range(6), strict=True) if n % 3 == 1]
        assert (await replica.abort(["a1", "a4", "zz"])).unknown == ("zz",)
        await asyncio.gather(*gone)
        more = [ask(replica, f"b{n}", 400) for n in range(2)]
        await asyncio.sleep(0.1)
        assert [len(r.engine.scheduler.running) for r in ranks] == [2, 2, 2]
        report = await replica.pause_generation(PauseMode.ABORT)
        assert len(report.aborted) == 6
        await asyncio.gather(*tasks, *more)


async def test_what_ranks_report_adds_up() -> None:
    async with ranked(3) as (replica, ranks):
        each = [await r.engine.memory() for r in ranks]
        memory = await replica.memory()
        assert memory.resident() == sum(m.resident() for m in each)
        assert len(memory.arenas) == len(each[0].arenas)
        digest = await replica.digest()
        assert digest.ranks == (0, 1, 2)
        assert dict(digest.values) == dict((await ranks[0].engine.digest()).values)
        ranks[1].engine.groups["target"].flip_a_bit()
        differing = await replica.digest(["embed.weight", "layers.0.gate"])
        assert differing.values["embed.weight"] == union.DIFFERENT
        assert differing.values["layers.0.gate"] != union.DIFFERENT


async def test_content_that_changed_in_one_rank_is_sent_again() -> None:
    async with ranked(2) as (replica, ranks):
        await update(replica, 1, 2)
        ranks[1].engine.groups["target"].flip_a_bit()
        report = await update(replica, 1, 2)
        assert not report.skipped
        assert len({r.engine.groups["target"].digest() for r in ranks}) == 1
