"""A replica that could not be asked what became of a sync, and what is found out later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import OnFailure, Outcome, SyncPolicy, SyncReport
from hotbunk.conformance.backends.oracle_kit import ask, load, running
from hotbunk.conformance.backends.oracle_pool import Carrier, Noting, Weights
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle import FaultPlan
from hotbunk.rollout.backends.oracle.faults import Action, Fault
from hotbunk.rollout.contract import Deployment, Version
from hotbunk.rollout.status import Health, ReplicaStatus

pytestmark = pytest.mark.anyio
BREAKS = Fault(Action.RAISE, RuntimeError("a kernel broke"))
REFUSES = Fault(Action.RAISE, errors.UpdateRefused("not now"))


class CutOff(Noting):
    """A connection that is gone from a verb on, until it is mended: nothing answers.

    ``at``: the verb; the replica has done it when ``reaches``, whatever is heard of it.
    """

    at = ""
    reaches = True
    gone = False

    async def _answered(self, verb: str, done: Any) -> Any:
        if self.gone or (verb == self.at and not self.reaches):
            self.gone = True
            done.close()
            await asyncio.sleep(1e6)
        try:
            return await done
        finally:
            if verb == self.at:
                self.gone = True
                raise errors.DeadlineExceeded(verb, 1.0, where=self.name)

    async def status(self) -> ReplicaStatus:
        return await self._answered("status", super().status())  # type: ignore[no-any-return]

    async def update_weights(self, source: Any, **more: Any) -> Any:
        return await self._answered("update", super().update_weights(source, **more))

    async def resume_generation(self, **more: Any) -> None:
        await self._answered("open", super().resume_generation(**more))


@asynccontextmanager
async def cut_off(
    at: str,
    fault: tuple[str, Fault] | None = None,
    *,
    reaches: bool = True,
    everybody: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[CheckpointEngineManager, CutOff, SyncReport]]:
    """A sync to two replicas of which the first is not heard of after the verb ``at``.

    The fault is the first's, or everybody's.
    """
    plans = [FaultPlan(), FaultPlan()]
    async with running(faults=plans[0]) as (one, _), running(faults=plans[1]) as (other, _):
        other.name = "r1"
        handle = CutOff(one, [])
        handles = [handle, Noting(other, handle.notes)]
        for replica in (one, other):
            await load(replica, 1)
        if fault is not None:
            for plan in plans[: 1 + everybody]:
                plan.at(*fault)
        policy = SyncPolicy(deadline=20.0, **options)
        manager = CheckpointEngineManager(
            handles, Carrier(), deployment=Deployment.STANDALONE, policy=policy
        )
        await manager.adopt()
        handle.at, handle.reaches = at, reaches
        with pytest.raises(errors.SyncFailed) as caught:
            await manager.update_weights(Weights(2), Version(0, 2))
        report = caught.value.report
        assert isinstance(report, SyncReport)
        assert report.outcomes[0].outcome is Outcome.IN_DOUBT
        assert report.outcomes[0].error
        assert "r" not in {h.name for h in manager.routable()}, "it may serve anything"
        handle.at = ""
        yield manager, handle, report


async def later(manager: CheckpointEngineManager, handle: CutOff, report: SyncReport) -> Any:
    """Its outcome, when it can be asked again."""
    handle.gone = False
    return (await manager.resolve(report)).outcomes[0]


async def serves(handle: CutOff) -> bool:
    """Whether a request that comes now ends."""
    asked = ask(handle.replica, "now", 4)
    await asyncio.sleep(30)
    done = asked.done
    if not done:
        await handle.replica.abort()
    return done


async def test_one_that_still_is_silent_stays_in_doubt() -> None:
    async with cut_off("update") as (manager, handle, report):
        assert await asyncio.wait_for(manager.resolve(report), 60.0) == report
        handle.gone = False


async def test_one_whose_last_word_was_lost_has_committed() -> None:
    async with cut_off("open") as (manager, handle, report):
        one = await later(manager, handle, report)
        assert (one.outcome, one.version, one.fenced) == (Outcome.COMMITTED, Version(0, 2), False)
        assert await serves(handle)
        assert len(manager.routable()) == 2


async def test_one_whose_commit_was_not_heard_of_is_fenced_until_the_next_sync() -> None:
    async with cut_off("update") as (manager, handle, report):
        one = await later(manager, handle, report)
        assert (one.outcome, one.version) == (Outcome.FENCED, Version(0, 2))
        assert not await serves(handle)
        assert (await manager.update_weights(Weights(2), Version(0, 2))).ok
        assert await serves(handle)


async def test_one_that_took_nothing_was_rolled_back_and_serves_again() -> None:
    """Weights, residency *and pauses* as before: the sync's pause was still held."""
    async with cut_off("update", ("update/accept", REFUSES)) as (manager, handle, report):
        one = await later(manager, handle, report)
        assert (one.outcome, one.fenced) == (Outcome.ROLLED_BACK, False)
        assert await serves(handle)
        assert [h.name for h in manager.routable()] == ["r1"], "the fleet is ahead of it"
        assert (await manager.update_weights(Weights(2), Version(0, 2))).ok


async def test_one_that_took_nothing_stays_shut_where_the_policy_fences() -> None:
    async with cut_off("update", ("update/accept", REFUSES), on_failure=OnFailure.FENCE) as (
        manager,
        handle,
        report,
    ):
        one = await later(manager, handle, report)
        assert (one.outcome, one.fenced) == (Outcome.ROLLED_BACK, True)
        assert not await serves(handle)
        assert (await manager.update_weights(Weights(2), Version(0, 2))).ok
        assert await serves(handle)


async def test_one_whose_pause_could_not_be_ended_is_opened_when_it_is_asked_again() -> None:
    """It was led back, but for the last step of it."""
    async with cut_off("open", ("update/accept", REFUSES), reaches=False) as (
        manager,
        handle,
        report,
    ):
        one = await later(manager, handle, report)
        assert (one.outcome, one.fenced) == (Outcome.ROLLED_BACK, False)
        assert await serves(handle)


async def test_one_that_was_half_written_is_poisoned_and_healed_by_a_resend() -> None:
    async with cut_off("update", ("update/verify", BREAKS)) as (manager, handle, report):
        one = await later(manager, handle, report)
        assert (one.outcome, one.version) == (Outcome.POISONED, None)
        assert (await manager.update_weights(Weights(2), Version(0, 2))).ok
        assert await serves(handle)


async def test_one_that_hangs_for_good_is_lost() -> None:
    hangs = Fault(Action.HANG, stubborn=True)
    async with cut_off("update", ("update/verify", hangs)) as (manager, handle, report):
        one = await later(manager, handle, report)
        assert one.outcome is Outcome.LOST
        assert (await handle.status()).health is Health.LOST


async def test_one_that_is_no_member_any_more_is_not_asked() -> None:
    async with cut_off("update") as (manager, handle, report):
        manager.forget_replica(handle.name)
        assert await manager.resolve(report) == report
        handle.gone = False


async def test_a_fleet_that_fails_as_one_is_opened_and_who_cannot_be_is_in_doubt() -> None:
    """Under ``fence`` nobody is ahead, so nobody is held shut; one pause cannot be ended."""
    async with cut_off(
        "open",
        ("update/accept", REFUSES),
        reaches=False,
        on_failure=OnFailure.FENCE,
        everybody=True,
    ) as (manager, handle, report):
        assert report.outcomes[1].outcome is Outcome.ROLLED_BACK
        one = await later(manager, handle, report)
        assert one.outcome is Outcome.ROLLED_BACK
