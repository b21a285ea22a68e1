"""The replica's rules under faults: hung, dead, lying, late and racing engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hotbunk.conformance.rig import Running, expect
from hotbunk.conformance.transfers import FailedElsewhere, Hanging, MemoryTransfer
from hotbunk.rollout.backends.oracle import Device, FaultPlan, OracleEngine, create
from hotbunk.rollout.backends.oracle.model import weights_at
from hotbunk.rollout.contract import (
    FinishReason,
    GenerateRequest,
    PauseMode,
    Retention,
    Sampling,
    Scope,
    Tag,
    Version,
)
from hotbunk.rollout.errors import (
    DeadlineExceeded,
    EngineFailed,
    HostOutOfMemory,
    ReleaseIncomplete,
    ReplicaLost,
    RequestsInFlight,
    ResumeOutOfMemory,
    SessionError,
    Unsupported,
    WeightsNotLoaded,
    WeightsPoisoned,
)
from hotbunk.rollout.replica import Deadlines, Health, Replica

pytestmark = pytest.mark.anyio

PROMPT = tuple(range(1, 10))


@asynccontextmanager
async def running(
    *, deadlines: Deadlines | None = None, fed_groups: Any = None, **options: Any
) -> AsyncIterator[tuple[Replica, OracleEngine]]:
    """A started replica on an oracle."""
    engine = create(**options)
    replica = Replica(engine, name="r", deadlines=deadlines, fed_groups=fed_groups)
    await replica.start()
    try:
        yield replica, engine
        await replica.check_invariants()
    finally:
        await replica.close()


def ask(replica: Replica, name: str, tokens: int = 50, **more: Any) -> Running:
    request = GenerateRequest(name, PROMPT, Sampling(0, tokens), **more)
    return Running(replica.generate(request))


async def load(replica: Replica, step: int, kind: type[MemoryTransfer] = MemoryTransfer) -> None:
    version = Version(0, step)
    await replica.update_weights(kind(weights_at(step), version=version), version=version)


def now() -> float:
    return asyncio.get_running_loop().time()


# -- hung engines -----------------------------------------------------------------------------

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


# -- memory that lies -------------------------------------------------------------------------


async def test_memory_that_comes_late_is_waited_for() -> None:
    """release returns when the device has the memory, not before (M7)."""
    async with running() as (replica, engine):
        engine.device.late = 3
        report = await replica.release()
        assert engine.device.resident() == 0
        assert report.freed > 0


async def test_memory_that_never_comes() -> None:
    """ReleaseIncomplete with both numbers; the content is gone, and the state says so (M10)."""
    async with running() as (replica, engine):
        engine.device.withhold = 8
        error = await expect(ReleaseIncomplete, replica.sleep(2))
        assert error.measured < error.expected
        status = await replica.status()
        assert status.groups["target"] == "DISCARDED"
        assert not status.is_sleeping
        await expect(WeightsNotLoaded, ask(replica, "x").task)
        engine.device.withhold = 0
        await replica.resume()
        await load(replica, 1)
        assert (await ask(replica, "y").task).token_ids


async def test_no_room_for_a_backup() -> None:
    """HostOutOfMemory before anything is released, and sleep's pause is undone."""
    device = Device(host_capacity=100)
    async with running(device=device) as (replica, engine):
        before = engine.device.resident()
        error = await expect(HostOutOfMemory, replica.sleep(1))
        assert error.needed > error.free
        assert engine.device.resident() == before
        assert device.host_used == 0
        assert not (await replica.status()).is_paused
        assert (await ask(replica, "x").task).token_ids
        await replica.sleep(2)


async def test_waking_beside_a_trainer() -> None:
    """Room for the weights and not for KV: all or nothing, and staged it works (M1, M6)."""
    async with running() as (replica, engine):
        await replica.sleep(1)
        device = engine.device
        weights = sum(g.nbytes for g in engine.groups.values())
        device.tenant("trainer", device.free - weights)
        error = await expect(ResumeOutOfMemory, replica.wake_up())
        assert error.tag == Tag.KV_CACHE
        assert error.retryable
        assert device.resident() == 0, "what was mapped on the way was not undone"
        assert (await replica.status()).groups["target"] == "BACKED_UP(0.0)"
        assert device.host_used == weights
        await replica.wake_up([Tag.WEIGHTS])
        await load(replica, 1)
        await expect(ResumeOutOfMemory, replica.wake_up())
        assert (await replica.status()).is_sleeping
        device.tenant("trainer", 0)
        await replica.wake_up([Tag.KV_CACHE])
        assert (await ask(replica, "x").task).token_ids


async def test_peak_memory_is_the_sum_of_what_is_named() -> None:
    """Trainer share + weights, until KV comes back (M2)."""
    async with running() as (replica, engine):
        await replica.sleep(2)
        device = engine.device
        device.tenant("trainer", 1000)
        device.peak = 0
        await replica.wake_up([Tag.WEIGHTS])
        await load(replica, 1)
        assert device.peak == 1000 + sum(g.nbytes for g in engine.groups.values())


async def test_groups_that_no_sync_feeds_are_never_discarded() -> None:
    """They get a backup where there is one, else they stay (F: fed groups)."""
    for lacking, state in (((), "BACKED_UP(0.0)"), (("retention.backup",), "RESIDENT(0.0)")):
        async with running(fed=("target",), unsupported=lacking) as (replica, _):
            await replica.release(retention=Retention.DISCARD)
            groups = (await replica.status()).groups
            assert groups["target"] == "DISCARDED"
            assert groups["draft"] == groups["encoder"] == state
            await replica.resume()
            groups = (await replica.status()).groups
            assert groups["target"] == "EMPTY"
            assert groups["draft"] == "RESIDENT(0.0)"


async def test_fed_groups_can_be_fewer_than_feedable_ones() -> None:
    async with running(fed_groups=["target"]) as (replica, engine):
        await replica.release(retention=Retention.DISCARD)
        assert engine.groups["draft"].backup is not None
        assert engine.groups["target"].backup is None


# -- races ------------------------------------------------------------------------------------


async def test_a_slow_resume_does_not_overtake_the_pause_after_it() -> None:
    """The engine's resume is under way when a pause comes: it ends paused (H1)."""
    faults = FaultPlan()
    async with running(faults=faults) as (replica, engine):
        await replica.pause_generation()
        faults.delays("resume_generation", 5.0)
        resuming = asyncio.create_task(replica.resume_generation())
        await asyncio.sleep(1)
        early = ask(replica, "early")
        await replica.pause_generation()
        await resuming
        assert engine.scheduler.mode is PauseMode.ABORT
        late = ask(replica, "late")
        await asyncio.sleep(60)
        assert not late.tokens
        assert (await early.task).finish_reason is FinishReason.ABORT
        await replica.release()
        late.task.cancel()


async def test_an_owner_that_resumes_before_its_pause_began_leaves_no_pause_behind() -> None:
    faults = FaultPlan()
    async with running(faults=faults) as (replica, engine):
        await replica.pause_generation()
        faults.delays("resume_generation", 5.0)
        resuming = asyncio.create_task(replica.resume_generation())
        await asyncio.sleep(1)
        pausing = asyncio.create_task(replica.pause_generation())
        await asyncio.sleep(1)
        await replica.resume_generation()
        await resuming
        await expect(SessionError, pausing)
        assert engine.scheduler.mode is None
        assert (await ask(replica, "x").task).token_ids


async def test_a_resume_that_fails_can_be_repeated() -> None:
    faults = FaultPlan()
    async with running(faults=faults) as (replica, _):
        await replica.pause_generation()
        faults.raises("resume_generation", OSError("connection reset"))
        await expect(EngineFailed, replica.resume_generation())
        await replica.resume_generation()
        assert (await ask(replica, "x").task).token_ids


async def test_a_verb_does_not_turn_a_keep_into_a_drain() -> None:
    """keep and a KV release at the same time: the kept request is frozen, not finished."""
    async with running() as (replica, _):
        request = await ask(replica, "x").started()
        await asyncio.gather(replica.pause_generation(PauseMode.KEEP), replica.release_kv_cache())
        assert len(request.tokens) < 5
        assert not request.done
        await replica.resume_kv_cache()
        await replica.resume_generation()
        assert len((await request.task).token_ids) == 50


async def test_a_drain_waits_for_the_verb_in_progress() -> None:
    """wait after keep would let the frozen run in the middle of an update: only after it."""
    async with running() as (replica, _):
        request = await ask(replica, "x").started()
        await replica.pause_generation(PauseMode.KEEP)
        kept = len(request.tokens)
        hanging = Hanging(weights_at(1), version=Version(0, 1), at=0)
        hanging.reached = asyncio.Event()
        update = asyncio.create_task(
            replica.update_weights(hanging, version=Version(0, 1), deadline=5)
        )
        await hanging.reached.wait()
        await expect(DeadlineExceeded, replica.pause_generation(PauseMode.WAIT, deadline=2))
        assert len(request.tokens) == kept, "a frozen request ran during an update"
        await expect(DeadlineExceeded, update)
        assert (await request.task).finish_reason is FinishReason.ABORT
        await replica.resume_generation()


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"]])
async def test_nothing_is_drained_from_missing_content(tags: list[str]) -> None:
    """keep, release, then a pause with wait: the frozen stay frozen, and finish after."""
    async with running() as (replica, _):
        request = await ask(replica, "x").started()
        await replica.pause_generation(PauseMode.KEEP)
        kept = len(request.tokens)
        await replica.release(tags, retention=Retention.BACKUP)
        report = await replica.pause_generation(PauseMode.WAIT, owner="other")
        assert report.frozen == ("x",)
        await asyncio.sleep(60)
        assert len(request.tokens) == kept
        await replica.resume()
        await replica.resume_generation()
        await replica.resume_generation(owner="other")
        assert len((await request.task).token_ids) == 50


async def test_release_after_abort_does_not_wait_for_slow_readers() -> None:
    """An aborted request is not a kept one, though its client has not read the end yet."""
    async with running(unsupported=["keep_release"]) as (replica, _):
        stream = replica.generate(GenerateRequest("x", PROMPT, Sampling(0, 50)))
        await anext(stream)  # and then the client is busy elsewhere
        await replica.pause_generation(PauseMode.ABORT)
        await replica.release()
        await replica.resume()
        assert [c.finish_reason async for c in stream][-1] is FinishReason.ABORT


async def test_a_slow_reader_of_a_poisoned_replica_is_let_go() -> None:
    """It was frozen when the update broke; healing does not bring it back."""
    async with running() as (replica, _):
        stream = replica.generate(GenerateRequest("x", PROMPT, Sampling(0, 50)))
        await anext(stream)
        await replica.pause_generation(PauseMode.KEEP)
        with pytest.raises(Exception, match="rank 1"):
            await load(replica, 1, FailedElsewhere)
        await load(replica, 1)
        await replica.resume_generation()
        rest = [chunk async for chunk in stream]
        assert rest[-1].finish_reason is FinishReason.ABORT
        assert rest[-1].retryable
        assert "poisoned" in rest[-1].error


async def test_cancelled_waits_leave_nothing_behind() -> None:
    async with running() as (replica, _):
        await load(replica, 1)
        request = await ask(replica, "x").started()
        releasing = asyncio.create_task(replica.release())
        await asyncio.sleep(0.1)
        releasing.cancel()
        await asyncio.wait({releasing})
        assert len((await request.task).token_ids) == 50
        assert not (await replica.status()).is_paused
        assert (await ask(replica, "y").task).token_ids


async def test_verbs_take_turns() -> None:
    """Many at once, from many callers: one after the other, and the end is consistent."""
    async with running() as (replica, _):
        await asyncio.gather(
            *(replica.sleep(1) for _ in range(5)),
            *(replica.wake_up() for _ in range(5)),
            *(replica.release_kv_cache() for _ in range(5)),
        )
        await replica.wake_up()
        await load(replica, 1)
        assert (await ask(replica, "x").task).token_ids


# -- smaller rules ----------------------------------------------------------------------------


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
