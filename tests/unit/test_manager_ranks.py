"""A sync with several trainer ranks: all gather, all let go, and none waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager  # noqa: E402
from hotbunk.checkpoint_engine.policy import SyncPolicy, SyncReport  # noqa: E402
from hotbunk.checkpoint_engine.ranks import StoreRanks  # noqa: E402
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport  # noqa: E402
from hotbunk.conformance.backends.oracle_kit import load, running  # noqa: E402
from hotbunk.rollout import errors  # noqa: E402
from hotbunk.rollout.backends.oracle import FaultPlan  # noqa: E402
from hotbunk.rollout.backends.oracle.faults import Action, Fault  # noqa: E402
from hotbunk.rollout.backends.oracle.model import weights_at  # noqa: E402
from hotbunk.rollout.contract import Deployment, Version  # noqa: E402
from hotbunk.rollout.handle import LocalHandle  # noqa: E402

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Ranks wait in threads: a real clock."""
    return "asyncio"


class Gathered:
    """One rank's view of sharded weights; a walk notes every tensor it takes part in gathering."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.took_part = 0
        self.breaks_at = -1
        self.breaks_before = False
        self.walks = self.ended = 0
        self.order: list[tuple[int, int]] = []  # (walk, tensor), as they were gathered

    def specs(self) -> Any:
        if self.breaks_before:
            raise RuntimeError("no specs")
        return tuple(spec for spec, _ in weights_at(self.step))

    def tensors(self) -> Iterator[Any]:
        walk, self.walks = self.walks, self.walks + 1
        try:
            for n, (spec, content) in enumerate(weights_at(self.step)):
                if n == self.breaks_at:
                    raise RuntimeError("the gather broke")
                self.took_part += 1
                self.order.append((walk, n))
                raw = torch.tensor(list(content), dtype=torch.uint8)
                yield raw.view(getattr(torch, spec.dtype)).reshape(spec.shape)
        finally:
            self.ended += 1


class Trainer:
    """Ranks of one trainer on one loop, each with its manager; ``log`` is what they let go of."""

    def __init__(
        self, handles: Any, world: int = 3, deadline: float = 5.0, bucket_bytes: int = 32 << 20
    ) -> None:
        store = self.store = torch.distributed.HashStore()
        self.log: list[str] = []
        self.sources = [Gathered(2) for _ in range(world)]
        self.managers = [
            CheckpointEngineManager(
                handles if rank == 0 else [],
                NaiveTransport(),
                deployment=Deployment.STANDALONE,
                policy=SyncPolicy(bucket_bytes=bucket_bytes),
                ranks=StoreRanks(store, rank, world, deadline=deadline),
            )
            for rank in range(world)
        ]

    async def sync(self, without: int = -1) -> list[Any]:
        async def one(rank: int) -> SyncReport:
            async def let_go() -> None:
                await asyncio.sleep(0.1 * rank)
                self.log.append(f"rank {rank}")

            manager = self.managers[rank]
            return await manager.update_weights(self.sources[rank], Version(0, 2), let_go=let_go)

        going = [one(rank) for rank in range(len(self.managers)) if rank != without]
        return await asyncio.gather(*going, return_exceptions=True)


async def test_all_ranks_gather_and_let_go_before_any_kv_comes_back() -> None:
    async with running() as (replica, _):
        await load(replica, 1)
        trainer = Trainer([LocalHandle(replica)])
        resume = replica.resume_generation

        async def noting(**more: Any) -> None:
            trainer.log.append("opened")
            await resume(**more)

        replica.resume_generation = noting  # type: ignore[method-assign,assignment]
        reports = await trainer.sync()
        assert all(isinstance(report, SyncReport) and report.ok for report in reports), reports
        counts = {source.took_part for source in trainer.sources}
        assert counts == {len(weights_at(2))}, "a rank was left alone in a gather"
        assert trainer.log == ["rank 0", "rank 1", "rank 2", "opened"]
        assert (await replica.status()).versions["target"] == Version(0, 2)


@pytest.mark.parametrize("phase", ["update/accept", "update/bucket", "update/verify"])
async def test_a_failed_sync_leaves_no_rank_behind(phase: str) -> None:
    """The walk is ended with the others, whatever became of the replicas."""
    plan = FaultPlan()
    async with running(faults=plan) as (replica, _):
        await load(replica, 1)
        plan.at(phase, Fault(Action.RAISE, RuntimeError("a kernel broke")))
        trainer = Trainer([LocalHandle(replica)], bucket_bytes=64)
        leader, *followers = await trainer.sync()
        assert isinstance(leader, errors.SyncFailed)
        assert all(source.ended == source.walks for source in trainer.sources)
        for report in followers:
            assert isinstance(report, SyncReport)
            assert report.outcomes == ()
        assert len({source.took_part for source in trainer.sources}) == 1
        assert trainer.log == []
        reports = await trainer.sync()  # in step for the next one, which heals
        assert all(isinstance(report, SyncReport) for report in reports), reports


async def test_two_walks_at_once_are_gathered_in_one_order_by_all() -> None:
    """Replicas here walk the source each in its own time; a gather must find its like elsewhere."""
    async with running() as (one, _), running() as (other, _):
        other.name = "r1"
        handles = [LocalHandle(one), LocalHandle(other)]
        for replica in (one, other):
            await load(replica, 1)
        trainer = Trainer(handles, bucket_bytes=64)
        reports = await trainer.sync()
        assert all(isinstance(report, SyncReport) for report in reports), reports
        first, *others = (source.order for source in trainer.sources)
        assert {walk for walk, _ in first} == {0, 1}
        assert first != sorted(first), "the walks did not mix, so nothing was tried"
        assert others == [first, first]


async def test_a_source_that_cannot_say_what_it_has_leaves_the_replica_serving() -> None:
    async with running() as (replica, _):
        await load(replica, 1)
        trainer = Trainer([LocalHandle(replica)])
        trainer.sources[0].breaks_before = True
        leader, *followers = await trainer.sync()
        assert isinstance(leader, errors.SyncFailed), leader
        assert "no specs" in str(leader)
        assert all(isinstance(one, SyncReport) for one in followers), followers
        status = await replica.status()
        assert not status.is_paused, "the sync's pause is still held"
        assert status.versions["target"] == Version(0, 1)


async def test_what_all_ranks_have_read_does_not_stay_in_the_store() -> None:
    async with running() as (replica, _):
        await load(replica, 1)
        trainer = Trainer([LocalHandle(replica)])
        kept = []
        for _ in range(4):
            reports = await trainer.sync()
            assert all(isinstance(report, SyncReport) for report in reports), reports
            kept.append(trainer.store.num_keys())
        assert kept[1] == kept[3], kept


async def test_a_rank_that_does_not_come_is_named() -> None:
    async with running() as (replica, _):
        await load(replica, 1)
        trainer = Trainer([LocalHandle(replica)], deadline=0.5)
        leader, follower = await trainer.sync(without=2)
        assert isinstance(leader, errors.SyncFailed)
        assert "trainer rank 2 at 'let go'" in str(leader.report.outcomes[0].error)  # type: ignore[attr-defined]
        assert isinstance(follower, errors.DeadlineExceeded)
        assert "trainer rank 2" in str(follower)


async def test_a_rank_that_cannot_gather_says_so_to_the_others_at_once() -> None:
    async with running() as (replica, _):
        await load(replica, 1)
        trainer = Trainer([LocalHandle(replica)], deadline=60)
        trainer.sources[1].breaks_at = 1
        leader, broken, other = await trainer.sync()
        assert isinstance(broken, errors.TrainerFailed)
        assert "the gather broke" in broken.remote_traceback
        assert isinstance(other, errors.TrainerFailed)
        assert isinstance(leader, errors.SyncFailed)
        outcome = leader.report.outcomes[0]  # type: ignore[attr-defined]
        assert "trainer rank 1" in outcome.error
        assert outcome.outcome.value == "committed, fenced"


async def test_a_follower_without_its_leader_gives_up() -> None:
    trainer = Trainer([], deadline=0.3)
    follower, _ = await trainer.sync(without=0)
    assert isinstance(follower, errors.DeadlineExceeded)
    assert "trainer rank 0" in str(follower)


async def test_only_the_leader_has_replicas_n14() -> None:
    """Verbs of the others are no-ops that keep step with the leader's."""
    async with running() as (replica, _):
        await load(replica, 1)
        trainer = Trainer([LocalHandle(replica)])
        for manager in trainer.managers:
            manager.deployment = Deployment.HYBRID
        slept = await asyncio.gather(*(m.sleep_replicas() for m in trainer.managers))
        assert [sorted(reports) for reports in slept] == [[replica.name], [], []]
        with pytest.raises(errors.UsageError, match="rank 0"):
            CheckpointEngineManager(
                [LocalHandle(replica)], NaiveTransport(), ranks=trainer.managers[1].ranks
            )
