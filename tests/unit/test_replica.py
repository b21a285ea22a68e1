"""The smaller rules of a replica."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hotbunk.conformance.backends.oracle_kit import ask, load, now, running
from hotbunk.conformance.rig import expect
from hotbunk.conformance.transfers import FailedElsewhere, MemoryTransfer
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.contract import (
    FinishReason,
    PauseMode,
    Scope,
    Version,
)
from hotbunk.rollout.errors import (
    ReplicaLost,
    RequestsInFlight,
    Unsupported,
    UpdateFailed,
)
from hotbunk.rollout.status import Health

pytestmark = pytest.mark.anyio


async def test_drain_deadline() -> None:
    """The pause stays held when wait was not over in time, and a longer one completes it."""
    async with running() as (replica, _):
        request = await ask(replica, "x", 500).started()
        error = await expect(
            RequestsInFlight, replica.pause_generation(PauseMode.WAIT, deadline=1.0)
        )
        assert error.ids == ("x",)
        assert (await replica.status()).is_paused
        await replica.pause_generation(PauseMode.WAIT)
        assert request.task.done() or len(request.tokens) == 500
        await replica.resume_generation()


async def test_sleep_undoes_its_pause_when_it_fails() -> None:
    async with running() as (replica, _):
        request = await ask(replica, "x", 500).started()
        await expect(RequestsInFlight, replica.sleep(1, mode=PauseMode.WAIT, deadline=1.0))
        status = await replica.status()
        assert not status.is_paused
        assert status.groups["target"] == "RESIDENT(0.0)"
        assert len((await request.task).token_ids) == 500


async def test_emulated_wait() -> None:
    """An engine that cannot drain by itself is drained at the gate."""
    async with running(unsupported=["pause.wait"]) as (replica, _):
        await expect(Unsupported, replica.pause_generation(PauseMode.WAIT))
        request = await ask(replica, "x").started()
        await load(replica, 1)
        assert len((await request.task).token_ids) == 50


async def test_abort_reports_what_the_engine_found() -> None:
    """An engine that finds none of the ids is not believed for the others (A1)."""
    async with running() as (replica, engine):
        request = await ask(replica, "x").started()

        async def deaf(request_ids: Any = None) -> Any:
            from hotbunk.rollout.contract import AbortReport

            return AbortReport((), tuple(request_ids))

        engine.abort = deaf  # type: ignore[method-assign]
        report = await replica.abort()
        assert report.aborted == ()
        assert report.unknown == ("x",)
        assert len((await request.task).token_ids) == 50


async def test_same_version_over_changed_bytes_is_sent() -> None:
    """The label alone is not believed: content that changed under it is replaced (U1)."""
    async with running() as (replica, engine):
        await load(replica, 1)
        engine.groups["target"].flip_a_bit()
        version = Version(0, 1)
        transfer = MemoryTransfer(weights_at(1), version=version)
        report = await replica.update_weights(transfer, version=version)
        assert not report.skipped
        again = await replica.update_weights(
            MemoryTransfer(weights_at(1), version=version), version=version
        )
        assert again.skipped
        assert again.verified == "applied"


async def test_the_same_version_is_judged_by_its_own_groups() -> None:
    """A poisoned adapter is no reason to send the base again."""
    async with running() as (replica, _):
        await load(replica, 1)
        version, scope = Version(0, 1), Scope.adapter("a", Version(0, 1))
        tensors = weights_at(1, ["adapter:a"])
        good = MemoryTransfer(tensors, version=version, scope=scope)
        await replica.update_weights(good, version=version, scope=scope)
        worse = Version(0, 2)
        bad = FailedElsewhere(weights_at(2, ["adapter:a"]), version=worse, scope=scope)
        await expect(UpdateFailed, replica.update_weights(bad, version=worse, scope=scope))
        again = MemoryTransfer(weights_at(1), version=version)
        report = await replica.update_weights(again, version=version)
        assert report.skipped
        assert report.verified == "applied"


async def test_an_engine_that_applies_too_little_has_failed() -> None:
    """Zero of n applied is a failure, whatever the engine says (B17)."""
    async with running() as (replica, engine):
        original = engine.update_weights

        async def lazy(*args: Any, **kwargs: Any) -> Any:
            import msgspec

            report = await original(*args, **kwargs)
            return msgspec.structs.replace(report, applied=0)

        engine.update_weights = lazy  # type: ignore[method-assign]
        with pytest.raises(Exception, match="applied 0 of"):
            await load(replica, 1)
        assert replica.health is Health.POISONED


async def test_poison_turns_new_requests_away_at_once() -> None:
    """During a pause, nobody waits for a replica that only a resend can heal."""
    async with running() as (replica, _):
        with pytest.raises(Exception, match="rank 1"):
            await load(replica, 1, FailedElsewhere)
        await replica.pause_generation()
        began = now()
        done = await ask(replica, "x").task
        assert done.finish_reason is FinishReason.ABORT
        assert done.retryable
        assert now() == began


async def test_a_poisoned_adapter_turns_only_its_users_away() -> None:
    async with running() as (replica, _):
        await load(replica, 1)
        scope = Scope.adapter("a", Version(0, 1))
        bad = FailedElsewhere(weights_at(1, ["adapter:a"]), version=Version(0, 1), scope=scope)
        with pytest.raises(Exception, match="rank 1"):
            await replica.update_weights(bad, version=Version(0, 1), scope=scope)
        await replica.pause_generation()
        base, user = ask(replica, "base"), ask(replica, "user", adapter="a")
        assert (await user.task).finish_reason is FinishReason.ABORT
        await asyncio.sleep(1)
        assert not base.done
        await replica.resume_generation()
        assert len((await base.task).token_ids) == 50


async def test_the_timeline_names_verbs_and_failures() -> None:
    async with running() as (replica, _):
        await replica.release_kv_cache()
        await replica.resume_kv_cache()
        with pytest.raises(Exception, match="rank 1"):
            await load(replica, 1, FailedElsewhere)
        told = [(event.name, event.error) for event in replica.timeline]
        assert ("release", "") in told
        assert ("resume_kv_cache", "") in told
        assert ("update_weights", "UpdateFailed") in told


async def test_errors_name_the_replica() -> None:
    async with running() as (replica, _):
        await replica.release()
        with pytest.raises(Exception, match=r"^\[r\]"):
            await load(replica, 1)


async def test_close_ends_everything_and_is_idempotent() -> None:
    async with running() as (replica, engine):
        request = await ask(replica, "x").started()
        await replica.close()
        done = await request.task
        assert done.finish_reason is FinishReason.ABORT
        assert engine.device.resident() == 0
        await expect(ReplicaLost, ask(replica, "y").task)
