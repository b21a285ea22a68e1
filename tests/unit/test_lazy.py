"""``strategy=lazy``: published once, taken by each replica when it interrupts nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("torch")

from hotbunk.checkpoint_engine.lazy import TRIES
from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import Outcome, SyncPolicy, SyncReport
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.conformance.backends.oracle_kit import ask, running
from hotbunk.conformance.backends.oracle_pool import Noting, Weights, pool
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle.faults import Action, Fault
from hotbunk.rollout.contract import Deployment, FinishReason, Version

pytestmark = pytest.mark.anyio
LAZY: dict[str, Any] = {"strategy": "lazy", "max_lag": 2}
V = [Version(0, n) for n in range(10)]


def outcomes(report: SyncReport) -> dict[str, tuple[Outcome, Version | None]]:
    return {one.replica: (one.outcome, one.version) for one in report.outcomes}


async def settled(manager: CheckpointEngineManager, version: Version) -> None:
    for _ in range(3000):
        if set(manager.serves().values()) == {version}:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"not all came to {version}: {manager.serves()}")


async def test_a_busy_replica_finishes_first_and_says_meanwhile_what_it_serves() -> None:
    async with pool(**LAZY) as (manager, handles):
        await manager.adopt()
        busy = ask(handles[1].replica, "busy", 600)
        await busy.started()
        report = await manager.update_weights(Weights(2), V[2])
        assert report.ok
        assert outcomes(report) == dict.fromkeys(("r0", "r1", "r2"), (Outcome.DEFERRED, V[1]))
        assert report.deferred == ("r0", "r1", "r2")
        assert "publish" in report.phases
        assert manager.version == V[2]
        assert [h.name for h in manager.routable()] == ["r0", "r1", "r2"]
        await asyncio.sleep(1)
        assert not busy.done
        assert dict(manager.serves()) == {"r0": V[2], "r1": V[1], "r2": V[2]}
        done = await busy.result()
        assert done.finish_reason is FinishReason.LENGTH
        assert [span.version for span in done.spans] == [V[1]], "it was interrupted"
        await settled(manager, V[2])
        assert [outcomes(one) for one in manager.taken][-1] == {"r1": (Outcome.COMMITTED, V[2])}
        assert (manager.transport.sets, manager.transport.offers) == (1, 0)  # type: ignore[attr-defined]


async def test_versions_in_between_are_never_taken() -> None:
    async with pool(replicas=1, **LAZY) as (manager, handles):
        busy = ask(handles[0].replica, "busy", 600)
        await busy.started()
        for step in (2, 3):
            assert (await manager.update_weights(Weights(step), V[step])).deferred == ("r0",)
        await busy.result()
        await settled(manager, V[3])
        assert [one.version for one in manager.taken] == [V[3]]
        again = await manager.update_weights(Weights(3), V[3])
        assert outcomes(again) == {"r0": (Outcome.COMMITTED, V[3])}
        assert len(manager.taken) == 1


async def test_who_lags_more_than_the_policy_allows_is_synced_at_once() -> None:
    async with pool(replicas=2, **{**LAZY, "max_lag": 1}) as (manager, handles):
        busy = ask(handles[0].replica, "busy", 900)
        await busy.started()
        assert outcomes(await manager.update_weights(Weights(2), V[2]))["r0"][1] == V[1]
        await asyncio.sleep(1)  # r1 has taken it
        report = await manager.update_weights(Weights(3), V[3])
        assert outcomes(report) == {
            "r0": (Outcome.COMMITTED, V[3]),
            "r1": (Outcome.DEFERRED, V[2]),
        }
        cut = await busy.result()
        assert (cut.finish_reason, cut.retryable) == (FinishReason.ABORT, True)
        # Another incarnation is no lag that could be counted.
        report = await manager.update_weights(Weights(1), Version(1, 1))
        assert {one.outcome for one in report.outcomes} == {Outcome.COMMITTED}


async def test_who_sleeps_takes_it_as_it_wakes() -> None:
    async with pool(deployment=Deployment.HYBRID, **LAZY) as (manager, handles):
        await manager.sleep_replicas()
        report = await manager.update_weights(Weights(5), V[5])
        assert report.deferred == ("r0", "r1", "r2")
        assert all([(await h.status()).is_sleeping for h in handles])
        assert not manager.taken
        await manager.wake_replicas()
        assert set(manager.serves().values()) == {V[5]}
        for handle in handles:
            assert (await handle.status()).servable
            spans = (await ask(handle.replica, "a", 4).result()).spans
            assert [span.version for span in spans] == [V[5]]


async def test_who_is_asked_takes_it_now() -> None:
    async with pool(**LAZY) as (manager, handles):
        with pytest.raises(errors.SessionError, match="strategy=lazy"):
            await manager.catch_up()
        streams = [ask(h.replica, f"s{n}", 900) for n, h in enumerate(handles)]
        for one in streams:
            await one.started()
        await manager.update_weights(Weights(2), V[2])
        report = await manager.catch_up(["r1"])
        assert outcomes(report) == {"r1": (Outcome.COMMITTED, V[2])}
        assert [one.done for one in streams] == [False, True, False]
        assert (await manager.catch_up()).ok
        assert set(manager.serves().values()) == {V[2]}


async def test_one_that_joins_takes_what_is_published_and_only_then_is_routable_n1() -> None:
    async with pool(replicas=1, **LAZY) as (manager, handles), running() as (late, _):
        await manager.update_weights(Weights(9), V[9])
        late.name = "late"
        await manager.add_replica(Noting(late, handles[0].notes))
        assert "late" not in [h.name for h in manager.routable()], "its version is 8 steps old"
        await settled(manager, V[9])
        assert [h.name for h in manager.routable()] == ["r0", "late"]


async def test_a_take_that_fails_is_tried_again_and_then_left_to_the_next_version() -> None:
    always = Fault(Action.RAISE, errors.UpdateRefused("not now"))
    async with pool(replicas=2, **{**LAZY, "max_lag": 1}) as (manager, handles):
        handles[0].replica.backend.faults.at("update/accept", always, nth=None)  # type: ignore[attr-defined]
        await manager.update_weights(Weights(2), V[2])
        await asyncio.sleep(60)
        failed = [one for one in manager.taken if not one.ok]
        assert [outcomes(one) for one in failed] == [{"r0": (Outcome.ROLLED_BACK, V[1])}] * TRIES
        assert dict(manager.serves()) == {"r0": V[1], "r1": V[2]}, "it serves what it did"
        handles[0].replica.backend.faults.clear()  # type: ignore[attr-defined]
        report = await manager.update_weights(Weights(3), V[3])
        assert outcomes(report)["r0"] == (Outcome.COMMITTED, V[3])


async def test_one_that_was_poisoned_as_it_took_is_healed_by_the_next_try() -> None:
    breaks = {1: ("update/verify", Fault(Action.RAISE, RuntimeError("a kernel broke")))}
    async with pool(breaks, **LAZY) as (manager, _):
        await manager.update_weights(Weights(2), V[2])
        await settled(manager, V[2])
        ends = [one.outcomes[0].outcome for one in manager.taken if one.slowest == "r1"]
        assert ends == [Outcome.POISONED, Outcome.COMMITTED]


async def test_one_that_stays_poisoned_may_not_wait_for_the_next_version() -> None:
    broken = Fault(Action.RAISE, RuntimeError("a kernel broke"))
    async with pool(**LAZY) as (manager, handles):
        faults = handles[1].replica.backend.faults  # type: ignore[attr-defined]
        faults.at("update/verify", broken, nth=None)
        await manager.update_weights(Weights(2), V[2])
        await asyncio.sleep(60)
        assert [h.name for h in manager.routable()] == ["r0", "r2"]
        faults.clear()
        report = await manager.update_weights(Weights(3), V[3])
        assert outcomes(report)["r1"] == (Outcome.COMMITTED, V[3])


async def test_whoever_leaves_or_is_synced_otherwise_takes_nothing_more() -> None:
    async with pool(**LAZY) as (manager, handles):
        streams = [ask(h.replica, f"s{n}", 300) for n, h in enumerate(handles)]
        for one in streams:
            await one.started()
        await manager.update_weights(Weights(2), V[2])
        left = await manager.remove_replica("r2")
        report = await manager.update_weights(Weights(3), V[3], policy=SyncPolicy())
        assert {one.outcome for one in report.outcomes} == {Outcome.COMMITTED}
        await asyncio.sleep(60)
        assert not manager.taken
        assert (await left.status()).versions["target"] == V[1]
        with pytest.raises(errors.SessionError):
            await manager.catch_up()


async def test_a_manager_that_closes_leaves_no_watch_behind() -> None:
    async with pool(**LAZY) as (manager, handles):
        busy = ask(handles[0].replica, "busy", 900)
        await busy.started()
        await manager.update_weights(Weights(2), V[2])
        assert len(manager._lagging._watching) == 3
        await manager.close()
        await asyncio.sleep(0)
        assert not manager._lagging._watching


async def test_what_cannot_be_lazy_changes_nothing() -> None:
    async with pool(**LAZY) as (manager, handles):
        await manager.adopt()
        with pytest.raises(errors.UsageError, match="whole models"):
            await manager.update_adapter("a", Weights(2), V[2], base=Weights(1), base_version=V[1])

        async def let_go() -> None:
            raise AssertionError

        with pytest.raises(errors.UsageError, match="strategy=all"):
            await manager.update_weights(Weights(2), V[2], let_go=let_go)
        await manager.update_weights(Weights(3), V[3])
        await settled(manager, V[3])
        with pytest.raises(errors.VersionRegression):
            await manager.update_weights(Weights(2), V[2])
        manager.transport = NaiveTransport()
        with pytest.raises(errors.Unsupported, match="transport=disk"):
            await manager.update_weights(Weights(4), V[4])

        class Broken(Weights):
            def specs(self) -> Any:
                raise RuntimeError("the gather broke")

        with pytest.raises(errors.TrainerFailed, match="the gather broke"):
            await manager.update_weights(Broken(4), V[4])
        assert {(await h.status()).versions["target"] for h in handles} == {V[3]}
        assert len(manager.routable()) == 3


async def test_a_take_that_hangs_is_given_up_and_holds_nobody_else_up() -> None:
    hangs = {0: ("update/commit", Fault(Action.HANG))}
    async with pool(hangs, **{**LAZY, "deadline": 20.0}) as (manager, handles):
        await manager.update_weights(Weights(2), V[2])
        await asyncio.sleep(10)
        assert (manager.serves()["r1"], manager.serves()["r2"]) == (V[2], V[2])
        assert (await ask(handles[1].replica, "a", 4).result()).spans[0].version == V[2]
        await settled(manager, V[2])  # the next try heals it
        ends = [one.outcomes[0] for one in manager.taken if one.outcomes[0].replica == "r0"]
        assert [one.outcome for one in ends] == [Outcome.POISONED, Outcome.COMMITTED]
        assert ends[0].error_type == "DeadlineExceeded"


async def test_a_sync_of_all_waits_for_single_takes_and_comes_before_later_ones() -> None:
    slow = {0: ("update/commit", Fault(Action.DELAY, seconds=30.0))}
    async with pool(slow, **LAZY) as (manager, handles):
        await manager.update_weights(Weights(2), V[2])
        await asyncio.sleep(5)
        assert manager.syncing
        report = await manager.update_weights(Weights(3), V[3], policy=SyncPolicy())
        assert {one.outcome for one in report.outcomes} == {Outcome.COMMITTED}
        assert set(manager.serves().values()) == {V[3]}
        order = [what for what, name, _ in handles[0].notes if name == "r0"]
        assert order == ["paused", "acknowledged", "opened"] * 2, "two syncs of one replica at once"


async def test_one_that_is_removed_as_it_takes_is_led_back_and_turns_away() -> None:
    slow = {0: ("update/bucket", Fault(Action.DELAY, seconds=30.0))}
    async with pool(slow, **LAZY) as (manager, handles):
        await manager.update_weights(Weights(2), V[2])
        await asyncio.sleep(5)
        left = await manager.remove_replica("r0")
        await settled(manager, V[2])
        assert left is handles[0]
        await asyncio.sleep(60)
        status = await left.status()
        assert status.versions.get("target") != V[2]
        assert [p.owner for p in status.pauses][-1:] == ["caller"]
        with pytest.raises(errors.ReplicaRejecting):
            await ask(handles[0].replica, "b", 4).result()
