"""Who may be sent requests, and what a restarted manager, a newer sync or a removal make of it."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("torch")

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import Outcome, SyncPolicy, SyncReport
from hotbunk.conformance.backends.oracle_kit import ask, running
from hotbunk.conformance.backends.oracle_pool import Carrier, Noting, Weights, pool
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle.faults import Action, Fault
from hotbunk.rollout.contract import Deployment, FinishReason, PauseMode, Version
from hotbunk.rollout.status import Health

pytestmark = pytest.mark.anyio


def named(manager: CheckpointEngineManager) -> list[str]:
    return [handle.name for handle in manager.routable()]


async def test_an_added_replica_is_routable_only_at_the_current_version_n1() -> None:
    async with pool() as (manager, handles), running() as (late, _):
        assert (await manager.update_weights(Weights(2), Version(0, 2))).ok
        late.name = "late"
        await manager.add_replica(Noting(late, handles[0].notes))
        assert named(manager) == ["r0", "r1", "r2"]
        report = await manager.update_weights(Weights(2), Version(0, 2), replicas=["late"])
        assert [one.replica for one in report.outcomes] == ["late"]
        assert named(manager) == ["r0", "r1", "r2", "late"]
        with pytest.raises(errors.UsageError, match="late"):
            await manager.add_replica(Noting(late, []))


async def test_one_that_was_removed_is_never_returned_and_turns_away_n5() -> None:
    async with pool() as (manager, handles):
        await manager.adopt()
        running_one = ask(handles[1].replica, "old", 900)
        await running_one.started()
        handle = await manager.remove_replica("r1")
        assert named(manager) == ["r0", "r2"]
        assert (await running_one.result()).finish_reason is FinishReason.ABORT
        with pytest.raises(errors.ReplicaRejecting):
            await ask(handle.replica, "new", 4).result()  # type: ignore[attr-defined]
        with pytest.raises(errors.UsageError, match="r1"):
            await manager.remove_replica("r1")


async def test_removal_lets_requests_finish_while_it_may_wait() -> None:
    async with pool() as (manager, handles):
        short = ask(handles[0].replica, "short", 20)
        await short.started()
        await manager.remove_replica("r0", drain=300)
        assert (await short.result()).finish_reason is FinishReason.LENGTH
        endless = ask(handles[1].replica, "long", 900)
        await endless.started()
        await manager.remove_replica("r1", drain=0.01)
        assert (await endless.result()).finish_reason is FinishReason.ABORT


async def test_one_removed_during_a_sync_does_not_come_back() -> None:
    slow = {1: ("update/commit", Fault(Action.DELAY, seconds=20.0))}
    async with pool(slow) as (manager, _):
        syncing = asyncio.create_task(manager.update_weights(Weights(2), Version(0, 2)))
        await asyncio.sleep(5)
        await manager.remove_replica("r1")
        assert (await syncing).ok
        assert named(manager) == ["r0", "r2"]


async def test_one_that_failed_is_not_routable_until_a_resend_n6() -> None:
    broken = {1: ("update/verify", Fault(Action.RAISE, RuntimeError("a kernel broke")))}
    async with pool(broken) as (manager, _):
        await manager.adopt()
        assert named(manager) == ["r0", "r1", "r2"]
        with pytest.raises(errors.SyncFailed):
            await manager.update_weights(Weights(2), Version(0, 2))
        assert named(manager) == ["r0", "r2"]
        assert (await manager.update_weights(Weights(2), Version(0, 2))).ok
        assert named(manager) == ["r0", "r1", "r2"]


async def test_one_that_was_rolled_back_serves_an_old_version_and_is_not_routable() -> None:
    refuses = {2: ("update/accept", Fault(Action.RAISE, errors.UpdateRefused("not now")))}
    async with pool(refuses) as (manager, handles):
        await manager.adopt()
        with pytest.raises(errors.SyncFailed) as caught:
            await manager.update_weights(Weights(2), Version(0, 2))
        report = caught.value.report
        assert isinstance(report, SyncReport)
        assert report.outcomes[2].outcome is Outcome.ROLLED_BACK
        assert (await handles[2].status()).servable
        assert named(manager) == ["r0", "r1"]


@pytest.mark.parametrize("policy, serves", [("keep", True), ("fence", False)])
async def test_one_that_was_rolled_back_in_a_mixed_fleet_n6(policy: str, serves: bool) -> None:
    """The report has each replica's version, and a fence lasts until a sync commits there."""
    refuses = {2: ("update/accept", Fault(Action.RAISE, errors.UpdateRefused("not now")))}
    async with pool(refuses, on_failure=policy) as (manager, handles):
        with pytest.raises(errors.SyncFailed) as caught:
            await manager.update_weights(Weights(2), Version(0, 2))
        report = caught.value.report
        assert isinstance(report, SyncReport)
        assert [one.version for one in report.outcomes] == [Version(0, n) for n in (2, 2, 1)]
        assert [one.fenced for one in report.outcomes] == [False, False, not serves]
        assert (await handles[2].status()).is_paused is not serves
        asked = ask(handles[2].replica, "asked", 4)
        await asyncio.sleep(30)
        assert asked.done is serves
        assert (await manager.update_weights(Weights(2), Version(0, 2))).ok
        assert not (await handles[2].status()).is_paused
        assert (await asked.result()).finish_reason is FinishReason.LENGTH


async def test_a_fleet_that_stays_of_one_version_is_not_fenced_n6() -> None:
    fault = ("update/accept", Fault(Action.RAISE, errors.UpdateRefused("not now")))
    async with pool(dict.fromkeys(range(3), fault), on_failure="fence") as (manager, handles):
        with pytest.raises(errors.SyncFailed):
            await manager.update_weights(Weights(2), Version(0, 2))
        for handle in handles:
            assert not (await handle.status()).is_paused
            assert (await ask(handle.replica, "a", 4).result()).token_ids


async def test_a_manager_that_returns_goes_on_from_what_replicas_hold_v11() -> None:
    async with pool() as (manager, handles):
        assert (await manager.update_weights(Weights(5), Version(1, 5))).ok
        returned = CheckpointEngineManager(
            handles, Carrier(), deployment=Deployment.STANDALONE, policy=SyncPolicy()
        )
        assert returned.routable() == ()
        assert await returned.adopt() == Version(1, 5)
        assert named(returned) == ["r0", "r1", "r2"]
        assert returned.next_version(6) == Version(1, 6)
        assert returned.next_version(3) == Version(2, 3), "back at a checkpoint: a new incarnation"
        assert (await returned.update_weights(Weights(3), returned.next_version(3))).ok
        assert returned.version == Version(2, 3)


async def test_a_manager_that_returns_to_replicas_without_content_does_not_fall_behind_v11() -> (
    None
):
    """All are poisoned, or asleep for good: what they once committed counts, and nobody is routable."""
    broken = ("update/verify", Fault(Action.RAISE, RuntimeError("a kernel broke")))
    async with pool(dict.fromkeys(range(3), broken)) as (manager, handles):
        with pytest.raises(errors.SyncFailed):
            await manager.update_weights(Weights(9), Version(0, 9))
        for sleeps in (False, True):
            if sleeps:
                for handle in handles:
                    await handle.sleep(2)
            returned = CheckpointEngineManager(handles, Carrier(), deployment=Deployment.HYBRID)
            assert await returned.adopt() == Version(0, 1)
            assert await returned.newest_version() == Version(0, 1)
            assert returned.routable() == ()
            assert returned.next_version(1) == Version(1, 1)
        assert (await returned.update_weights(Weights(1), Version(1, 1))).ok
        assert named(returned) == ["r0", "r1", "r2"]


async def test_only_the_newest_of_waiting_syncs_is_made_u3() -> None:
    slow = {0: ("update/commit", Fault(Action.DELAY, seconds=20.0))}
    async with pool(slow) as (manager, _):
        let_go: list[int] = []

        def one(step: int) -> asyncio.Task[SyncReport]:
            async def letting_go() -> None:
                let_go.append(step)

            coro = manager.update_weights(Weights(step), Version(0, step), let_go=letting_go)
            return asyncio.create_task(coro)

        tasks = [one(2)]
        await asyncio.sleep(5)
        for step in (3, 5, 4):
            tasks.append(one(step))
            await asyncio.sleep(1)
        second, third, fifth, fourth = [await task for task in tasks]
        assert second.ok
        assert fifth.ok
        assert second.superseded_by is None
        assert (third.superseded_by, third.outcomes) == (Version(0, 5), ())
        assert fourth.superseded_by == Version(0, 5)
        assert fifth.superseded_by is None
        assert let_go == [2, 5]
        assert manager.transport.offers == 2  # type: ignore[attr-defined]
        assert manager.version == Version(0, 5)


async def test_a_rolling_sync_keeps_the_others_serving() -> None:
    async with pool(replicas=4, strategy="rolling(2)") as (manager, handles):
        streams = [ask(h.replica, f"old{n}", 900) for n, h in enumerate(handles)]
        for one in streams:
            await one.started()
        report = await manager.update_weights(Weights(2), Version(0, 2))
        assert report.ok
        order = [(what, name) for what, name, _ in handles[0].notes]
        assert order.index(("opened", "r1")) < order.index(("paused", "r2"))
        assert order.index(("opened", "r0")) < order.index(("paused", "r3"))
        for one in streams:
            await one.result()


async def test_a_rolling_sync_and_a_trainer_that_must_let_go_do_not_go_together() -> None:
    async def let_go() -> None:
        raise AssertionError

    async with pool(strategy="rolling(1)") as (manager, _):
        with pytest.raises(errors.UsageError, match="strategy=all"):
            await manager.update_weights(Weights(2), Version(0, 2), let_go=let_go)


@pytest.mark.parametrize("strategy", ["rolling", "rolling(0)", "some", "all(2)"])
def test_strategies_that_do_not_exist_are_refused(strategy: str) -> None:
    with pytest.raises(errors.ConfigError, match="strategy"):
        SyncPolicy(strategy=strategy)


async def test_verbs_on_all_replicas() -> None:
    async with pool() as (manager, handles):
        streams = [ask(h.replica, f"s{n}", 500) for n, h in enumerate(handles)]
        for one in streams:
            await one.started()
        reports = await manager.pause_replicas(PauseMode.KEEP, clear_cache=False)
        assert [report.frozen for report in reports.values()] == [("s0",), ("s1",), ("s2",)]
        freed = await manager.release_kv_replicas()
        assert all(report.freed > 0 for report in freed.values())
        assert {(await h.status()).kv.value for h in handles} == {"RELEASED"}
        await manager.resume_kv_replicas()
        assert {(await h.status()).is_paused for h in handles} == {True}, (
            "the caller's pause is gone"
        )
        await manager.resume_generation_replicas()
        ended = await manager.abort_replicas(["s0", "s2"])
        assert ended["r0"].aborted == ("s0",)
        assert ended["r1"].unknown == ("s0", "s2")
        assert (await streams[1].result()).finish_reason is FinishReason.LENGTH
        assert {(await h.status()).health for h in handles} == {Health.OK}
